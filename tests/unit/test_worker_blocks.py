"""Reading and writing blocks over scripted objects: runs, deadlines, dropped writes, the order of targets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from shared.contracts import limits
from shared.contracts.errors import BlockMiss, Overloaded
from shared.contracts.ids import NamespaceId, RequestId
from shared.contracts.messages import BlockRef, Sampling
from shared.contracts.ports import SequenceSpec
from shared.engine.hash_engine import HashEngine
from shared.worker.block_reader import BlockReader, Wanted
from shared.worker.block_writer import BlockWriter, SequenceWrites
from shared.worker.breaker import Breaker
from shared.worker.counters import Counters
from shared.worker.engine_loop import EngineLoop

NAMESPACE = NamespaceId("ns_" + "1" * 32)
BLOCK = 8


class SteppedClock:
    """Stands still unless a test moves it."""

    def __init__(self) -> None:
        self.at_s = 1_000.0

    def now_s(self) -> float:
        return self.at_s

    def monotonic_s(self) -> float:
        return self.at_s


def ref(i: int) -> BlockRef:
    return BlockRef(source="pool", namespace=NAMESPACE, key=bytes([i]) * 32, put_id=bytes(16))


def wanted(count: int) -> list[Wanted]:
    return [Wanted(ref(i), b"s" * 32, 4) for i in range(count)]


class ScriptedObjects:
    """`missing`: index → reason. `stuck`: indices whose read never returns."""

    def __init__(self, missing: dict[int, str], stuck: frozenset[int] = frozenset()) -> None:
        self.missing = missing
        self.stuck = stuck
        self.stopped: set[int] = set()

    async def get(self, ref: BlockRef, secret: bytes, payload_bytes: int) -> bytes:
        index = ref.key[0]
        if index in self.stuck:
            try:
                await asyncio.Event().wait()
            finally:
                self.stopped.add(index)
        await asyncio.sleep(0)
        if index in self.missing:
            raise BlockMiss(self.missing[index], "scripted")
        return bytes([index]) * payload_bytes


def reader(objects: ScriptedObjects, breaker: Breaker | None = None) -> tuple[BlockReader, Counters]:
    counters = Counters()
    made = BlockReader(objects, breaker or Breaker(), counters, SteppedClock())  # type: ignore[arg-type]
    return made, counters


async def test_all_blocks_are_read_in_order() -> None:
    made, counters = reader(ScriptedObjects({}))
    run = await made.read(wanted(50))
    assert run.payloads == [bytes([i]) * 4 for i in range(50)]
    assert not run.missed
    assert not counters.snapshot()


async def test_the_run_ends_at_the_first_miss_and_what_lies_behind_is_not_waited_for() -> None:
    objects = ScriptedObjects({2: "absent"}, stuck=frozenset({4}))
    made, counters = reader(objects)
    async with asyncio.timeout(5):
        run = await made.read(wanted(5))
    assert run.payloads == [bytes([i]) * 4 for i in range(2)]
    assert run.missed[2] == "absent"
    assert counters.snapshot()["miss.absent"] == 1
    assert objects.stopped == {4}


async def test_a_block_that_is_late_is_a_miss_and_trips_the_breaker_in_the_end(monkeypatch: Any) -> None:
    monkeypatch.setattr(limits, "BLOCK_READ_BASE_S", 0.01)
    monkeypatch.setattr(limits, "BLOCK_READ_EACH_S", 0.0)
    breaker = Breaker(failures_max=2)
    objects = ScriptedObjects({}, stuck=frozenset({1}))
    made, counters = reader(objects, breaker)
    for _ in range(2):
        run = await made.read(wanted(3))
        assert len(run.payloads) == 1
        assert run.missed[1] == "late"
    assert counters.snapshot()["miss.late"] == 2
    assert (await made.read(wanted(3))).payloads == []
    assert counters.snapshot()["miss.breaker_open"] == 3


# -- writing ---------------------------------------------------------------------------------------------------------


class Target:
    """Keeps what it stores; `error` instead, where one is given."""

    def __init__(self, error: Exception | None = None, gate: asyncio.Event | None = None) -> None:
        self.error = error
        self.gate = gate
        self.stored: dict[int, bytes] = {}
        self.under_way = 0
        self.most_under_way = 0

    async def store(self, key: bytes, position: int, payload: bytes) -> BlockRef:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            if self.gate is not None:
                await self.gate.wait()
            if self.error is not None:
                raise self.error
        finally:
            self.under_way -= 1
        self.stored[position] = payload
        return BlockRef(source="pool", namespace=NAMESPACE, key=key, put_id=bytes(16))


class Bench:
    """A prompt of `blocks` blocks and one token, computed, in a running engine loop."""

    def __init__(self, engine: EngineLoop, counters: Counters, breaker: Breaker, tasks: asyncio.TaskGroup) -> None:
        self.engine = engine
        self.counters = counters
        writer = BlockWriter(engine, breaker, counters, SteppedClock())

        def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            return tasks.create_task(work)

        self.writes = SequenceWrites(writer, RequestId("r"), BLOCK, spawn)


@asynccontextmanager
async def bench(blocks: int, breaker: Breaker | None = None) -> AsyncIterator[Bench]:
    engine = EngineLoop(HashEngine(pages=64, block_tokens=BLOCK), step_rows=1_024)
    running = asyncio.create_task(engine.run())
    prompt = list(range(blocks * BLOCK + 1))
    sampling = Sampling(temperature=0.0, top_p=1.0, seed=1, stop_tokens=())
    try:
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            await engine.add(
                SequenceSpec(
                    request=RequestId("r"),
                    tokens=prompt,
                    prompt_tokens=len(prompt),
                    max_new_tokens=1,
                    sampling=sampling,
                )
            )
            async for step in engine.steps():
                if step.produced[0].tokens:
                    break
            yield Bench(engine, Counters(), breaker or Breaker(), tasks)
    finally:
        running.cancel()
        await asyncio.wait({running})


def alone(blocks: int) -> list[bytes]:
    """The payloads of the same prompt, from an engine stepped by hand."""
    engine = HashEngine(pages=64, block_tokens=BLOCK)
    prompt = list(range(blocks * BLOCK + 1))
    sampling = Sampling(temperature=0.0, top_p=1.0, seed=1, stop_tokens=())
    engine.add(
        SequenceSpec(
            request=RequestId("r"), tokens=prompt, prompt_tokens=len(prompt), max_new_tokens=1, sampling=sampling
        )
    )
    while engine.step(64):
        pass
    return [engine.export(RequestId("r"), i, BLOCK) for i in range(blocks)]


async def test_every_block_is_written_once_within_the_bound_in_flight() -> None:
    gate = asyncio.Event()
    target = Target(gate=gate)
    async with bench(40) as b:
        for position in range(40):
            b.writes.begin(position, bytes([position]) * 32, (target,))
            b.writes.begin(position, bytes([position]) * 32, (target,))
        await b.writes.wait(0.05)
        gate.set()
        await b.writes.wait(5.0)
        assert [b.writes.ref(i) is not None for i in range(40)] == [True] * 40
    assert [target.stored[i] for i in range(40)] == alone(40)
    assert target.most_under_way <= limits.BLOCK_WRITES_IN_FLIGHT_MAX


async def test_what_the_first_target_refuses_the_next_one_gets() -> None:
    pool, handoff = Target(error=Overloaded("full")), Target()
    async with bench(2) as b:
        b.writes.begin(0, bytes(32), (pool, handoff))
        b.writes.begin(1, bytes(32), (pool,))
        await b.writes.wait(5.0)
        assert b.writes.ref(0) is not None
        assert b.writes.ref(1) is None
        assert b.counters.snapshot() == {"write.failed": 2, "write.pool": 1}


async def test_an_open_breaker_drops_writes_at_once() -> None:
    breaker = Breaker(failures_max=1, open_s=60.0)
    breaker.failed(1_000.0)
    async with bench(1, breaker) as b:
        target = Target()
        b.writes.begin(0, bytes(32), (target,))
        await b.writes.wait(5.0)
        assert (target.stored, dict(b.counters.snapshot())) == ({}, {"write.breaker_open": 1})


async def test_a_block_whose_sequence_left_the_engine_is_dropped() -> None:
    async with bench(2) as b:
        await b.engine.remove(RequestId("r"))
        target = Target()
        b.writes.begin(1, bytes(32), (target,))
        await b.writes.wait(5.0)
        assert (target.stored, dict(b.counters.snapshot())) == ({}, {"write.removed": 1})


async def test_a_tail_is_part_of_a_block() -> None:
    async with bench(2) as b:
        target = Target()
        b.writes.begin(2, bytes(32), (target,), tokens=1)
        await b.writes.wait(5.0)
        assert len(target.stored[2]) == 8
