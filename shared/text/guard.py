"""Which text of a rendered prompt may become special tokens: the template's, never the client's.

A chat template mixes its own markers (`<|im_start|>`) with text from the request. Before rendering, `protect` breaks
every spelling of a marker inside a request's text with a seal, a code point that occurs nowhere in the request; after
rendering, `split` finds the markers that are still whole, which only the template can have written, and takes the seals
out again. A template may trim, test or cut its values as it likes: the seal travels inside the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from typing import Final, NamedTuple

from shared.contracts.errors import InvalidRequest, SettingsError

_SEALS: Final = tuple(chr(point) for point in range(0xFDD0, 0xFDF0))
"""Noncharacters: valid in Python strings and UTF-8, never assigned to text."""


class Marker(NamedTuple):
    """The spelling of an added token; `lstrip` and `rstrip`: it swallows the white space beside it."""

    text: str
    lstrip: bool = False
    rstrip: bool = False


class Piece(NamedTuple):
    """A stretch of a rendered prompt: a marker of the template, or text without any special token."""

    text: str
    marker: bool


def free_seals(texts: Sequence[str], count: int) -> list[str]:
    """`count` code points that no text contains. Raises InvalidRequest when the texts use up all noncharacters."""
    free = list(islice((seal for seal in _SEALS if not any(seal in text for text in texts)), count))
    if len(free) < count:
        raise InvalidRequest("The messages contain reserved code points (U+FDD0 to U+FDEF).")
    return free


class Guard:
    """Keeps the spellings of `markers` in request text from becoming special tokens."""

    def __init__(self, markers: Sequence[Marker]) -> None:
        short = [marker.text for marker in markers if len(marker.text) < 2]
        if short:
            raise SettingsError(f"the tokenizer has added tokens of one character, which cannot be told apart: {short}")
        longest_first = sorted(markers, key=lambda marker: len(marker.text), reverse=True)
        texts = [re.escape(marker.text) for marker in longest_first]
        self._start = re.compile(f"(?={'|'.join(texts)})") if texts else None
        self._whole = re.compile(_any_of(longest_first)) if texts else None
        self._heads = {marker.text[:n] for marker in markers for n in range(1, len(marker.text))}
        self._tails = {marker.text[n:] for marker in markers for n in range(1, len(marker.text))}
        self._reach = max((len(marker.text) for marker in markers), default=0)

    def protect(self, text: str, seal: str) -> str:
        """`text` with `seal` in every marker's spelling, and where an edge could join the template's text to one."""
        if self._start is None:
            return text
        broken, last = [], 0
        for match in self._start.finditer(text):
            broken += [text[last : match.start() + 1], seal]
            last = match.start() + 1
        return self._seal_edges("".join(broken) + text[last:], seal)

    def split(self, rendered: str, seal: str) -> list[Piece]:
        """Alternating text and markers of a rendered prompt, seals removed, no empty pieces."""
        pieces, last = [], 0
        for match in self._whole.finditer(rendered) if self._whole else ():
            pieces.append(Piece(rendered[last : match.start()].replace(seal, ""), marker=False))
            pieces.append(Piece(match[match.lastindex or 0], marker=True))
            last = match.end()
        pieces.append(Piece(rendered[last:].replace(seal, ""), marker=False))
        return [piece for piece in pieces if piece.text]

    def _seal_edges(self, text: str, seal: str) -> str:
        core = text.strip()
        if not core:
            return text
        start = len(text) - len(text.lstrip())
        lengths = range(1, min(self._reach, len(core) + 1))
        before = seal if any(core[:n] in self._tails for n in lengths) else ""
        after = seal if any(core[-n:] in self._heads for n in lengths) else ""
        return text[:start] + before + core + after + text[start + len(core) :]


def _any_of(longest_first: Sequence[Marker]) -> str:
    """All markers, the longer before the shorter. Where none swallows white space they are one group of literals, whose
    common beginning the engine looks for at once: ten times faster over a long prompt."""
    if any(marker.lstrip or marker.rstrip for marker in longest_first):
        return "|".join(_pattern(marker) for marker in longest_first)
    return f"({'|'.join(re.escape(marker.text) for marker in longest_first)})"


def _pattern(marker: Marker) -> str:
    """One alternative; its one group is the marker without the white space that it swallows."""
    before = r"\s*" if marker.lstrip else ""
    after = r"\s*" if marker.rstrip else ""
    return f"{before}({re.escape(marker.text)}){after}"
