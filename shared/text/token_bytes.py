"""The bytes behind a token's spelling in `tokenizer.json`. Pure.

A byte-level vocabulary spells each byte as one printable character (GPT-2's table), a vocabulary with byte fallback
spells a lone byte as `<0x0A>`; a token may be a part of a character, which no text can show.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

_LONE_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _alphabet() -> dict[str, int]:
    """The character of each byte: printable ones stand for themselves, the others follow from U+0100 on."""
    themselves = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(themselves)]
    return {chr(byte): byte for byte in themselves} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES: Final = _alphabet()


def is_byte_level(fields: Mapping[str, Any]) -> bool:
    """Whether this `tokenizer.json` decodes by GPT-2's table: every byte of a text is then in exactly one token."""
    decoder = fields.get("decoder") or {}
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    return any(step.get("type") == "ByteLevel" for step in steps)


class Measure(NamedTuple):
    """How much text a token can stand for: `longest` bytes of it, beside any number of the `dropped` ones, which the
    vocabulary lacks and the encoder leaves out. `longest` is None where no bound is known."""

    longest: int | None
    dropped: bytes = b""

    def least_tokens(self, text: str) -> int:
        """What `text` has at the very least."""
        return -(-len(text.encode().translate(None, self.dropped)) // self.longest) if self.longest else 0


def measure(fields: Mapping[str, Any]) -> Measure:
    """Of a `tokenizer.json`. A normalizer may drop text, and outside of byte-level vocabularies an unknown token
    swallows it: there is no bound then."""
    vocabulary = fields["model"].get("vocab")
    if not is_byte_level(fields) or fields.get("normalizer") is not None or not isinstance(vocabulary, dict):
        return Measure(None)
    dropped = bytes(byte for char, byte in _BYTES.items() if char not in vocabulary)
    return Measure(max(map(len, vocabulary), default=None), dropped)


def spelled_bytes(spelling: str) -> bytes | None:
    """The bytes of a byte-level or byte-fallback spelling; None for a spelling that is not one."""
    lone = _LONE_BYTE.fullmatch(spelling)
    if lone:
        return bytes.fromhex(lone[1])
    if all(char in _BYTES for char in spelling):
        return bytes(_BYTES[char] for char in spelling)
    return None


def shown(data: bytes) -> str:
    """A token's text; bytes that are no text are written as `\\xf0`, as the official output processor does."""
    return data.decode("utf-8", "backslashreplace")
