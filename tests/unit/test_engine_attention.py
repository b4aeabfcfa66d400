"""Paged attention against the plain definition, and its bits against themselves; no model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from shared.engine.attention import TILE_TOKENS, SpanRows, _exact_exp, attend, geometry_of, tiles_of
from shared.engine.kv_pages import KvPages
from shared.engine.layers import gated_silu, rotary_table, rotate
from shared.engine.model_config import ModelConfig
from shared.engine.reference import reference_attention, reference_rotary, reference_rotate

BLOCK = 64
TOKENS = 2 * TILE_TOKENS + 150
CONFIG = ModelConfig(
    layers=1,
    model_dim=64,
    feed_forward_dim=96,
    query_heads=6,
    kv_heads=2,
    head_dim=32,
    vocabulary=10,
    context_tokens=4096,
    rope_theta=1e4,
    norm_epsilon=1e-5,
    tied_embedding=True,
)
WIDTH = -(-TOKENS // BLOCK)
NEIGHBOURS = list(range(WIDTH))
SCATTERED = [(i * 11 + 3) % (2 * WIDTH) for i in range(WIDTH)]


class Case:
    """One sequence of random q, k, v, with k and v in pages."""

    def __init__(self, dtype: torch.dtype, pages: Sequence[int], scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(1)
        q, k, v = (
            (torch.randn(TOKENS, heads, 32, generator=generator) * scale).to(dtype)
            for heads in (CONFIG.query_heads, CONFIG.kv_heads, CONFIG.kv_heads)
        )
        self.q_NHD, self.k_NGD, self.v_NGD = q, k, v
        self.geometry = geometry_of(CONFIG, block_tokens=BLOCK, dtype=dtype)
        self.kv = KvPages(CONFIG, pages=2 * WIDTH, block_tokens=BLOCK, dtype=dtype)
        self.pages = list(pages)
        assert len(set(pages)) == WIDTH
        for i, page in enumerate(pages):
            part = slice(i * BLOCK, (i + 1) * BLOCK)
            stored = torch.cat([k[part], v[part]], dim=1).transpose(0, 1)
            self.kv.layers[0].kv_UXD[:, page * BLOCK : page * BLOCK + stored.shape[1]] = stored

    def attend(self, start: int, stop: int) -> torch.Tensor:
        out_NE = torch.full((stop - start, 6 * 32), float("nan"), dtype=self.q_NHD.dtype)
        held = self.pages[: -(-stop // BLOCK)]
        span = SpanRows(0, stop - start, start, tiles_of(held, BLOCK))
        attend(self.q_NHD[start:stop], self.kv.layers[0], span, self.geometry, out_NE)
        return out_NE


@pytest.mark.parametrize("pages", [NEIGHBOURS, SCATTERED], ids=["neighbours", "scattered"])
def test_fp32_equals_the_definition(pages: list[int]) -> None:
    case = Case(torch.float32, pages)
    expected = reference_attention(case.q_NHD, case.k_NGD, case.v_NGD).reshape(TOKENS, -1)
    assert torch.allclose(case.attend(0, TOKENS), expected, atol=2e-6, rtol=0)


def test_bf16_is_as_near_as_its_rounding_allows() -> None:
    case = Case(torch.bfloat16, NEIGHBOURS)
    exact = reference_attention(case.q_NHD.float(), case.k_NGD.float(), case.v_NGD.float()).reshape(TOKENS, -1)
    assert (case.attend(0, TOKENS).float() - exact).abs().max() < 0.02


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_any_split_and_any_pages_give_the_same_bits(scale: float) -> None:
    whole = Case(torch.bfloat16, NEIGHBOURS, scale).attend(0, TOKENS)
    rng = random.Random(5)
    for pages in (NEIGHBOURS, SCATTERED):
        case = Case(torch.bfloat16, pages, scale)
        for _ in range(6):
            cuts = sorted({0, TOKENS, *(rng.randrange(1, TOKENS) for _ in range(rng.randint(1, 9)))})
            parts = [case.attend(a, b) for a, b in pairwise(cuts)]
            assert torch.equal(torch.cat(parts), whole), cuts


@pytest.mark.parametrize("head_dim", [32, 64])
def test_short_prefixes_give_the_same_bits_in_blocks(head_dim: int) -> None:
    """Few keys are where the operator's bits depend on their number; several draws, since few elements show it."""
    config = ModelConfig(**{f: getattr(CONFIG, f) for f in CONFIG.__struct_fields__} | {"head_dim": head_dim})
    geometry = geometry_of(config, block_tokens=BLOCK, dtype=torch.bfloat16)
    pages = KvPages(config, pages=8, block_tokens=BLOCK, dtype=torch.bfloat16)
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        q_NHD = (torch.randn(512, 6, head_dim, generator=generator) * 1.5).to(torch.bfloat16)
        stored = pages.layers[0].kv_UXD
        stored[:, :512] = (torch.randn(4, 512, head_dim, generator=generator) * 1.5).to(torch.bfloat16)
        whole_NE, parts_NE = torch.zeros(2, 512, 6 * head_dim, dtype=torch.bfloat16)
        attend(q_NHD, pages.layers[0], SpanRows(0, 512, 0, tiles_of(range(8), BLOCK)), geometry, whole_NE)
        for start in range(0, 512, BLOCK):
            tiles = tiles_of(range(start // BLOCK + 1), BLOCK)
            attend(q_NHD, pages.layers[0], SpanRows(start, BLOCK, start, tiles), geometry, parts_NE)
        assert torch.equal(parts_NE, whole_NE)


def test_single_rows_around_every_edge_give_the_same_bits() -> None:
    case = Case(torch.bfloat16, NEIGHBOURS)
    whole = case.attend(0, TOKENS)
    edges = [0, 63, 64, 255, 256, 1023, 1024, 1025, 2047, 2048, TOKENS - 1]
    for position in edges:
        assert torch.equal(case.attend(position, position + 1)[0], whole[position]), position


def test_exp_of_an_element_does_not_depend_on_its_place() -> None:
    """Over more elements than one thread's share, and from any offset."""
    x = -torch.rand(100_003, generator=torch.Generator().manual_seed(4)) * 20
    whole = _exact_exp(x.clone())
    assert torch.allclose(whole, torch.exp(x.double()).float(), rtol=3e-7)
    for start, stop in ((0, 1), (5, 77), (1000, 34_001), (99_990, 100_003)):
        assert torch.equal(_exact_exp(x[start:stop].clone()), whole[start:stop])


def test_only_the_rows_of_the_span_are_written() -> None:
    case = Case(torch.bfloat16, NEIGHBOURS)
    out_NE = torch.full((20, 6 * 32), 7.0, dtype=torch.bfloat16)
    q_NHD = torch.cat([torch.zeros(4, 6, 32, dtype=torch.bfloat16), case.q_NHD[:16]])
    span = SpanRows(4, 12, 0, tiles_of(NEIGHBOURS[:1], BLOCK))
    attend(q_NHD, case.kv.layers[0], span, case.geometry, out_NE)
    assert torch.equal(out_NE[4:16], case.attend(0, 12))
    assert bool((out_NE[:4] == 7).all())
    assert bool((out_NE[16:] == 7).all())


def test_what_a_page_holds_behind_the_last_row_does_not_matter() -> None:
    case = Case(torch.bfloat16, NEIGHBOURS)
    before = case.attend(90, 100)
    case.kv.layers[0].kv_UXD[:, 100:] = 55.0
    assert torch.equal(case.attend(90, 100), before)


def test_rotary_positions_equal_the_definition() -> None:
    cos_CD, sin_CD = rotary_table(CONFIG, torch.float32)
    x_NHD = torch.randn(300, 6, 32, generator=torch.Generator().manual_seed(2))
    expected = reference_rotate(x_NHD, *reference_rotary(CONFIG, 300))
    rotate(x_NHD, cos_CD[:300, None], sin_CD[:300, None])
    assert torch.allclose(x_NHD, expected, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("width", [96, 1536, 1000])
def test_silu_of_a_row_does_not_depend_on_its_place(threads: int, width: int) -> None:
    before = torch.get_num_threads()
    x_N2F = torch.randn(517, 2 * width, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    try:
        torch.set_num_threads(threads)
        whole = gated_silu(x_N2F)
        for start, stop in ((0, 8), (8, 31), (31, 200), (200, 517)):
            assert torch.equal(gated_silu(x_N2F[start:stop].contiguous()), whole[start:stop])
    finally:
        torch.set_num_threads(before)
    gate, up = x_N2F.float().chunk(2, dim=-1)
    exact = gate / (1 + torch.exp(-gate)) * up
    assert torch.allclose(whole.float(), exact, rtol=0.02, atol=0.02)
