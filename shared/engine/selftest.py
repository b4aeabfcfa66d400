"""Proves row invariance on the machine at hand: this thread count, these weights, this attention (invariant 10).

Runs the first layers of the model over pseudo-random tokens in several ways that must give the same bits of KV and
logits: whole, in odd splits, one by one, mixed with rows of other sequences, over scattered pages. About a second.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from shared.engine.attention import TILE_TOKENS, Attention, Geometry, attend, geometry_of
from shared.engine.kv_pages import KvPages
from shared.engine.model import Model
from shared.engine.paged_engine import Rows
from shared.engine.sampler import GOLDEN
from shared.engine.torch_engine import assemble

LAYERS: Final = 4
"""All layers have the same shapes, so they run the same kernels."""
TOKENS: Final = TILE_TOKENS + 109
"""Over the edge of a tile, and no multiple of anything."""
ONE_BY_ONE: Final = 9
OTHER_TOKENS: Final = 77


class Verdict(NamedTuple):
    """`differs`: the ways whose bits differ from the whole prefill's; empty when `exact`.

    `bits`: digest of the KV and logits themselves. Workers give each other's bits only where it is equal.
    """

    exact: bool
    differs: tuple[str, ...]
    bits: str


class _Bench:
    """A small pool and a model cut to its first layers."""

    def __init__(self, model: Model, block_tokens: int, attention: Attention) -> None:
        self.model = model
        self.attention = attention
        self.block_tokens = block_tokens
        self.width = -(-TOKENS // block_tokens)
        config = model.config
        self.geometry: Geometry = geometry_of(config, block_tokens=block_tokens, dtype=model.dtype)
        self.kv = KvPages(
            config,
            pages=2 * self.width,
            block_tokens=block_tokens,
            dtype=model.dtype,
            layers=min(LAYERS, config.layers),
        )
        self.tokens = [(i * GOLDEN >> 17) % config.vocabulary for i in range(1, TOKENS + 1)]

    def step(self, *entries: Rows) -> Tensor:
        """logits_BV of the last row of each entry."""
        rows, last = assemble(entries, self.block_tokens)
        hidden_NM = self.model.forward(rows, self.kv, self.geometry, self.attention)
        return self.model.logits(hidden_NM, last)

    def rows(self, start: int, stop: int, pages: Sequence[int]) -> Rows:
        return Rows(self.tokens[start:stop], start, pages, None)

    def prefill(self, cuts: Sequence[int], pages: Sequence[int]) -> Tensor:
        """Logits of the last row when the tokens are cut at these positions."""
        logits_BV = torch.empty(0)
        for start, stop in zip((0, *cuts), (*cuts, TOKENS), strict=True):
            logits_BV = self.step(self.rows(start, stop, pages))
        return logits_BV[0]

    def bits(self, pages: Sequence[int]) -> list[bytes]:
        sizes = [self.block_tokens] * (TOKENS // self.block_tokens)
        if TOKENS % self.block_tokens:
            sizes.append(TOKENS % self.block_tokens)
        return [self.kv.read(page, size) for page, size in zip(pages, sizes, strict=True)]


@torch.inference_mode()
def check_row_invariance(model: Model, *, block_tokens: int, attention: Attention = attend) -> Verdict:
    """Compares every way with the whole prefill in one step. `attention`: what is tested."""
    assert model.config.context_tokens >= TOKENS
    bench = _Bench(model, block_tokens, attention)
    neighbours = list(range(bench.width))
    scattered = list(range(2 * bench.width - 1, bench.width - 1, -1))
    truth_V = bench.prefill((), neighbours)
    truth_bits = bench.bits(neighbours)
    differs = []
    for name, logits_V in _ways(bench, scattered):
        if not torch.equal(logits_V, truth_V):
            differs.append(f"{name}: logits")
        if bench.bits(scattered) != truth_bits:
            differs.append(f"{name}: KV")
    digest = hashlib.sha256(b"".join(truth_bits) + truth_V.float().numpy().tobytes()).hexdigest()
    return Verdict(not differs, tuple(differs), digest[:16])


def _ways(bench: _Bench, pages: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """(name, logits_V of the last token) of each way; KV of the tokens is then in `pages`."""
    yield "block by block", bench.prefill(range(bench.block_tokens, TOKENS, bench.block_tokens), pages)
    yield "split at odd positions", bench.prefill((7, 90, 333, 700, 1025), pages)
    yield "last row alone", bench.prefill((TOKENS - 1,), pages)
    for position in range(TOKENS - ONE_BY_ONE, TOKENS):
        logits_BV = bench.step(bench.rows(position, position + 1, pages))
    yield "one by one after a hit", logits_BV[0]
    other = [0, 1]
    cut = TOKENS - 2 * ONE_BY_ONE
    bench.step(bench.rows(0, OTHER_TOKENS, other), bench.rows(cut, TOKENS - 1, pages))
    mixed_BV = bench.step(
        bench.rows(OTHER_TOKENS, OTHER_TOKENS + 1, other), bench.rows(TOKENS - 1, TOKENS, pages), bench.rows(0, 5, [2])
    )
    yield "mixed with other sequences", mixed_BV[1]
