"""The suite of the block store on the store in memory, and how it fails."""

from __future__ import annotations

import asyncio
import time

import pytest

from shared.contracts import limits
from shared.contracts.errors import BlockMiss, DeadlineExceeded, Overloaded
from shared.contracts.ports import BlockStore
from tests.contract.store_suite import NAME, StoreSuite
from tests.fakes.store import MemoryDisk
from tests.sim.loop import SimLoop, run_simulation
from tests.sim.process import SimProcess


class TestMemoryStore(StoreSuite):
    @pytest.fixture
    def store(self) -> BlockStore:
        return MemoryDisk(time.time).connect()


async def test_a_closed_store_refuses() -> None:
    store = MemoryDisk(time.time).connect()
    await store.close()
    await store.close()
    with pytest.raises(Overloaded):
        await store.put("pool", NAME, [b"x"])


def test_a_store_that_is_away_is_late() -> None:
    async def main(loop: SimLoop) -> tuple[str, float]:
        disk = MemoryDisk(loop.time)
        store = disk.connect()
        await store.put("pool", NAME, [b"x"])
        disk.up = False
        with pytest.raises(DeadlineExceeded):
            await store.put("pool", NAME, [b"y"])
        with pytest.raises(BlockMiss) as missed:
            await store.get("pool", NAME)
        return missed.value.reason, loop.time()

    assert run_simulation(1, main) == ("late", limits.BLOCK_WRITE_TIMEOUT_S + limits.BLOCK_READ_TIMEOUT_S)


@pytest.mark.parametrize("step", range(1, 4))
def test_a_put_whose_caller_died_is_whole_or_absent(step: int) -> None:
    async def main(loop: SimLoop) -> list[str]:
        disk = MemoryDisk(loop.time)
        dying = SimProcess("worker")
        dying.crash_at_step = step

        async def work() -> None:
            for _ in range(10):
                await disk.connect().put("pool", NAME, [b"a", b"b"])

        dying.start(work())
        await asyncio.sleep(1)
        return disk.names("pool")

    assert run_simulation(1, main) in ([], [NAME])
