"""Row-invariant attention over paged KV: a row's result depends on its own prefix alone, bit for bit.

DIMENSION KEY
    N flat tokens in the step, H query heads, G KV heads, D head dim, X token slots of the pool,
    Q folded query rows of a KV head (tokens × H / G, padded), K keys of one tile

How (each point is a trap that was met; the self-test at start proves the sum of them for the machine at hand):
- KV is cut into fixed tiles of `TILE_TOKENS` from position 0, whatever the step looks like. Each tile goes through the
  CPU flash operator, which also returns the log of the sum of exponentials, and the tiles are merged in one order.
- Keys that a row may not see are hidden by an additive mask: a hidden key does not change a bit. The operator walks
  over the keys in chunks of `KEY_CHUNK`; chunks behind the last visible key may be left out, but a chunk is always
  whole: with fewer than 384 keys an element in 100,000 came out otherwise. So it is read as far as it goes, over slots
  not yet written and over neighbouring pages, all hidden and all finite.
- Query heads of a group are folded into rows; with fewer than 4 rows the operator takes another path, so the rows are
  padded to a multiple of `ROWS_MULTIPLE`.
- ATen's exp gives other bits for elements that do not fill its vectors, and at the edge of a thread's share: it
  runs on contiguous pieces of whole vectors, each shorter than a share. Sums, products, maxima and quotients are exact
  in every path.
- Whether a tile is viewed or gathered does not matter: the operator sees the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from shared.engine.kv_pages import SPARE_TOKENS, LayerPages
from shared.engine.model_config import ModelConfig
from shared.engine.page_table import contiguous

TILE_TOKENS: Final = 1024
"""Part of the numeric domain: another tile merges in another order and gives other bits."""
KEY_CHUNK: Final = SPARE_TOKENS
ROW_BLOCK_TOKENS: Final = KEY_CHUNK
"""Rows of a long span attend in blocks of this many tokens: smaller ones would see no fewer chunks of keys."""
ROWS_MULTIPLE: Final = 8
VECTOR_ELEMENTS: Final = 64
SHARE_ELEMENTS: Final = 32_768
"""ATen's grain: an elementwise kernel over fewer elements runs on one thread."""


class Tile(NamedTuple):
    """Where the keys of one tile lie. `start`: first slot of a run of pages; or `slots_K`: int64 slots to gather, in
    whole chunks (slots of the sequence itself, hidden, fill the last one)."""

    start: int
    slots_K: Tensor | None


class SpanRows(NamedTuple):
    """Rows [row, row + size) of the step are positions [position, position + size) of one sequence, whose KV up to
    there lies in `tiles`."""

    row: int
    size: int
    position: int
    tiles: tuple[Tile, ...]


class Geometry(NamedTuple):
    """What attention needs to know of the model.

    hidden_QK: the mask of one whole tile, 0 or -inf, made once and sliced; row r stands for token r // group.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    hidden_QK: Tensor

    @property
    def group(self) -> int:
        return self.query_heads // self.kv_heads


Attention = Callable[[Tensor, LayerPages, SpanRows, Geometry, Tensor], None]
"""(q_NHD, pages of the layer, span, geometry, out_NE): fills rows of the span in `out_NE`, E = H × D."""


def geometry_of(config: ModelConfig, *, block_tokens: int, dtype: torch.dtype) -> Geometry:
    assert KEY_CHUNK % block_tokens == 0
    assert TILE_TOKENS % KEY_CHUNK == 0
    assert TILE_TOKENS % ROW_BLOCK_TOKENS == 0
    token_Q = torch.arange(TILE_TOKENS * config.group + ROWS_MULTIPLE) // config.group
    hidden_QK = torch.zeros(len(token_Q), TILE_TOKENS, dtype=dtype)
    hidden_QK.masked_fill_(torch.arange(TILE_TOKENS)[None] > token_Q[:, None], float("-inf"))
    return Geometry(config.query_heads, config.kv_heads, config.head_dim, block_tokens, hidden_QK)


def tiles_of(pages: Sequence[int], block_tokens: int) -> tuple[Tile, ...]:
    """The tiles of a table: a run of neighbouring pages is viewed, anything else gathered."""
    width = TILE_TOKENS // block_tokens
    return tuple(_tile(pages[i : i + width], block_tokens) for i in range(0, len(pages), width))


def _tile(pages: Sequence[int], block_tokens: int) -> Tile:
    if contiguous(pages):
        return Tile(pages[0] * block_tokens, None)
    filler = [pages[0]] * (-len(pages) % (KEY_CHUNK // block_tokens))
    first_slots = torch.tensor([*pages, *filler]) * block_tokens
    return Tile(0, (first_slots[:, None] + torch.arange(block_tokens)).flatten())


def attend(q_NHD: Tensor, pages: LayerPages, span: SpanRows, geometry: Geometry, out_NE: Tensor) -> None:
    """Attention of one span.

    q_NHD: rows of the step, last dim contiguous, rotated. out_NE: contiguous; only the span's rows are written.
    """
    done = 0
    while done < span.size:
        position = span.position + done
        count = min(span.size - done, ROW_BLOCK_TOKENS - position % ROW_BLOCK_TOKENS)
        row = span.row + done
        q_1GQD = _fold(q_NHD[row : row + count], geometry)
        parts = _tile_parts(q_1GQD, pages, span.tiles, position, count, geometry)
        o_QGD = _merge(parts) if len(parts) > 1 else parts[0][0]
        _unfold(o_QGD, out_NE[row : row + count], geometry)
        done += count


def _fold(q_nHD: Tensor, g: Geometry) -> Tensor:
    count = q_nHD.shape[0]
    rows = count * g.group
    grouped = q_nHD.view(count, g.kv_heads, g.group, g.head_dim).transpose(0, 1)
    padded = -(-rows // ROWS_MULTIPLE) * ROWS_MULTIPLE
    if padded == rows:
        return grouped.reshape(1, g.kv_heads, rows, g.head_dim)
    q_1GQD = q_nHD.new_zeros(1, g.kv_heads, padded, g.head_dim)
    q_1GQD[0, :, :rows].view(g.kv_heads, count, g.group, g.head_dim).copy_(grouped)
    return q_1GQD


def _unfold(o_QGD: Tensor, out_nE: Tensor, g: Geometry) -> None:
    count = out_nE.shape[0]
    rows = o_QGD[: count * g.group].view(count, g.group, g.kv_heads, g.head_dim)
    out_nE.view(count, g.kv_heads, g.group, g.head_dim).copy_(rows.transpose(1, 2))


def _tile_parts(
    q_1GQD: Tensor, pages: LayerPages, tiles: tuple[Tile, ...], position: int, count: int, g: Geometry
) -> list[tuple[Tensor, Tensor]]:
    """(o_QGD, lse_QG) of each visible tile. Rows of a block lie in one tile: earlier tiles are seen whole."""
    last = position // TILE_TOKENS
    parts = []
    for index in range(last):
        parts.append(_flash(q_1GQD, pages, tiles[index], TILE_TOKENS, None))
    inside = position % TILE_TOKENS
    keys = -(-(inside + count) // KEY_CHUNK) * KEY_CHUNK
    first = inside * g.group
    hidden_QK = g.hidden_QK[first : first + q_1GQD.shape[2], :keys]
    parts.append(_flash(q_1GQD, pages, tiles[last], keys, hidden_QK))
    return parts


def _flash(q_1GQD: Tensor, pages: LayerPages, tile: Tile, keys: int, hidden_QK: Tensor | None) -> tuple[Tensor, Tensor]:
    if tile.slots_K is None:
        k_1GKD = pages.k_1GXD[:, :, tile.start : tile.start + keys]
        v_1GKD = pages.v_1GXD[:, :, tile.start : tile.start + keys]
    else:
        slots = tile.slots_K[:keys]
        k_1GKD = pages.k_1GXD.index_select(2, slots)
        v_1GKD = pages.v_1GXD.index_select(2, slots)
    o_1GQD, lse_1GQ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_1GQD, k_1GKD, v_1GKD, 0.0, False, attn_mask=hidden_QK
    )
    return o_1GQD[0].transpose(0, 1), lse_1GQ[0].transpose(0, 1)


def _merge(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Joins tiles in their order, in fp32: each weighs exp(lse - largest lse)."""
    lse_TQG = torch.stack([lse for _, lse in parts])
    largest_QG = lse_TQG.amax(0)
    weight_TQG = _exact_exp(lse_TQG - largest_QG)
    total_QG = weight_TQG[0].clone()
    o_QGD = parts[0][0] * weight_TQG[0, :, :, None]
    for t in range(1, len(parts)):
        total_QG += weight_TQG[t]
        o_QGD += parts[t][0] * weight_TQG[t, :, :, None]
    return (o_QGD / total_QG[:, :, None]).to(parts[0][0].dtype)


def _exact_exp(x: Tensor) -> Tensor:
    """exp with the same bits for an element wherever it stands: every element fills a vector of one thread."""
    flat = x.reshape(-1)
    padded = pad(flat, (0, -flat.numel() % VECTOR_ELEMENTS))
    for piece in torch.split(padded, SHARE_ELEMENTS - VECTOR_ELEMENTS):
        piece.exp_()
    return padded[: flat.numel()].view(x.shape)
