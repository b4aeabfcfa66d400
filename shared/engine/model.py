"""The transformer: one forward pass over the rows of a step, whatever sequences they belong to.

DIMENSION KEY
    N flat tokens in the step, B rows that get logits, H query heads, G KV heads, D head dim, M model dim,
    F feed-forward dim, V vocab, L layers, X token slots of the pool

Owns the parameters. Does not own the KV pages (kv_pages.py), which rows run (planner.py) or what is drawn (sampler.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from shared.engine.attention import Attention, Geometry, SpanRows
from shared.engine.kv_pages import KvPages, LayerPages
from shared.engine.layers import MATRIX_ROWS_MIN, Linear, gated_silu, norm, rotary_table, rotate
from shared.engine.model_config import ModelConfig


class Run(NamedTuple):
    """Rows [row, row + size) of the step go to slots [slot, slot + size) of the pool."""

    row: int
    size: int
    slot: int


class StepRows(NamedTuple):
    """The rows of a step.

    ids_N, positions_N: int64, contiguous; ids in [0, V), positions in [0, context). Rows beyond the spans are padding.
    """

    ids_N: Tensor
    positions_N: Tensor
    runs: tuple[Run, ...]
    spans: tuple[SpanRows, ...]


class Layer(NamedTuple):
    attention_norm_M: Tensor
    qkv: Linear
    attention_output: Linear
    mlp_norm_M: Tensor
    gate_up: Linear
    down: Linear


class Model:
    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> None:
        """`weights`: as `weights.load_weights` gives them; converted to `dtype` if they have another."""
        self.config = config
        self.dtype = dtype
        w = {name: tensor.to(dtype) for name, tensor in weights.items()}
        self._embedding_VM = w["embedding"]
        self._layers = tuple(_layer(w, i) for i in range(config.layers))
        self._final_norm_M = w["final_norm"]
        self._head = Linear(w["embedding"] if config.tied_embedding else w["head"])
        self._cos_CD, self._sin_CD = rotary_table(config, dtype)

    def forward(self, rows: StepRows, pages: KvPages, geometry: Geometry, attention: Attention) -> Tensor:
        """Writes the KV of the rows into their slots and returns hidden_NM. Runs as many layers as `pages` has."""
        c, positions_N = self.config, rows.positions_N
        assert rows.ids_N.shape == positions_N.shape
        assert len(rows.ids_N) >= MATRIX_ROWS_MIN
        x_NM = embedding(rows.ids_N, self._embedding_VM)
        cos_N1D = self._cos_CD[positions_N].unsqueeze(1)
        sin_N1D = self._sin_CD[positions_N].unsqueeze(1)
        count, turned = len(rows.ids_N), c.query_heads + c.kv_heads
        mixed_NE = torch.zeros(count, c.query_heads * c.head_dim, dtype=self.dtype)
        for layer, stored in zip(self._layers, pages.layers, strict=False):
            h_NM = norm(x_NM, layer.attention_norm_M, c.norm_epsilon)
            qkv_NUD = layer.qkv(h_NM).view(count, turned + c.kv_heads, c.head_dim)
            rotate(qkv_NUD[:, :turned], cos_N1D, sin_N1D)
            _store(qkv_NUD[:, c.query_heads :], rows.runs, stored)
            for span in rows.spans:
                attention(qkv_NUD[:, : c.query_heads], stored, span, geometry, mixed_NE)
            x_NM = x_NM + layer.attention_output(mixed_NE)
            h_NM = norm(x_NM, layer.mlp_norm_M, c.norm_epsilon)
            x_NM += layer.down(gated_silu(layer.gate_up(h_NM)))
        return x_NM

    def logits(self, hidden_NM: Tensor, rows: Sequence[int]) -> Tensor:
        """logits_BV of the chosen rows, in the model's dtype."""
        chosen = [*rows, *[rows[0]] * (MATRIX_ROWS_MIN - len(rows))]
        h_BM = norm(hidden_NM[chosen], self._final_norm_M, self.config.norm_epsilon)
        return self._head(h_BM)[: len(rows)]


def _layer(weights: Mapping[str, Tensor], i: int) -> Layer:
    def of(name: str) -> Tensor:
        return weights[f"layers.{i}.{name}"]

    return Layer(
        attention_norm_M=of("attention_norm"),
        qkv=Linear(of("qkv")),
        attention_output=Linear(of("attention_output")),
        mlp_norm_M=of("mlp_norm"),
        gate_up=Linear(of("gate_up")),
        down=Linear(of("down")),
    )


def _store(kv_NUD: Tensor, runs: Sequence[Run], stored: LayerPages) -> None:
    """kv_NUD: (N, 2 G, D), K heads then V heads."""
    for row, size, slot in runs:
        stored.kv_UXD[:, slot : slot + size] = kv_NUD[row : row + size].transpose(0, 1)
