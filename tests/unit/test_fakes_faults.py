"""The fault wrapper: which call fails, and whether it had its effect."""

from __future__ import annotations

import asyncio

import pytest

from shared.contracts import subjects
from shared.contracts.errors import BlockMiss, DeadlineExceeded, Overloaded
from tests.fakes.bus import Broker
from tests.fakes.faults import DrawnFaults, NthFailure, faulty, sweep
from tests.fakes.store import Fate, MemoryDisk, flipped, torn

ANY = subjects.work_any("decode", "m")


async def test_the_nth_call_fails_before_or_after_its_effect() -> None:
    disk = MemoryDisk(lambda: 0.0)
    store = faulty(disk.connect(), NthFailure(1, lambda: Overloaded("full")))
    with pytest.raises(Overloaded):
        await store.put("pool", "aa", [b"1"])
    assert disk.names("pool") == []
    await store.put("pool", "aa", [b"1", b"2"])
    assert await store.get("pool", "aa") == b"12"
    store = faulty(disk.connect(), NthFailure(1, lambda: DeadlineExceeded("late"), "after"))
    with pytest.raises(DeadlineExceeded):
        await store.put("pool", "bb", [b"1"])
    assert disk.names("pool") == ["aa", "bb"]


async def test_deliveries_are_behind_the_plan_too() -> None:
    plan = NthFailure(2, lambda: DeadlineExceeded("lost"), "after")
    broker = Broker()
    bus = faulty(broker.connect(), plan, "bus")
    await bus.publish(ANY, b"x", "id")
    async with asyncio.timeout(10):
        async for delivery in bus.pull([ANY], lambda: 1):
            assert delivery.number == 1
            with pytest.raises(DeadlineExceeded):
                await delivery.ack()
            break
    assert plan.failed == "bus.pull.item.ack"
    assert not broker.stream_of(ANY).pending()


def test_a_sweep_fails_each_call_once() -> None:
    seen: list[str | None] = []

    def scenario(plan: NthFailure) -> None:
        async def run() -> None:
            store = faulty(MemoryDisk(lambda: 0.0).connect(), plan, "store")
            for call in (store.put("pool", "aa", [b"x"]), store.get("pool", "aa"), store.delete("pool", "aa")):
                try:
                    await call
                except (Overloaded, BlockMiss):
                    pass
            seen.append(plan.failed)

        asyncio.run(run())

    assert sweep(scenario, lambda: Overloaded("no")) == 3
    assert seen == ["store.put", "store.get", "store.delete", None]


async def test_drawn_faults_are_the_seeds() -> None:
    async def run(seed: str) -> list[bool]:
        plan = DrawnFaults(seed, {"store.get": 0.5}, lambda: Overloaded("no"))
        disk = MemoryDisk(lambda: 0.0)
        store = faulty(disk.connect(), plan, "store")
        await store.put("pool", "aa", [b"x"])
        fine = []
        for _ in range(40):
            try:
                fine.append(await store.get("pool", "aa") == b"x")
            except Overloaded:
                fine.append(False)
        return fine

    one, again, other = await run("1"), await run("1"), await run("2")
    assert one == again != other
    assert 5 < sum(one) < 35


async def test_objects_may_be_torn_flipped_lost_or_refused() -> None:
    disk = MemoryDisk(lambda: 7.0)
    store = disk.connect()
    fates = {
        "torn": Fate(damage=torn),
        "flipped": Fate(damage=flipped),
        "lost": Fate(applied=False),
        "refused": Fate(applied=False, error=Overloaded("full")),
        "unsure": Fate(error=DeadlineExceeded("late")),
    }
    disk.fate = lambda operation, space, name: fates.get(name, Fate()) if operation == "put" else Fate()
    for name in ("torn", "flipped", "lost"):
        await store.put("pool", name, [b"abcd"])
    with pytest.raises(Overloaded):
        await store.put("pool", "refused", [b"abcd"])
    with pytest.raises(DeadlineExceeded):
        await store.put("pool", "unsure", [b"abcd"])
    assert await store.get("pool", "torn") == b"ab"
    assert await store.get("pool", "flipped") == b"abce"
    assert await store.get("pool", "unsure") == b"abcd"
    for name in ("lost", "refused"):
        with pytest.raises(BlockMiss) as missed:
            await store.get("pool", name)
        assert missed.value.reason == "absent"
    found = [info async for info in store.list("pool")]
    assert [(info.name, info.object_bytes, info.stored_at_s) for info in found] == [
        ("flipped", 4, 7.0),
        ("torn", 2, 7.0),
        ("unsure", 4, 7.0),
    ]
