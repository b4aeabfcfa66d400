"""The engine's thread: its answers equal those of an engine stepped by hand; it waits, stops and breaks in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from shared.contracts import limits
from shared.contracts.errors import BlockMiss, InternalError, InvalidRequest
from shared.contracts.ids import RequestId
from shared.contracts.messages import Sampling
from shared.contracts.ports import Produced, SequenceSpec
from shared.engine.hash_engine import HashEngine
from shared.worker.engine_loop import EngineLoop, Step

SAMPLING = Sampling(temperature=0.0, top_p=1.0, seed=1, stop_tokens=())
BLOCK = 8


def engine() -> HashEngine:
    return HashEngine(pages=64, sequences_max=8, block_tokens=BLOCK, vocabulary=1_000, context_tokens=256)


def spec(name: str, prompt: list[int], new: int) -> SequenceSpec:
    return SequenceSpec(
        request=RequestId(name), tokens=prompt, prompt_tokens=len(prompt), max_new_tokens=new, sampling=SAMPLING
    )


def by_hand(sequence: SequenceSpec) -> list[int]:
    alone = engine()
    alone.add(sequence)
    tokens: list[int] = []
    while produced := alone.step(64):
        tokens += [t for p in produced for t in p.tokens]
    return tokens


@asynccontextmanager
async def running(loop: EngineLoop) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(loop.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def collect(loop: EngineLoop, until: Callable[[dict[str, list[int]]], bool]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    async with asyncio.timeout(10):
        async for step in loop.steps():
            for produced in step.produced:
                tokens.setdefault(produced.request, []).extend(produced.tokens)
            if until(tokens):
                break
    return tokens


async def test_sequences_beside_each_other_get_what_each_gets_alone() -> None:
    specs = [spec("a", list(range(30)), 40), spec("b", [5] * 17, 25), spec("c", [9], 60)]
    loop = EngineLoop(engine(), step_rows=16)
    async with running(loop):
        for one in specs:
            await loop.add(one)
        wanted = {one.request: one.max_new_tokens for one in specs}
        tokens = await collect(loop, lambda t: {r: len(x) for r, x in t.items()} == wanted)
    assert tokens == {one.request: by_hand(one) for one in specs}


async def test_an_export_is_what_the_engine_exports_and_fails_after_remove() -> None:
    loop = EngineLoop(engine(), step_rows=16)
    one = spec("a", list(range(20)), 1)
    alone = engine()
    alone.add(one)
    while alone.step(64):
        pass
    async with running(loop):
        await loop.add(one)
        await collect(loop, lambda t: bool(t.get("a")))
        assert await loop.export(one.request, 1, BLOCK) == alone.export(one.request, 1, BLOCK)
        assert await loop.export(one.request, 2, 4) == alone.export(one.request, 2, 4)
        await loop.remove(one.request)
        await loop.remove(one.request)
        assert loop.pages_free == 64
        with pytest.raises(BlockMiss):
            await loop.export(one.request, 1, BLOCK)


async def test_errors_of_the_engine_are_the_callers() -> None:
    loop = EngineLoop(engine(), step_rows=16)
    async with running(loop):
        with pytest.raises(InvalidRequest):
            await loop.add(spec("a", [1_000], 1))
        await loop.add(spec("a", [999], 1))


async def test_the_engine_runs_only_a_few_steps_ahead_of_its_consumer() -> None:
    loop = EngineLoop(engine(), step_rows=16)
    async with running(loop):
        await loop.add(spec("a", [1, 2, 3], 200))
        steps = loop.steps()
        seen: list[Step] = [await anext(steps)]
        # A command passes through the thread, so that the engine had its chance to run on.
        for _ in range(5):
            await loop.export(RequestId("a"), 0, 1)
        await loop.remove(RequestId("a"))
        try:
            async with asyncio.timeout(0.2):
                async for step in steps:
                    seen.append(step)
        except TimeoutError:
            pass
    assert len(seen) <= 1 + limits.STEPS_AHEAD_MAX


class BrokenEngine(HashEngine):
    def step(self, budget_rows: int) -> list[Produced]:
        raise ZeroDivisionError("a bug")


async def test_a_broken_engine_ends_the_loop_and_everything_that_waits() -> None:
    loop = EngineLoop(BrokenEngine(pages=8), step_rows=16)
    async with running(loop) as task:
        await loop.add(spec("a", [1], 1))
        await asyncio.wait({task}, timeout=10)
        assert isinstance(task.exception(), ZeroDivisionError)
        with pytest.raises(InternalError):
            await loop.add(spec("b", [1], 1))
