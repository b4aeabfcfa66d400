"""The engine with the real model on the CPU.

DIMENSION KEY
    N flat tokens in the step, B rows that get logits, V vocab

Owns the step's assembly: rows of all sequences, flat, padded, with the slots they write and the tiles they read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from shared.contracts.messages import TokenLogprob
from shared.contracts.ports import EngineProfile
from shared.engine.attention import TILE_TOKENS, Attention, Geometry, SpanRows, attend, geometry_of, tiles_of
from shared.engine.kv_pages import KvPages
from shared.engine.layers import MATRIX_ROWS_MIN
from shared.engine.model import Model, Run, StepRows
from shared.engine.model_config import CPU_DOMAIN, ModelCard, fingerprint_of
from shared.engine.paged_engine import Drawn, PagedEngine, Rows
from shared.engine.sampler import draw, logprob_of

DTYPE_NAMES: Final = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


class TorchDevice:
    """Implements `paged_engine.Device` with KV pages and a model."""

    def __init__(self, model: Model, pages: KvPages, geometry: Geometry, attention: Attention = attend) -> None:
        self._model = model
        self._pages = pages
        self._geometry = geometry
        self._attention = attention
        self.check_payload = pages.check_payload
        self.write = pages.write
        self.read = pages.read

    @torch.inference_mode()
    def run(self, rows: Sequence[Rows]) -> list[Drawn | None]:
        """As the protocol says."""
        step, last_rows = assemble(rows, self._geometry.block_tokens)
        hidden_NM = self._model.forward(step, self._pages, self._geometry, self._attention)
        chosen = [i for i, entry in enumerate(rows) if entry.sampling is not None]
        drawn: list[Drawn | None] = [None] * len(rows)
        if chosen:
            logits_BV = self._model.logits(hidden_NM, [last_rows[i] for i in chosen]).float().numpy()
            for i, logits_V in zip(chosen, logits_BV, strict=True):
                drawn[i] = _draw(logits_V, rows[i])
        return drawn


def _draw(logits_V: np.ndarray, entry: Rows) -> Drawn:
    assert entry.sampling is not None
    assert np.isfinite(logits_V).all(), "logits are not finite: KV or weights are corrupt"
    token = draw(logits_V, entry.sampling, entry.start + len(entry.tokens))
    top = entry.sampling.top_logprobs
    logprob: TokenLogprob | None = None if top is None else logprob_of(logits_V, token, top)
    return Drawn(token, logprob)


def assemble(rows: Sequence[Rows], block_tokens: int) -> tuple[StepRows, list[int]]:
    """The step of these rows, and for each entry the row of its last position."""
    ids: list[int] = []
    positions: list[int] = []
    runs: list[Run] = []
    spans: list[SpanRows] = []
    last_rows: list[int] = []
    for entry in rows:
        row, count = len(ids), len(entry.tokens)
        ids += entry.tokens
        positions += range(entry.start, entry.start + count)
        runs += _runs(row, count, entry.start, entry.pages, block_tokens)
        spans.append(SpanRows(row, count, entry.start, tiles_of(entry.pages, block_tokens)))
        last_rows.append(len(ids) - 1)
    padding = [0] * (MATRIX_ROWS_MIN - len(ids))
    step = StepRows(torch.tensor(ids + padding), torch.tensor(positions + padding), tuple(runs), tuple(spans))
    return step, last_rows


def _runs(row: int, count: int, start: int, pages: Sequence[int], block_tokens: int) -> list[Run]:
    """Slots of positions [start, start + count), joined where pages are neighbours."""
    runs: list[Run] = []
    done = 0
    while done < count:
        page, inside = divmod(start + done, block_tokens)
        size = min(block_tokens - inside, count - done)
        slot = pages[page] * block_tokens + inside
        if runs and runs[-1].slot + runs[-1].size == slot:
            runs[-1] = Run(runs[-1].row, runs[-1].size + size, runs[-1].slot)
        else:
            runs.append(Run(row + done, size, slot))
        done += size
    return runs


class TorchEngine(PagedEngine):
    """`shared.contracts.ports.Engine` with a real model."""

    def __init__(
        self,
        card: ModelCard,
        model: Model,
        *,
        pages: int,
        sequences_max: int,
        block_tokens: int,
        numeric_domain: str = CPU_DOMAIN,
        attention: Attention = attend,
    ) -> None:
        config = card.config
        kv_pages = KvPages(config, pages=pages, block_tokens=block_tokens, dtype=model.dtype)
        geometry = geometry_of(config, block_tokens=block_tokens, dtype=model.dtype)
        dtype = DTYPE_NAMES[model.dtype]
        profile = EngineProfile(
            model=card.name,
            fingerprint=fingerprint_of(card, block_tokens=block_tokens, kv_dtype=dtype, numeric_domain=numeric_domain),
            context_tokens=min(config.context_tokens, pages * block_tokens),
            vocabulary=config.vocabulary,
            block_tokens=block_tokens,
            block_dtype=dtype,
            block_shape=kv_pages.block_shape,
            kv_bytes_token=kv_pages.payload_bytes(1),
            pages=pages,
            sequences_max=sequences_max,
        )
        super().__init__(
            profile,
            TorchDevice(model, kv_pages, geometry, attention),
            tile_pages=TILE_TOKENS // block_tokens,
        )
