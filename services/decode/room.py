"""How many pages an answer is promised: pure.

Limits on answers are large and most answers are short, so that promising every answer its limit would leave most pages
empty. A first promise covers limits.ANSWER_TOKENS_EXPECTED; an answer that outgrows it while pages are short leaves the
engine and comes back, with everything that is known, under a promise of its whole limit.
"""

from __future__ import annotations

from shared.contracts import limits


def pages_promised(prompt_tokens: int, known_tokens: int, answer_max: int, block_tokens: int, *, whole: bool) -> int:
    """Pages for the prompt and what the answer is expected to grow to (`whole`: may grow to)."""
    expected = answer_max if whole else min(answer_max, known_tokens + limits.ANSWER_TOKENS_EXPECTED)
    return -(-(prompt_tokens + expected) // block_tokens)
