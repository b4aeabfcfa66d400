"""An engine double behind the same port, without torch: every lost, stale, torn or foreign block is a wrong token.

The KV of a token is 8 bytes: a hash of (the KV of the token before it, the token). The next token is a hash of all KV
of the sequence as it lies in the pages, so that a fault in any page shows, not only in the last. Sequences, pages and
plans are those of the real engine (paged_engine.py). An optional cost model sleeps, so that schedules look real.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from shared.contracts.block import Fingerprint
from shared.contracts.errors import BlockMiss
from shared.contracts.limits import BLOCK_TOKENS_DEFAULT
from shared.contracts.messages import Sampling, TokenLogprob
from shared.contracts.ports import EngineProfile
from shared.engine.paged_engine import Drawn, PagedEngine, Rows

KV_BYTES_TOKEN: Final = 8
TILE_PAGES: Final = 16
VOCABULARY_DEFAULT: Final = 49_152
CONTEXT_DEFAULT: Final = 8_192


def _hash(tag: bytes, *fields: int) -> int:
    data = b"".join((f & 2**64 - 1).to_bytes(8, "little") for f in fields)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=tag).digest(), "little")


def token_kv(before: int, token: int) -> int:
    """KV of a token; `before` is that of the token before it, or the root."""
    return _hash(b"kv", before, token)


def root_of(weights: str) -> int:
    """What stands before position 0; another `weights` is another model."""
    return int.from_bytes(hashlib.blake2b(weights.encode(), digest_size=8, person=b"root").digest(), "little")


def next_token(kv: npt.ArrayLike, sampling: Sampling, vocabulary: int) -> int:
    """A function of all KV so far, and of the seed unless greedy. Never a stop token: answers end by their length."""
    state = hashlib.blake2b(np.asarray(kv, dtype="<u8").tobytes(), digest_size=8, person=b"state").digest()
    seed = sampling.seed if sampling.temperature > 0 else 0
    token = _hash(b"draw", int.from_bytes(state, "little"), seed) % vocabulary
    while token in sampling.stop_tokens:
        token = (token + 1) % vocabulary
    return token


class HashDevice:
    """Implements `paged_engine.Device` with hashes."""

    def __init__(
        self,
        *,
        weights: str,
        pages: int,
        block_tokens: int,
        vocabulary: int,
        rows_per_s: float | None,
        sleep: Callable[[float], None] | None,
    ) -> None:
        self._root = root_of(weights)
        self._vocabulary = vocabulary
        self._kv = np.zeros((pages, block_tokens), dtype="<u8")
        self._rows_per_s = rows_per_s
        self._sleep = sleep

    def check_payload(self, payload: bytes | memoryview, tokens: int) -> None:
        found = payload.nbytes if isinstance(payload, memoryview) else len(payload)
        if found != tokens * KV_BYTES_TOKEN:
            raise BlockMiss("shape", f"payload of {found} bytes, KV of {tokens} tokens has {tokens * KV_BYTES_TOKEN}")

    def write(self, page: int, payload: bytes | memoryview, tokens: int) -> None:
        self._kv[page, :tokens] = np.frombuffer(payload, dtype="<u8")

    def read(self, page: int, tokens: int) -> bytes:
        return self._kv[page, :tokens].tobytes()

    def run(self, rows: Sequence[Rows]) -> list[Drawn | None]:
        if self._rows_per_s is not None and self._sleep is not None:
            self._sleep(sum(len(entry.tokens) for entry in rows) / self._rows_per_s)
        return [self._run_one(entry) for entry in rows]

    def _run_one(self, entry: Rows) -> Drawn | None:
        block = self._kv.shape[1]
        position = entry.start
        before = (
            self._root if position == 0 else int(self._kv[entry.pages[(position - 1) // block], (position - 1) % block])
        )
        for token in entry.tokens:
            before = token_kv(before, token)
            self._kv[entry.pages[position // block], position % block] = before
            position += 1
        if entry.sampling is None:
            return None
        kv = self._kv[list(entry.pages)].reshape(-1)[:position]
        token = next_token(kv, entry.sampling, self._vocabulary)
        return Drawn(token, _logprob(token, entry.sampling.top_logprobs, self._vocabulary))


def _logprob(token: int, top: int | None, vocabulary: int) -> TokenLogprob | None:
    """Made up, but lawful: halves, so that the sum stays below 1."""
    if top is None:
        return None
    ranked = tuple(((token + i) % vocabulary, -(i + 1) * math.log(2)) for i in range(top))
    return TokenLogprob(-math.log(2), ranked)


class HashEngine(PagedEngine):
    """`shared.contracts.ports.Engine` without a model."""

    def __init__(
        self,
        *,
        model: str = "hash",
        weights: str = "hash/1",
        pages: int = 512,
        sequences_max: int = 64,
        block_tokens: int = BLOCK_TOKENS_DEFAULT,
        vocabulary: int = VOCABULARY_DEFAULT,
        context_tokens: int = CONTEXT_DEFAULT,
        rows_per_s: float | None = None,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        """`weights`: names the model that the hashes stand for. `rows_per_s` with `sleep`: the cost model."""
        profile = EngineProfile(
            model=model,
            fingerprint=Fingerprint(
                weights_digest=weights,
                tokenizer_revision="",
                architecture="hash",
                kv_dtype="opaque",
                kv_layout="token",
                rope="",
                block_tokens=block_tokens,
                adapter_digest="",
                numeric_domain="hash-1",
            ),
            context_tokens=min(context_tokens, pages * block_tokens),
            vocabulary=vocabulary,
            block_tokens=block_tokens,
            block_dtype="opaque",
            block_shape=(block_tokens, KV_BYTES_TOKEN),
            kv_bytes_token=KV_BYTES_TOKEN,
            pages=pages,
            sequences_max=sequences_max,
        )
        device = HashDevice(
            weights=weights,
            pages=pages,
            block_tokens=block_tokens,
            vocabulary=vocabulary,
            rows_per_s=rows_per_s,
            sleep=sleep,
        )
        super().__init__(profile, device, tile_pages=TILE_PAGES)
