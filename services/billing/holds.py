"""A hold as a value, what counts as the same hold and the same usage, and what a usage may claim. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from services.billing.ledger import Act, Funds
from services.billing.pricing import Prices
from shared.contracts import limits
from shared.contracts.block import digest
from shared.contracts.errors import InvalidRequest
from shared.contracts.ids import AccountId, HoldId, KeyId, RequestId
from shared.contracts.lifecycle import HoldState
from shared.contracts.messages import Hold
from shared.contracts.tag import GrantClaims
from shared.contracts.usage import Usage

EXPIRES_AFTER_S: Final = limits.SETTLE_ALLOWANCE_S + limits.CLOCK_SKEW_S
"""From the request's deadline to the expiry of its hold: as long as the grant is good for settlement."""


@dataclass(frozen=True)
class HeldRequest:
    """A hold with the prices as they were when it was placed; `reserved` sums to what it holds."""

    id: HoldId
    request: RequestId
    account: AccountId
    key_id: KeyId
    prompt_tokens: int
    max_output_tokens: int
    reserved: Funds
    prices: Prices
    claims: GrantClaims
    input_hash: bytes
    state: HoldState
    created_at: datetime


def hold_hash(hold: Hold, account: AccountId) -> bytes:
    """Equal for a repeat of the same hold. A renewed tag and a deadline counted anew do not make it another one: what
    was granted first stays granted."""
    fields = (
        account,
        hold.request,
        hold.model,
        "" if hold.user_id is None else f"={hold.user_id}",
        hold.traffic_class,
        str(hold.prompt_tokens),
        str(hold.max_output_tokens),
    )
    return digest("deepserve/billing/hold/1", *(field.encode() for field in fields))


def usage_hash(request: RequestId, usage: Usage) -> bytes:
    """Equal for a repeat of the same usage, whichever worker and epoch reports it: usage is counted for each request
    and not for each try (invariant 8)."""
    counts = (usage.cached, usage.uncached, usage.not_eligible, usage.output, usage.reasoning)
    return digest("deepserve/billing/usage/1", request.encode(), *(str(count).encode() for count in counts))


def end_hash(act: Act, hold: HoldId) -> bytes:
    """Of an end that has no content but its hold."""
    return digest("deepserve/billing/end/1", act.encode(), hold.encode())


def check_usage(held: HeldRequest, usage: Usage) -> None:
    """Raises InvalidRequest on a usage that this hold cannot have had: it would pass the hold or break the sums."""
    if usage.prompt_tokens != held.prompt_tokens:
        raise InvalidRequest(f"usage of {usage.prompt_tokens} prompt tokens, {held.prompt_tokens} were held")
    if usage.output > held.max_output_tokens:
        raise InvalidRequest(f"usage of {usage.output} output tokens, at most {held.max_output_tokens} were held")
    if usage.cached and not held.claims.cache_read:
        raise InvalidRequest("usage of hits under a grant that does not open the pool")
