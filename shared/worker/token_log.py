"""The tokens of one sequence that its gateway has not acknowledged: pure (invariant 3, the worker's side).

Answer tokens are numbered from 0.
  [0, base)            acknowledged and forgotten
  [base, next_index)   kept; a gateway that missed something asks for them again
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from shared.contracts import limits
from shared.contracts.epoch import Epoch
from shared.contracts.errors import ErrorRecord, Overloaded
from shared.contracts.ids import GatewayId, RequestId
from shared.contracts.messages import FinishReason, PrefillTiming, TokenEntry, TokenLogprob


class TokenLog:
    """`hit_tokens` and `timing` ride on every entry that holds token 0, `finish` and `error` on every last one."""

    def __init__(self, request: RequestId, epoch: Epoch, gateway: GatewayId, *, hit_tokens: int | None) -> None:
        self.request = request
        self.epoch = epoch
        self.gateway = gateway
        self.hit_tokens = hit_tokens
        self.timing: PrefillTiming | None = None
        self.finish: FinishReason | None = None
        self.error: ErrorRecord | None = None
        self._base = 0
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob | None] = []

    @property
    def next_index(self) -> int:
        return self._base + len(self._tokens)

    @property
    def acknowledged(self) -> int:
        return self._base

    def append(self, first: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None:
        """Raises Overloaded when the gateway let limits.TOKEN_LOG_MAX tokens go by without a word.

        `first` must be `next_index`: the engine numbers without gaps, and anything else is a bug (ValueError).
        """
        if first != self.next_index:
            raise ValueError(f"token {first} follows {self.next_index - 1}")
        if len(self._tokens) + len(tokens) > limits.TOKEN_LOG_MAX:
            raise Overloaded("the gateway acknowledges no tokens")
        self._tokens.extend(tokens)
        self._logprobs.extend(logprobs if logprobs is not None else [None] * len(tokens))

    def acknowledge(self, received: int) -> None:
        """Forgets tokens below `received`; an older or a foreign count changes nothing."""
        if not self._base < received <= self.next_index:
            return
        del self._tokens[: received - self._base]
        del self._logprobs[: received - self._base]
        self._base = received

    def entries_from(self, first: int) -> list[TokenEntry]:
        """What is kept from index `first` on, as entries whose tokens all have log probabilities or all have none.

        At least one entry, so that a lost `finish` or `error` can be asked for.
        """
        start = min(max(first, self._base), self.next_index)
        runs = list(self._runs(start))
        return [
            self._entry(index, tokens, logprobs, last=i == len(runs) - 1)
            for i, (index, tokens, logprobs) in enumerate(runs)
        ]

    def _runs(self, start: int) -> Iterator[tuple[int, tuple[int, ...], tuple[TokenLogprob, ...] | None]]:
        kept = range(start - self._base, len(self._tokens))
        if not kept:
            yield start, (), None
        for known, group in groupby(kept, key=lambda i: self._logprobs[i] is not None):
            indices = list(group)
            logprobs = tuple(p for i in indices if (p := self._logprobs[i]) is not None)
            yield self._base + indices[0], tuple(self._tokens[i] for i in indices), logprobs if known else None

    def _entry(
        self, first: int, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...] | None, *, last: bool
    ) -> TokenEntry:
        return TokenEntry(
            request=self.request,
            epoch=self.epoch,
            first=first,
            tokens=tokens,
            logprobs=logprobs,
            hit_tokens=self.hit_tokens if first == 0 else None,
            timing=self.timing if first == 0 else None,
            finish=self.finish if last else None,
            error=self.error if last else None,
        )
