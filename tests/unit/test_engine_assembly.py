"""A step's rows, slots and tiles, and payloads in and out of pages, with exact expectations; no model."""

from __future__ import annotations

import pytest
import torch

from shared.contracts.errors import BlockMiss
from shared.engine.attention import tiles_of
from shared.engine.kv_pages import KvPages
from shared.engine.model import Run
from shared.engine.model_config import ModelConfig
from shared.engine.paged_engine import Rows
from shared.engine.torch_engine import assemble

BLOCK = 64
CONFIG = ModelConfig(
    layers=3,
    model_dim=8,
    feed_forward_dim=8,
    query_heads=4,
    kv_heads=2,
    head_dim=2,
    vocabulary=10,
    context_tokens=256,
    rope_theta=1e4,
    norm_epsilon=1e-5,
    tied_embedding=True,
)


def test_rows_of_several_sequences_lie_one_after_another() -> None:
    step, last = assemble(
        [Rows([5] * 70, 60, [4, 5, 9], None), Rows([7], 64, [2, 0], None), Rows([8, 9], 0, [6], None)], BLOCK
    )
    assert step.ids_N.tolist() == [5] * 70 + [7, 8, 9]
    assert step.positions_N.tolist() == [*range(60, 130), 64, 0, 1]
    assert last == [69, 70, 72]
    # Pages 4 and 5 are neighbours: positions 60..127 are one run; position 128 starts page 9.
    assert step.runs == (Run(0, 68, 4 * 64 + 60), Run(68, 2, 9 * 64), Run(70, 1, 0), Run(71, 2, 6 * 64))
    assert [(s.row, s.size, s.position) for s in step.spans] == [(0, 70, 60), (70, 1, 64), (71, 2, 0)]


def test_few_rows_are_padded_to_eight() -> None:
    step, last = assemble([Rows([3], 9, [1], None)], BLOCK)
    assert step.ids_N.tolist() == [3, 0, 0, 0, 0, 0, 0, 0]
    assert step.runs == (Run(0, 1, 64 + 9),)
    assert last == [0]


def test_tiles_are_viewed_or_gathered_in_whole_chunks() -> None:
    first, second = tiles_of([*range(10, 26), 30, 29], BLOCK)
    assert first == (640, None)
    assert second.slots_K is not None
    assert second.slots_K.tolist() == [*range(30 * 64, 31 * 64), *range(29 * 64, 30 * 64), *[*range(1920, 1984)] * 6]


def test_a_payload_has_layers_then_k_and_v_then_heads_tokens_and_dims() -> None:
    kv = KvPages(CONFIG, pages=3, block_tokens=BLOCK, dtype=torch.bfloat16)
    assert kv.block_shape == (3, 2, 2, BLOCK, 2)
    for layer, views in enumerate(kv.layers):
        for unit in range(4):
            for slot in range(BLOCK):
                views.kv_UXD[unit, BLOCK + slot] = torch.tensor([layer * 100 + unit * 10, slot])
    payload = kv.read(1, BLOCK)
    values = torch.frombuffer(bytearray(payload), dtype=torch.bfloat16).view(3, 2, 2, BLOCK, 2)
    assert values[2, 1, 0, 17].tolist() == [220.0, 17.0]  # layer 2, V, head 0
    tail = torch.frombuffer(bytearray(kv.read(1, 5)), dtype=torch.bfloat16).view(3, 2, 2, 5, 2)
    assert torch.equal(tail, values[:, :, :, :5])


def test_payloads_come_back_and_touch_one_page_only() -> None:
    kv = KvPages(CONFIG, pages=3, block_tokens=BLOCK, dtype=torch.bfloat16)
    payload = torch.arange(kv.payload_bytes(BLOCK) // 2, dtype=torch.int16).numpy().tobytes()
    kv.write(1, memoryview(payload), BLOCK)
    assert kv.read(1, BLOCK) == payload
    assert kv.read(0, BLOCK) == kv.read(2, BLOCK) == bytes(len(payload))
    assert torch.equal(kv.layers[1].k_1GXD[0, 1, 64:128], kv.layers[1].kv_UXD[1, 64:128])
    assert torch.equal(kv.layers[1].v_1GXD[0, 0, 64:128], kv.layers[1].kv_UXD[2, 64:128])


def test_a_payload_of_another_size_is_a_miss() -> None:
    kv = KvPages(CONFIG, pages=1, block_tokens=BLOCK, dtype=torch.bfloat16)
    kv.check_payload(bytes(kv.payload_bytes(7)), 7)
    with pytest.raises(BlockMiss):
        kv.check_payload(bytes(kv.payload_bytes(7)), 8)
