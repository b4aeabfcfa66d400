"""The hash engine: any fault in any block is a wrong token."""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from shared.contracts.ids import RequestId
from shared.contracts.messages import Sampling
from shared.contracts.ports import SequenceSpec
from shared.engine.hash_engine import HashEngine
from shared.engine.load import load_engine

A = RequestId("a")
BLOCK = 4
PROMPT = tuple(range(100, 119))
GREEDY = Sampling(temperature=0.0, top_p=1.0, seed=1, stop_tokens=())


def engine(weights: str = "hash/1") -> HashEngine:
    return HashEngine(weights=weights, pages=32, block_tokens=BLOCK)


def first_token(made: HashEngine, prefix: tuple[bytes, ...] = (), tail: tuple[bytes, int] | None = None) -> int:
    made.add(
        SequenceSpec(
            request=A,
            tokens=PROMPT,
            prompt_tokens=len(PROMPT),
            max_new_tokens=1,
            sampling=GREEDY,
            prefix=prefix,
            tail=tail,
        )
    )
    return made.step(512)[0].tokens[0]


def blocks_of(made: HashEngine, tokens: tuple[int, ...]) -> list[bytes]:
    made.add(SequenceSpec(request=A, tokens=tokens, prompt_tokens=len(tokens), max_new_tokens=1, sampling=GREEDY))
    made.step(512)
    payloads = [made.export(A, i, BLOCK) for i in range(len(tokens) // BLOCK)]
    made.remove(A)
    return payloads


def test_kv_is_a_chain_of_hashes() -> None:
    payload = blocks_of(engine(), PROMPT)[0]
    before = hashlib.blake2b(b"hash/1", digest_size=8, person=b"root").digest()
    expected = b""
    for token in PROMPT[:BLOCK]:
        before = hashlib.blake2b(before + struct.pack("<Q", token), digest_size=8, person=b"kv").digest()
        expected += before
    assert payload == expected


def test_a_right_prefix_gives_the_cold_token() -> None:
    prefix = tuple(blocks_of(engine(), PROMPT))
    assert first_token(engine(), prefix) == first_token(engine())


@pytest.mark.parametrize("wrong", range(4))
def test_any_wrong_block_is_a_wrong_token(wrong: int) -> None:
    prefix = blocks_of(engine(), PROMPT)
    foreign = blocks_of(engine(), tuple(range(500, 519)))
    prefix[wrong] = foreign[wrong]
    assert first_token(engine(), tuple(prefix)) != first_token(engine())


def test_swapped_torn_and_repeated_blocks_are_wrong_tokens() -> None:
    cold = first_token(engine())
    good = blocks_of(engine(), PROMPT)
    swapped = (good[1], good[0], good[2], good[3])
    torn = (good[0][:16] + bytes(16), *good[1:])
    repeated = (good[0], good[0], good[2], good[3])
    assert all(first_token(engine(), bad) != cold for bad in (swapped, torn, repeated))


def test_blocks_of_another_model_are_wrong_tokens() -> None:
    foreign = tuple(blocks_of(engine("hash/other"), PROMPT))
    assert first_token(engine(), foreign) != first_token(engine())


def test_a_wrong_tail_is_a_wrong_token() -> None:
    cold = first_token(engine())
    prefix = tuple(blocks_of(engine(), PROMPT))
    source = engine()
    source.add(SequenceSpec(request=A, tokens=PROMPT, prompt_tokens=19, max_new_tokens=1, sampling=GREEDY))
    source.step(512)
    tail = source.export(A, 4, 2)
    assert first_token(engine(), prefix, (tail, 2)) == cold
    assert first_token(engine(), prefix, (tail[8:] + tail[:8], 2)) != cold


def test_no_stop_token_is_drawn() -> None:
    made = engine()
    token = first_token(made)
    made.remove(A)
    stops = GREEDY.__class__(temperature=0.0, top_p=1.0, seed=1, stop_tokens=(token,))
    made.add(SequenceSpec(request=A, tokens=PROMPT, prompt_tokens=19, max_new_tokens=1, sampling=stops))
    assert made.step(512)[0].tokens == ((token + 1) % 49152,)


def test_the_cost_model_sleeps_for_the_rows() -> None:
    slept: list[float] = []
    made = HashEngine(pages=8, block_tokens=BLOCK, rows_per_s=100.0, sleep=slept.append)
    made.add(SequenceSpec(request=A, tokens=PROMPT, prompt_tokens=19, max_new_tokens=2, sampling=GREEDY))
    made.step(512)
    made.step(512)
    assert slept == [0.19, 0.01]


def test_loading_it_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from shared.engine.load import load_engine\n"
        f"e = load_engine(Path({str(tmp_path)!r}), pages=4, threads=1, sequences_max=2, kind='hash')\n"
        "assert e.profile.pages == 4 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_without_a_model_folder_it_has_defaults(tmp_path: Path) -> None:
    made = load_engine(tmp_path, pages=8, threads=1, sequences_max=3, kind="hash")
    assert (made.profile.vocabulary, made.profile.context_tokens, made.profile.sequences_max) == (49152, 512, 3)
