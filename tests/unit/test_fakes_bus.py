"""What the bus in memory promises beside the suite that it shares with NATS: crashes, losses, delays, order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from shared.contracts import limits, subjects
from shared.contracts.errors import DeadlineExceeded, Overloaded
from shared.contracts.ports import Delivery
from tests.fakes.bus import Broker, FakeBus
from tests.fakes.wire import RoughWire, Wire
from tests.sim.loop import SimLoop, run_simulation
from tests.sim.process import SimProcess

ANY = subjects.work_any("prefill", "m")


def simulated(test: Callable[[SimLoop], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Runs an asynchronous test in virtual time."""

    def run() -> None:
        run_simulation(1, test)

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


class Lossy(Wire):
    """Loses the first legs of a kind."""

    def __init__(self, kind: str, count: int = 1) -> None:
        self.left = {kind: count}

    def legs(self, kind: str, subject: str) -> tuple[float, ...]:
        if self.left.get(kind, 0):
            self.left[kind] -= 1
            return ()
        return (0.0,)


async def first(bus: FakeBus, subject: str = ANY) -> Delivery:
    async with asyncio.timeout(1_000):
        pulling = bus.pull([subject], lambda: 1)
        assert isinstance(pulling, AsyncIterator)
        delivery = await anext(pulling)
        await pulling.aclose()  # type: ignore[attr-defined]
        return delivery


@simulated
async def test_work_of_a_dead_process_comes_again_after_the_ack_wait(loop: SimLoop) -> None:
    broker = Broker()
    dying = SimProcess("worker")
    taken: list[int] = []

    async def work() -> None:
        async for delivery in broker.connect().pull([ANY], lambda: 1):
            taken.append(delivery.number)

    dying.start(work())
    await broker.connect().publish(ANY, b"work", "id")
    await asyncio.sleep(1)
    dying.crash()
    began_s = loop.time()
    delivery = await first(broker.connect())
    assert (taken, delivery.number, delivery.payload) == ([1], 2, b"work")
    assert loop.time() - began_s == pytest.approx(limits.WORK_ACK_WAIT_S - 1, abs=0.01)


@simulated
async def test_renewed_work_stays_with_its_worker(loop: SimLoop) -> None:
    broker = Broker()
    await broker.connect().publish(ANY, b"work", "id")
    delivery = await first(broker.connect())
    for _ in range(5):
        await asyncio.sleep(limits.WORK_ACK_WAIT_S - 1)
        await delivery.in_progress()
    other = asyncio.create_task(first(broker.connect()))
    await asyncio.sleep(limits.WORK_ACK_WAIT_S - 1)
    assert not other.done()
    await asyncio.sleep(2)
    assert (await other).number == 2


@simulated
async def test_after_its_last_delivery_work_is_a_dead_letter(loop: SimLoop) -> None:
    broker = Broker()
    await broker.connect().publish(ANY, b"poison", "id")
    numbers = []
    for _ in range(limits.WORK_DELIVERIES_MAX):
        delivery = await first(broker.connect())
        numbers.append(delivery.number)
        await delivery.nak(0.5)
    assert numbers == [1, 2, 3, 4, 5]
    await asyncio.sleep(1)
    assert not broker.stream_of(ANY).pending()
    assert [stored.payload for stored in broker.stream_of("dead.x").pending()] == [b"poison"]


@simulated
async def test_a_known_message_id_is_stored_once_even_after_its_message_is_gone(loop: SimLoop) -> None:
    broker = Broker()
    bus = broker.connect()
    await bus.publish(ANY, b"1", "id")
    await (await first(bus)).ack()
    await bus.publish(ANY, b"2", "id")
    assert not broker.stream_of(ANY).pending()
    await asyncio.sleep(limits.WORK_DUPLICATE_WINDOW_S + 1)
    await bus.publish(ANY, b"3", "id")
    assert (await first(bus)).payload == b"3"


@simulated
async def test_a_full_stream_refuses_and_takes_again_when_it_has_room(loop: SimLoop) -> None:
    broker = Broker()
    bus = broker.connect()
    for number in range(limits.WORK_MESSAGES_MAX):
        await bus.publish(ANY, b"", str(number))
    with pytest.raises(Overloaded):
        await bus.publish(ANY, b"", "one more")
    await (await first(bus)).ack()
    await bus.publish(ANY, b"", "one more")


@simulated
async def test_old_work_goes(loop: SimLoop) -> None:
    broker = Broker()
    await broker.connect().publish(ANY, b"", "id")
    await asyncio.sleep(limits.WORK_AGE_MAX_S + 1)
    waiting = asyncio.create_task(first(broker.connect()))
    await asyncio.sleep(10)
    assert not waiting.done()
    waiting.cancel()


@simulated
async def test_a_late_ack_takes_the_work_from_its_next_holder(loop: SimLoop) -> None:
    broker = Broker()
    await broker.connect().publish(ANY, b"work", "id")
    slow = await first(broker.connect())
    next_holder = await first(broker.connect())
    await slow.ack()
    assert not broker.stream_of(ANY).pending()
    await next_holder.ack()


@simulated
async def test_a_lost_ack_leads_to_another_delivery(loop: SimLoop) -> None:
    broker = Broker(wire=Lossy("ack"))
    await broker.connect().publish(ANY, b"work", "id")
    with pytest.raises(DeadlineExceeded):
        await (await first(broker.connect())).ack()
    assert (await first(broker.connect())).number == 2


@simulated
async def test_a_publish_whose_acknowledgement_is_lost_is_stored_once(loop: SimLoop) -> None:
    broker = Broker(wire=Lossy("stored"))
    bus = broker.connect()
    with pytest.raises(DeadlineExceeded):
        await bus.publish(ANY, b"work", "id")
    await bus.publish(ANY, b"work", "id")
    assert len(broker.stream_of(ANY).pending()) == 1


@simulated
async def test_a_broker_that_crashes_loses_what_it_had_not_synced_and_the_ids_of_it(loop: SimLoop) -> None:
    broker = Broker()
    bus = broker.connect()
    await bus.publish(ANY, b"old", "old")
    await asyncio.sleep(1)
    await bus.publish(ANY, b"new", "new")
    assert [lost.payload for lost in broker.crash(lost_s=0.5)] == [b"new"]
    assert [kept.payload for kept in broker.stream_of(ANY).pending()] == [b"old"]
    await bus.publish(ANY, b"new", "new")
    assert [kept.payload for kept in broker.stream_of(ANY).pending()] == [b"old", b"new"]


@simulated
async def test_a_broker_that_is_down_answers_nothing(loop: SimLoop) -> None:
    broker = Broker()
    bus = broker.connect()
    broker.stop()
    with pytest.raises(DeadlineExceeded):
        await bus.publish(ANY, b"", "id")
    with pytest.raises(DeadlineExceeded):
        await bus.request("somebody", b"", 1.0)
    broker.start()
    await bus.publish(ANY, b"", "id")


@simulated
async def test_a_worker_takes_no_more_than_it_has_room_for(loop: SimLoop) -> None:
    broker = Broker(wire=RoughWire("1", delay_s=0.05))
    bus = broker.connect()
    for number in range(20):
        await bus.publish(ANY, b"", str(number))
    held: list[Delivery] = []

    async def work() -> None:
        async for delivery in bus.pull([ANY], lambda: 3 - len(held)):
            held.append(delivery)
            assert len(held) <= 3

    working = asyncio.create_task(work())
    for _ in range(20):
        await asyncio.sleep(1)
        if held:
            await held.pop().ack()
    assert not working.done()
    working.cancel()


@simulated
async def test_core_messages_keep_their_order_unless_told_otherwise(loop: SimLoop) -> None:
    broker = Broker(wire=RoughWire("2", delay_s=0.05))
    for ordered in (True, False):
        got: list[int] = []

        async def note(subject: str, payload: bytes, got: list[int] = got) -> None:
            got.append(int(payload))

        unsubscribe = await broker.connect().subscribe("news", note)
        sender = broker.connect(ordered=ordered)
        for number in range(50):
            await sender.send("news", b"%d" % number)
        await asyncio.sleep(1)
        assert (got == list(range(50))) is ordered
        assert sorted(got) == list(range(50))
        await unsubscribe()


@simulated
async def test_core_messages_may_be_lost_or_doubled(loop: SimLoop) -> None:
    for wire, count in (
        (RoughWire("3", lose={"core": 1.0}), 0),
        (RoughWire("3", double={"core": 1.0}), 2),
    ):
        got: list[bytes] = []

        async def note(subject: str, payload: bytes, got: list[bytes] = got) -> None:
            got.append(payload)

        broker = Broker(wire=wire)
        await broker.connect().subscribe("news", note)
        await broker.connect().send("news", b"x")
        await asyncio.sleep(1)
        assert len(got) == count


@simulated
async def test_a_lost_reply_ends_in_a_time_out_and_a_dead_peer_is_nobody(loop: SimLoop) -> None:
    broker = Broker(wire=Lossy("reply"))
    serving = SimProcess("server")

    async def serve() -> None:
        async def echo(subject: str, payload: bytes) -> bytes:
            return payload

        await broker.connect().subscribe("echo", echo, queue="servers")

    serving.start(serve())
    await asyncio.sleep(1)
    client = broker.connect()
    with pytest.raises(DeadlineExceeded):
        await client.request("echo", b"1", 2.0)
    assert await client.request("echo", b"2", 2.0) == b"2"
    serving.crash()
    with pytest.raises(Overloaded):
        await client.request("echo", b"3", 2.0)
