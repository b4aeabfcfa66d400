"""Turns at the gate, and the outbox between a request and its client."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from services.gateway.gate import Gate, Slot
from services.gateway.outbox import Outbox
from services.gateway.queues import Waiting
from services.gateway.workers import Workers
from shared.contracts.errors import DeadlineExceeded, Overloaded
from shared.contracts.ids import AccountId, RequestId, WorkerId
from shared.contracts.messages import Role
from tests.unit.test_gateway_workers import beat


class StillClock:
    def __init__(self) -> None:
        self.at_s = 100.0

    def now_s(self) -> float:
        return self.at_s

    def monotonic_s(self) -> float:
        return self.at_s


def waiting(name: str, account: str = "a", deadline_s: float = 200.0) -> Waiting:
    return Waiting(request=RequestId(name), account=AccountId(account), cost=10, deadline_s=deadline_s)


@pytest.fixture
def gate() -> Gate:
    """One prefill and one decode slot: two requests fit (one runs, one waits at the worker)."""
    workers = Workers()
    roles: tuple[Role, Role] = ("prefill", "decode")
    for role in roles:
        workers.hear(beat(WorkerId(role), role, capacity=1), 100.0)
    return Gate("m", workers, StillClock(), queued_max=3)


async def enter(gate: Gate, stack: AsyncExitStack, one: Waiting) -> Slot:
    return await stack.enter_async_context(gate.slot(one))


def counts(gate: Gate) -> tuple[int, int, int]:
    return gate.waiting, gate.capacity.prefilling, gate.capacity.decoding


async def test_who_has_no_place_waits_for_one(gate: Gate) -> None:
    async with AsyncExitStack() as first, AsyncExitStack() as second, AsyncExitStack() as third:
        slot = await enter(gate, first, waiting("1"))
        await enter(gate, second, waiting("2"))
        entering = asyncio.create_task(enter(gate, third, waiting("3")))
        await asyncio.sleep(0)
        assert counts(gate) == (1, 2, 0)
        slot.handed_off()
        slot.handed_off()
        await asyncio.sleep(0)
        assert counts(gate) == (1, 1, 1), "decode is full as well"
        await first.aclose()
        await entering
        assert counts(gate) == (0, 2, 0)
    assert counts(gate) == (0, 0, 0)


async def test_who_leaves_before_or_just_as_the_turn_comes_leaves_nothing(gate: Gate) -> None:
    async with AsyncExitStack() as inside, AsyncExitStack() as outside:
        for name in ("1", "2"):
            await enter(gate, inside, waiting(name))
        entering = asyncio.create_task(enter(gate, outside, waiting("3")))
        await asyncio.sleep(0)
        entering.cancel()
        await asyncio.wait({entering})
        assert counts(gate) == (0, 2, 0)

        entering = asyncio.create_task(enter(gate, outside, waiting("4")))
        await asyncio.sleep(0)
        await inside.aclose()  # its turn came
        entering.cancel()
        await asyncio.wait({entering})
    assert counts(gate) == (0, 0, 0)


async def test_a_turn_that_does_not_come_in_time(gate: Gate) -> None:
    async with AsyncExitStack() as stack:
        for name in ("1", "2"):
            await enter(gate, stack, waiting(name))
        with pytest.raises(DeadlineExceeded, match="waited too long"):
            await enter(gate, stack, waiting("3", deadline_s=100.01))
        assert counts(gate) == (0, 2, 0)


async def test_a_full_queue_and_missing_workers_refuse_at_once(gate: Gate) -> None:
    async with AsyncExitStack() as stack:
        for name in ("1", "2"):
            await enter(gate, stack, waiting(name))
        tasks = [asyncio.create_task(enter(gate, stack, waiting(name))) for name in ("3", "4", "5")]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await enter(gate, stack, waiting("6"))
        gate.close()
        assert [type(error) for error in await asyncio.gather(*tasks, return_exceptions=True)] == [Overloaded] * 3
        assert counts(gate) == (0, 2, 0)
    with pytest.raises(Overloaded, match="No worker"):
        async with Gate("m", Workers(), StillClock(), 3).slot(waiting("1")):
            pass


async def test_the_outbox_gives_everything_at_once_and_then_its_end() -> None:
    outbox = Outbox(2)
    assert await outbox.take(0.001) is None
    outbox.time({"a": 1.0})
    outbox.put([])
    assert await outbox.take(0.001) is None, "nothing to write yet"
    outbox.fail(Overloaded("first"))
    outbox.fail(DeadlineExceeded("second"))
    batch = await outbox.take(1.0)
    assert batch is not None
    assert (batch.ended, batch.timings) == (True, [{"a": 1.0}])
    assert isinstance(outbox.error, Overloaded)


async def test_the_outbox_is_bounded_while_the_client_is_written_to() -> None:
    outbox = Outbox(2)
    chunk: list[object] = [None]
    assert outbox.put(chunk * 5), "a burst before the writer has looked is no lag"  # type: ignore[arg-type]
    assert await outbox.take(1.0) is not None
    assert outbox.put(chunk * 2)  # type: ignore[arg-type]
    assert not outbox.put(chunk)  # type: ignore[arg-type]
