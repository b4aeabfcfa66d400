"""The answer tokens that the gateway has of one request: pure (invariant 3).

Answer tokens are numbered from 0.
  [0, taken)         given to the output processor
  [taken, received)  here, in order, not processed yet
  [received, …)      not here; nothing past a gap is ever let in, the gateway asks for “from received” instead
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from shared.contracts.block import pack_tokens
from shared.contracts.errors import InternalError
from shared.contracts.messages import TokenLogprob


class TokenLog:
    """A gapless prefix without repeats of one token sequence."""

    def __init__(self, tokens_max: int) -> None:
        self._tokens = array("I")
        self._pending: list[tuple[int, TokenLogprob | None]] = []
        self._tokens_max = tokens_max

    @property
    def received(self) -> int:
        return len(self._tokens)

    @property
    def waiting(self) -> int:
        return len(self._pending)

    def add(self, first: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> int:
        """Takes in what continues the prefix; returns how many tokens are new. Repeats and tokens past a gap are 0.

        Raises InternalError when a repeat differs from what is known (a worker that was to replay it drew another
        token), when there are more tokens than granted, or when log probabilities do not pair with tokens.
        """
        if logprobs is not None and len(logprobs) != len(tokens):
            raise InternalError(f"{len(logprobs)} log probabilities for {len(tokens)} tokens")
        received = len(self._tokens)
        if first > received:
            return 0
        known = max(min(received - first, len(tokens)), 0)
        if list(tokens[:known]) != self._tokens[first : first + known].tolist():
            raise InternalError(f"the answer diverged between tokens {first} and {first + known}")
        if received + len(tokens) - known > self._tokens_max:
            raise InternalError(f"more than the granted {self._tokens_max} answer tokens")
        self._tokens.extend(tokens[known:])
        new_logprobs = logprobs[known:] if logprobs is not None else [None] * (len(tokens) - known)
        self._pending.extend(zip(tokens[known:], new_logprobs, strict=True))
        return len(tokens) - known

    def take(self) -> list[tuple[int, TokenLogprob | None]]:
        """What is new since the last call, in order; it is remembered from now on without log probabilities."""
        taken, self._pending = self._pending, []
        return taken

    def packed(self) -> bytes:
        """All tokens, for a worker that takes the request over."""
        return pack_tokens(self._tokens)
