"""Token counts of one request in disjoint classes (design, section 7; invariant 8)."""

from __future__ import annotations

import msgspec


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Disjoint: every prompt token is cached, uncached or not eligible. All in tokens, all at least 0.

    `cached`: read from the pool. `uncached`: computed though the pool was open. `not_eligible`: computed with the
    pool closed (a trial account). `output`: emitted, of which `reasoning` inside thinking.
    """

    cached: int
    uncached: int
    not_eligible: int
    output: int
    reasoning: int = 0

    def __post_init__(self) -> None:
        if min(self.cached, self.uncached, self.not_eligible, self.output, self.reasoning) < 0:
            raise ValueError(f"negative token count in {self!r}")
        if self.reasoning > self.output:
            raise ValueError("reasoning tokens exceed output tokens")

    @property
    def prompt_tokens(self) -> int:
        return self.cached + self.uncached + self.not_eligible


def of_request(*, prompt_tokens: int, hit_tokens: int, pool_open: bool, output: int, reasoning: int = 0) -> Usage:
    """The classes of a request whose prefill read `hit_tokens` from the pool."""
    if not 0 <= hit_tokens <= prompt_tokens:
        raise ValueError(f"hit of {hit_tokens} outside a prompt of {prompt_tokens}")
    if hit_tokens and not pool_open:
        raise ValueError("a request without the pool cannot hit it")
    rest = prompt_tokens - hit_tokens
    return Usage(
        cached=hit_tokens,
        uncached=rest if pool_open else 0,
        not_eligible=0 if pool_open else rest,
        output=output,
        reasoning=reasoning,
    )
