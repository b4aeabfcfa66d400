"""What every engine does behind `ports.Engine`: one suite for the real model and for the hash engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from shared.contracts.errors import BlockMiss, InvalidRequest, OutOfPages
from shared.contracts.ids import RequestId
from shared.contracts.messages import Sampling
from shared.contracts.ports import Engine, Produced, SequenceSpec
from shared.engine.hash_engine import HashEngine

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
BLOCK = 64
GREEDY = Sampling(temperature=0.0, top_p=1.0, seed=0, stop_tokens=())
PROMPT = tuple((i * 7919 + 31) % 49_000 for i in range(150))
STEPS_MAX = 400

Factory = Callable[..., Engine]


@pytest.fixture(params=["hash", pytest.param("torch", marks=pytest.mark.model)])
def make(request: pytest.FixtureRequest) -> Factory:
    if request.param == "hash":
        return lambda pages=16, sequences_max=8: HashEngine(pages=pages, sequences_max=sequences_max)
    real = request.getfixturevalue("real_model")
    from shared.engine.torch_engine import TorchEngine

    return lambda pages=16, sequences_max=8: TorchEngine(
        real.card, real.model, pages=pages, sequences_max=sequences_max, block_tokens=BLOCK
    )


def spec(request: RequestId = A, tokens: Sequence[int] = PROMPT, **changes: Any) -> SequenceSpec:
    fields: dict[str, Any] = {
        "request": request,
        "tokens": tokens,
        "prompt_tokens": len(tokens),
        "max_new_tokens": 6,
        "sampling": GREEDY,
    }
    return SequenceSpec(**fields | changes)


def finish(engine: Engine, budget: int = 512) -> dict[RequestId, list[Produced]]:
    """Steps until each sequence has finished; news of each, in order."""
    news: dict[RequestId, list[Produced]] = {}
    for _ in range(STEPS_MAX):
        produced = engine.step(budget)
        if not produced:
            return news
        for entry in produced:
            news.setdefault(entry.request, []).append(entry)
    raise AssertionError("the engine does not come to an end")


def answer(engine: Engine, budget: int = 512, request: RequestId = A) -> list[int]:
    return [token for entry in finish(engine, budget)[request] for token in entry.tokens]


def cold_answer(make: Factory, **changes: Any) -> list[int]:
    engine = make()
    engine.add(spec(**changes))
    return answer(engine)


def test_an_answer_is_numbered_without_gaps_and_ends_at_its_length(make: Factory) -> None:
    engine = make()
    engine.add(spec())
    news = finish(engine)[A]
    assert [entry.first for entry in news] == [0, 1, 2, 3, 4, 5]
    assert [len(entry.tokens) for entry in news] == [1] * 6
    assert [entry.finish for entry in news] == [None] * 5 + ["length"]
    assert [entry.computed for entry in news] == [150, 151, 152, 153, 154, 155]
    assert all(entry.logprobs is None for entry in news)


def test_a_prompt_in_parts_reports_blocks_as_they_fill(make: Factory) -> None:
    engine = make()
    engine.add(spec())
    news = finish(engine, budget=70)[A]
    assert [entry.computed for entry in news][:3] == [64, 128, 150]
    assert [entry.tokens for entry in news][:2] == [(), ()]
    assert len(news[2].tokens) == 1


@pytest.mark.parametrize("budget", [7, 64, 100])
def test_the_split_of_a_prompt_changes_no_token(make: Factory, budget: int) -> None:
    engine = make()
    engine.add(spec())
    assert answer(engine, budget) == cold_answer(make)


def test_neighbours_change_no_token(make: Factory) -> None:
    expected = cold_answer(make)
    engine = make()
    engine.add(spec(B, PROMPT[:40], max_new_tokens=9))
    engine.step(512)
    engine.add(spec())
    engine.add(spec(C, PROMPT[5:25], max_new_tokens=3))
    assert answer(engine) == expected


def test_a_hit_with_a_tail_gives_the_cold_answer(make: Factory) -> None:
    source = make()
    source.add(spec(max_new_tokens=1))
    source.step(512)
    prefix = [memoryview(source.export(A, i, BLOCK)) for i in range(2)]
    tail = source.export(A, 2, 21)
    engine = make()
    engine.add(spec(prefix=prefix, tail=(tail, 21)))
    news = finish(engine)[A]
    assert news[0].computed == 150
    assert [t for entry in news for t in entry.tokens] == cold_answer(make)
    assert engine.export(A, 1, BLOCK) == prefix[1]


def test_recomputed_and_imported_blocks_have_the_same_bytes(make: Factory) -> None:
    source, engine = make(), make()
    source.add(spec(max_new_tokens=1))
    source.step(512)
    engine.add(spec(max_new_tokens=1, prefix=[source.export(A, 0, BLOCK)]))
    finish(engine, budget=5)
    assert [engine.export(A, i, n) for i, n in ((0, 64), (1, 64), (2, 22))] == [
        source.export(A, i, n) for i, n in ((0, 64), (1, 64), (2, 22))
    ]


def test_a_replay_of_delivered_tokens_goes_on_with_the_same_answer(make: Factory) -> None:
    sampling = Sampling(temperature=0.9, top_p=0.95, seed=42, stop_tokens=())
    expected = cold_answer(make, sampling=sampling)
    engine = make()
    engine.add(spec(tokens=[*PROMPT, *expected[:4]], prompt_tokens=150, sampling=sampling))
    news = finish(engine)[A]
    assert news[0].first == 4
    assert [t for entry in news for t in entry.tokens] == expected[4:]


def test_a_seed_fixes_the_answer_and_another_changes_it(make: Factory) -> None:
    def drawn(seed: int) -> list[int]:
        return cold_answer(make, sampling=Sampling(temperature=1.5, top_p=1.0, seed=seed, stop_tokens=()))

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_a_known_stop_token_ends_at_once(make: Factory) -> None:
    engine = make()
    sampling = Sampling(temperature=0.0, top_p=1.0, seed=0, stop_tokens=(7,))
    engine.add(spec(tokens=[*PROMPT, 5, 7], prompt_tokens=150, sampling=sampling))
    (entry,) = engine.step(512)
    assert (entry.first, entry.tokens, entry.finish) == (2, (), "stop")
    assert engine.step(512) == []


def test_a_stop_token_inside_the_prompt_ends_nothing(make: Factory) -> None:
    engine = make()
    sampling = Sampling(temperature=0.0, top_p=1.0, seed=0, stop_tokens=(PROMPT[-1],))
    engine.add(spec(sampling=sampling, max_new_tokens=1))
    assert finish(engine)[A][0].finish == "length"


def test_an_answer_delivered_in_full_ends_at_once(make: Factory) -> None:
    engine = make()
    engine.add(spec(tokens=[*PROMPT, 5, 6], prompt_tokens=150, max_new_tokens=2))
    (entry,) = engine.step(512)
    assert (entry.first, entry.tokens, entry.finish, entry.computed) == (2, (), "length", 0)


def test_logprobs_come_when_asked_for(make: Factory) -> None:
    engine = make()
    sampling = Sampling(temperature=0.0, top_p=1.0, seed=0, stop_tokens=(), top_logprobs=3)
    engine.add(spec(sampling=sampling, max_new_tokens=2))
    for entry in finish(engine)[A]:
        assert entry.logprobs is not None
        (logprob,) = entry.logprobs
        assert logprob.top[0] == (entry.tokens[0], logprob.logprob)
        values = [value for _, value in logprob.top]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert values[0] <= 0.0


def test_a_payload_of_another_size_is_a_miss_and_changes_nothing(make: Factory) -> None:
    engine = make()
    for changes in ({"prefix": [b"short"]}, {"tail": (b"short", 5)}):
        with pytest.raises(BlockMiss) as caught:
            engine.add(spec(**changes))
        assert caught.value.reason == "shape"
    assert engine.pages_free() == 16
    engine.add(spec())


def test_bad_specs_are_refused(make: Factory) -> None:
    engine = make()
    size = engine.profile.kv_bytes_token
    bad = [
        spec(tokens=[1, 49_152]),
        spec(tokens=[1, -1]),
        spec(tokens=[1] * (engine.profile.context_tokens + 1)),
        spec(tokens=[1] * engine.profile.context_tokens),
        spec(tokens=[]),
        spec(prompt_tokens=151),
        spec(max_new_tokens=0),
        spec(tokens=PROMPT[:64], prefix=[bytes(64 * size)]),
        spec(tail=(bytes(64 * size), 64)),
    ]
    for case in bad:
        with pytest.raises(InvalidRequest):
            engine.add(case)
    assert engine.pages_free() == 16
    engine.add(spec())
    with pytest.raises(InvalidRequest):
        engine.add(spec())


def test_room_is_refused_without_a_change(make: Factory) -> None:
    engine = make(pages=4, sequences_max=2)
    engine.add(spec(A, PROMPT[:100]))
    assert engine.pages_free() == 2
    with pytest.raises(OutOfPages):
        engine.add(spec(B, PROMPT[:130]))
    engine.add(spec(B, PROMPT[:10], max_new_tokens=3))
    assert engine.pages_free() == 1
    with pytest.raises(OutOfPages):
        engine.add(spec(C, PROMPT[:2], max_new_tokens=1))


def test_pages_are_reserved_for_the_prompt_and_one_more_and_never_for_what_cannot_come(make: Factory) -> None:
    engine = make()
    engine.add(spec(A, PROMPT[:64], max_new_tokens=1))
    assert engine.pages_free() == 15
    engine.add(spec(B, PROMPT[:64], max_new_tokens=600))
    assert engine.pages_free() == 13


def test_pages_stay_until_remove_and_remove_is_idempotent(make: Factory) -> None:
    engine = make()
    engine.add(spec())
    finish(engine)
    assert engine.pages_free() == 13
    engine.remove(A)
    engine.remove(A)
    engine.remove(B)
    assert engine.pages_free() == 16


def test_a_removed_sequence_is_stepped_no_more(make: Factory) -> None:
    engine = make()
    engine.add(spec())
    engine.add(spec(B))
    engine.step(512)
    engine.remove(A)
    assert set(finish(engine)) == {B}


def test_without_a_free_page_the_youngest_ends_and_the_oldest_goes_on(make: Factory) -> None:
    engine = make(pages=4)
    engine.add(spec(A, PROMPT[:60], max_new_tokens=90))
    engine.add(spec(B, PROMPT[60:120], max_new_tokens=90))
    news = finish(engine)
    assert news[B][-1].finish == "insufficient_system_resource"
    assert news[B][-1].tokens == ()
    assert news[B][-1].computed == 128
    assert news[A][-1].finish is None
    engine.remove(B)
    rest = finish(engine)[A]
    assert rest[-1].finish == "length"
    assert rest[0].first == news[A][-1].first + 1


def test_the_context_bounds_an_answer(make: Factory) -> None:
    engine = make(pages=2)
    assert engine.profile.context_tokens == 128
    engine.add(spec(A, PROMPT[:125], max_new_tokens=100))
    news = finish(engine)[A]
    assert [len(entry.tokens) for entry in news] == [1, 1, 1]
    assert news[-1].finish == "length"


def test_nothing_to_do_is_an_empty_list(make: Factory) -> None:
    assert make().step(512) == []


def test_the_profile_describes_a_block(make: Factory) -> None:
    engine = make()
    engine.add(spec(max_new_tokens=1))
    engine.step(512)
    profile = engine.profile
    payload = engine.export(A, 0, BLOCK)
    elements = 1
    for size in profile.block_shape:
        elements *= size
    width = {"opaque": 1, "bfloat16": 2}[profile.block_dtype]
    assert len(payload) == elements * width == profile.kv_bytes_token * profile.block_tokens
    assert len(engine.export(A, 2, 22)) == 22 * profile.kv_bytes_token
    assert profile.fingerprint.block_tokens == profile.block_tokens == BLOCK
