"""One try at a request: the work message, its grant, its epoch. Nothing in it is believed unverified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
import structlog

from shared.contracts import limits, messages
from shared.contracts.block import unpack_tokens
from shared.contracts.epoch import Epoch, Stage
from shared.contracts.errors import DeepServeError
from shared.contracts.messages import DecodeWork, PrefillWork
from shared.contracts.ports import Delivery, EngineProfile
from shared.contracts.tag import GrantClaims, pool_open
from shared.contracts.usage import Usage, of_request

log = structlog.get_logger()

W = TypeVar("W", PrefillWork, DecodeWork)
VerifyGrant = Callable[[str, float], GrantClaims]
"""(statement, now) → claims; raises an error of the tree on anything that is not a valid grant."""


@dataclass(frozen=True, slots=True)
class Attempt(Generic[W]):
    work: W
    grant: GrantClaims
    epoch: Epoch
    prompt: list[int]

    def answer_max(self, profile: EngineProfile) -> int:
        """Answer tokens in all: what the grant allows, and what the context has room for."""
        return min(self.grant.max_output_tokens, profile.context_tokens - len(self.prompt))

    def seconds_left(self, now_s: float) -> float:
        """Until the request's deadline, 0 when it is over."""
        return max(self.grant.deadline_s - now_s, 0.0)


def read(kind: type[W], stage: Stage, delivery: Delivery, verify: VerifyGrant, now_s: float) -> Attempt[W] | None:
    """None for a message that nobody can work on: unreadable, with a grant that is not valid or another request's."""
    try:
        work = messages.decode(kind, delivery.payload)
        grant = verify(work.grant, now_s)
        prompt = unpack_tokens(work.tokens)
    except (msgspec.MsgspecError, ValueError, DeepServeError) as error:
        log.warning("work.unreadable", subject=delivery.subject, error=str(error))
        return None
    if grant.request != work.request or grant.model != work.model or not prompt:
        log.warning("work.foreign", subject=delivery.subject, request=work.request)
        return None
    return Attempt(work, grant, Epoch(work.attempt, stage, delivery.number), prompt)


def usage_of(attempt: Attempt[W], hit_tokens: int, output: int, reasoning: int) -> Usage:
    """The request's usage, once (invariant 8). A request without the pool hit nothing, whatever a message says."""
    open_ = pool_open(attempt.grant)
    return of_request(
        prompt_tokens=len(attempt.prompt),
        hit_tokens=min(max(hit_tokens, 0), len(attempt.prompt)) if open_ else 0,
        pool_open=open_,
        output=max(output, 0),
        reasoning=min(max(reasoning, 0), max(output, 0)),
    )


def patience_s(attempt: Attempt[W], now_s: float) -> float:
    """How long this try may wait for room: to the request's deadline, within limits.PAGES_WAIT_S."""
    return min(attempt.seconds_left(now_s), limits.PAGES_WAIT_S)
