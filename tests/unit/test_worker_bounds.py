"""Breaker, page gate, race: what bounds a worker."""

from __future__ import annotations

import asyncio

import pytest

from shared.contracts.errors import OutOfPages
from shared.worker.breaker import Breaker
from shared.worker.page_gate import PageGate
from shared.worker.race import unless


def test_a_breaker_opens_after_failures_in_a_row_and_admits_one_probe() -> None:
    breaker = Breaker(failures_max=3, open_s=5.0)
    for _ in range(2):
        breaker.failed(0.0)
    breaker.succeeded()
    for _ in range(2):
        breaker.failed(1.0)
    assert breaker.allows(1.0)
    breaker.failed(1.0)
    assert [breaker.allows(t) for t in (1.0, 5.9, 6.0, 6.1)] == [False, False, True, False]
    breaker.failed(6.2)
    assert [breaker.allows(t) for t in (11.1, 11.3)] == [False, True]
    breaker.succeeded()
    assert breaker.allows(11.4)
    assert not breaker.is_open()


async def test_pages_go_to_who_came_first_even_if_a_smaller_wish_would_fit() -> None:
    gate = PageGate(10)
    order: list[str] = []

    async def take(name: str, pages: int, release: asyncio.Event) -> None:
        async with gate.hold(pages, 5.0):
            order.append(name)
            await release.wait()

    first, second, third = asyncio.Event(), asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(take("first", 6, first))
        await asyncio.sleep(0)
        group.create_task(take("large", 8, second))
        await asyncio.sleep(0)
        group.create_task(take("small", 2, third))
        await asyncio.sleep(0)
        assert (order, gate.free) == (["first"], 4)
        for event in (first, second, third):
            event.set()
    assert order == ["first", "large", "small"]
    assert gate.free == 10


async def test_a_wait_for_pages_ends_and_blocks_nobody_behind_it() -> None:
    gate = PageGate(4)
    with pytest.raises(OutOfPages, match="never fit"):
        async with gate.hold(5, 1.0):
            pass
    async with gate.hold(3, 1.0):
        with pytest.raises(OutOfPages, match="did not come free"):
            async with gate.hold(2, 0.01):
                pass
        async with gate.hold(1, 1.0):
            assert gate.free == 0
    assert gate.free == 4


async def test_a_cancelled_wait_for_pages_keeps_none() -> None:
    gate = PageGate(4)

    async def take() -> None:
        async with gate.hold(4, 60.0):
            raise AssertionError("was not to get any")

    async with gate.hold(1, 1.0):
        waiting = asyncio.create_task(take())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        async with gate.hold(3, 1.0):
            pass
    assert gate.free == 4


async def test_work_stops_before_unless_returns_and_its_errors_come_out() -> None:
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    stopped = asyncio.Event()

    async def long_work() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return 1

    async def short_work() -> int:
        return 2

    async def broken_work() -> int:
        raise OutOfPages("none")

    assert await unless(ended, short_work()) == 2
    with pytest.raises(OutOfPages):
        await unless(ended, broken_work())
    asyncio.get_running_loop().call_soon(ended.set_result, 0)
    assert await unless(ended, long_work()) is None
    assert stopped.is_set()
