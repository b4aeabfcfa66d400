"""Texts of a wanted length in tokens, the same on every machine. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

_WORDS: Final = (
    *("river", "stone", "paper", "engine", "window", "garden", "letter", "market", "silver", "winter"),
    *("harbour", "candle", "forest", "mirror", "bridge", "teacher", "station", "kitchen", "island", "blanket"),
    *("copper", "meadow", "railway", "library", "orchard", "morning", "village", "cabinet"),
)


def document(tokens: int, count: Callable[[str], int]) -> str:
    """A text of at most `tokens` tokens and as near to it as a whole word allows. `count`: tokens of a text."""
    words: list[str] = []
    state = 1
    # A word is at least one token, so this many words are enough.
    for number in range(tokens):
        state = (state * 1_103_515_245 + 12_345) % 2**31
        word = _WORDS[state // 65_536 % len(_WORDS)]
        words.append(f"{word}." if number % 12 == 11 else word)
    low, high = 0, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        if count(" ".join(words[:middle])) <= tokens:
            low = middle
        else:
            high = middle - 1
    return " ".join(words[:low])
