"""What the right answers are, by formulas of their own: tokens of a prompt, tokens of an answer, amounts of money.

Shares no code with what it judges. The engine of hashes is described in words (and here in other code): the KV of a
token is BLAKE2b (8 bytes, person "kv") of the KV before it and the token; the state is BLAKE2b (person "state") of all
KV; the next token is BLAKE2b (person "draw") of state and seed, modulo the vocabulary, and never a stop token.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from fractions import Fraction
from hashlib import blake2b
from typing import Any, Final

START, STOP = 97, 98
_SHOWN: Final = "".join(map(chr, range(33, 127))) + " \n"
_IDS: Final = {character: number for number, character in enumerate(_SHOWN)}
_VOCABULARY: Final = 99
_MASK: Final = 2**64 - 1


def prompt_tokens(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """ChatML: `<|im_start|>role\\ncontent<|im_end|>\\n` for each message, then the assistant's beginning."""
    tokens: list[int] = []
    for message in messages:
        tokens.append(START)
        tokens += [_IDS[c] for c in f"{message['role']}\n{message['content']}"]
        tokens += [STOP, _IDS["\n"]]
    return [*tokens, START, *(_IDS[c] for c in "assistant\n")]


class Drawing:
    """Draws an answer token by token."""

    def __init__(self, prompt: Sequence[int], seed: int) -> None:
        self._kv: list[bytes] = []
        self._last = blake2b(b"sim/1", digest_size=8, person=b"root").digest()
        self._seed = struct.pack("<Q", seed & _MASK)
        for token in prompt:
            self._take(token)

    def _take(self, token: int) -> None:
        self._last = blake2b(self._last + struct.pack("<Q", token), digest_size=8, person=b"kv").digest()
        self._kv.append(self._last)

    def draw(self) -> int:
        state = blake2b(b"".join(self._kv), digest_size=8, person=b"state").digest()
        drawn = blake2b(state + self._seed, digest_size=8, person=b"draw").digest()
        token = int.from_bytes(drawn, "little") % _VOCABULARY
        while token == STOP:
            token = (token + 1) % _VOCABULARY
        self._take(token)
        return token


def answer(prompt: Sequence[int], count: int, *, temperature: float, seed: int) -> list[int]:
    """The first `count` tokens of the one right answer. A greedy one does not depend on the seed."""
    sequence = Drawing(prompt, seed if temperature > 0 else 0)
    return [sequence.draw() for _ in range(count)]


def text_of(tokens: Sequence[int]) -> str:
    """What a client sees of them: markers are hidden."""
    return "".join(_SHOWN[token] for token in tokens if token < len(_SHOWN))


def cost_nano(hits: int, misses: int, output: int, prices: tuple[str, str, str]) -> int:
    """(hit, miss, output) prices are units per million tokens; rounded once, half to even."""
    hit, miss, out = (Fraction(price) for price in prices)
    return round((hits * hit + misses * miss + output * out) * 1_000)
