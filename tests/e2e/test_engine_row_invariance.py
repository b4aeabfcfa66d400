"""Row invariance on the real model: the KV and logits of a token depend on its own prefix alone, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from shared.engine.attention import Geometry, SpanRows, attend, geometry_of
from shared.engine.kv_pages import KvPages, LayerPages
from shared.engine.paged_engine import Rows
from shared.engine.selftest import check_row_invariance
from shared.engine.torch_engine import assemble
from tests.model_fixture import RealModel

pytestmark = pytest.mark.model

BLOCK = 64
TOKENS = 1333
WIDTH = -(-TOKENS // BLOCK)
PAGES = 3 * WIDTH
SEED = 20


class Bench:
    """The whole model over a pool in which several sequences have room."""

    def __init__(self, real: RealModel, tokens: Sequence[int]) -> None:
        self.model = real.model
        self.tokens = list(tokens)
        self.kv = KvPages(real.card.config, pages=PAGES, block_tokens=BLOCK, dtype=torch.bfloat16)
        self.geometry = geometry_of(real.card.config, block_tokens=BLOCK, dtype=torch.bfloat16)

    @torch.inference_mode()
    def step(self, *entries: Rows) -> Tensor:
        rows, last = assemble(entries, BLOCK)
        hidden_NM = self.model.forward(rows, self.kv, self.geometry, attend)
        return self.model.logits(hidden_NM, last)

    def rows(self, start: int, stop: int, pages: Sequence[int]) -> Rows:
        return Rows(self.tokens[start:stop], start, pages, None)

    def prefill(self, cuts: Sequence[int], pages: Sequence[int]) -> Tensor:
        for start, stop in zip((0, *cuts), (*cuts, TOKENS), strict=True):
            logits_BV = self.step(self.rows(start, stop, pages))
        return logits_BV[0]

    def blocks(self, pages: Sequence[int], tokens: int = TOKENS) -> list[bytes]:
        return [
            self.kv.read(page, min(BLOCK, tokens - i * BLOCK)) for i, page in enumerate(pages) if i * BLOCK < tokens
        ]


class Truth:
    def __init__(self, bench: Bench) -> None:
        self.pages = list(range(WIDTH))
        self.logits_V = bench.prefill((), self.pages)
        self.blocks = bench.blocks(self.pages)


@pytest.fixture(scope="module")
def bench(real_model: RealModel, model_dir: Path) -> Bench:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    sources = sorted((Path(__file__).resolve().parent.parent.parent / "shared" / "contracts").glob("*.py"))
    return Bench(real_model, tokenizer.encode("\n".join(path.read_text() for path in sources)).ids[:TOKENS])


@pytest.fixture(scope="module")
def truth(bench: Bench) -> Truth:
    """The whole prompt in one step, over neighbouring pages."""
    return Truth(bench)


SCATTERED = [WIDTH + i for i in random.Random(SEED).sample(range(2 * WIDTH), WIDTH)]
SPLITS = [
    tuple(range(BLOCK, TOKENS, BLOCK)),
    (1, 2, 3, 10, 1023, 1025, 1300),
    (512, 1024),
    tuple(sorted(random.Random(SEED).sample(range(1, TOKENS), 9))),
    tuple(sorted(random.Random(SEED + 1).sample(range(1, TOKENS), 9))),
]


@pytest.mark.parametrize("cuts", SPLITS, ids=["blocks", "odd", "steps of 512", "random", "another random"])
def test_any_split_of_the_prompt(bench: Bench, truth: Truth, cuts: tuple[int, ...]) -> None:
    logits_V = bench.prefill(cuts, SCATTERED)
    assert torch.equal(logits_V, truth.logits_V)
    assert bench.blocks(SCATTERED) == truth.blocks


def test_one_by_one_after_a_hit(bench: Bench, truth: Truth) -> None:
    hit = TOKENS // BLOCK - 1
    for page, payload in zip(SCATTERED[:hit], truth.blocks, strict=False):
        bench.kv.write(page, payload, BLOCK)
    for position in range(hit * BLOCK, TOKENS):
        logits_BV = bench.step(bench.rows(position, position + 1, SCATTERED))
    assert torch.equal(logits_BV[0], truth.logits_V)
    assert bench.blocks(SCATTERED) == truth.blocks


def test_rows_among_prompts_and_decode_rows_of_five_others(bench: Bench, truth: Truth) -> None:
    hit = 10
    for page, payload in zip(SCATTERED[:hit], truth.blocks, strict=False):
        bench.kv.write(page, payload, BLOCK)
    free = [page for page in range(WIDTH, PAGES) if page not in SCATTERED]
    others = [free[4 * i : 4 * i + 4] for i in range(5)]
    position, turn = hit * BLOCK, 0
    while position < TOKENS:
        stop = min(TOKENS, position + (97, 1, 30, 3)[turn % 4])
        done = [(turn * 7 + 11 * i) % 200 for i in range(5)]
        size = [(1, 40, 1, 5, 17)[(turn + i) % 5] for i in range(5)]
        entries = [bench.rows(done[i], done[i] + size[i], others[i]) for i in range(5)]
        entries.insert(turn % 6, bench.rows(position, stop, SCATTERED))
        logits_BV = bench.step(*entries)
        last, position, turn = turn % 6, stop, turn + 1
    assert torch.equal(logits_BV[last], truth.logits_V)
    assert bench.blocks(SCATTERED) == truth.blocks


def test_the_number_of_threads_changes_no_bit(bench: Bench, truth: Truth) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if before > 1 else 2)
        logits_V = bench.prefill((700,), SCATTERED)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(logits_V, truth.logits_V)
    assert bench.blocks(SCATTERED) == truth.blocks


def plain_sdpa(q_NHD: Tensor, pages: LayerPages, span: SpanRows, g: Geometry, out_NE: Tensor) -> None:
    """What anyone would write: right, and not row-invariant."""
    stop = span.position + span.size
    slots = torch.cat(
        [torch.arange(tile.start, tile.start + 1024) if tile.slots_K is None else tile.slots_K for tile in span.tiles]
    )[:stop]
    k_1GKD, v_1GKD = pages.k_1GXD[:, :, slots], pages.v_1GXD[:, :, slots]
    q_1HND = q_NHD[span.row : span.row + span.size].transpose(0, 1)[None]
    seen_NK = torch.arange(stop)[None] <= torch.arange(span.position, stop)[:, None]
    o_1HND = torch.nn.functional.scaled_dot_product_attention(
        q_1HND, k_1GKD, v_1GKD, attn_mask=seen_NK, enable_gqa=True
    )
    out_NE[span.row : span.row + span.size] = o_1HND[0].transpose(0, 1).flatten(1)


def test_the_self_test_passes(real_model: RealModel) -> None:
    verdict = check_row_invariance(real_model.model, block_tokens=BLOCK)
    assert (verdict.exact, verdict.differs) == (True, ())


def test_the_self_test_catches_plain_attention_and_names_what_differs(real_model: RealModel) -> None:
    verdict = check_row_invariance(real_model.model, block_tokens=BLOCK, attention=plain_sdpa)
    assert not verdict.exact
    assert any("KV" in name for name in verdict.differs)
    assert verdict.bits != check_row_invariance(real_model.model, block_tokens=BLOCK).bits
