"""What every bus promises (contracts.ports.Bus): run on NATS and on the bus in memory alike.

A subclass gives the fixture `connect`: a function that makes one more bus of the same broker. No test waits for time to
pass; each wait is for an event, within DEADLINE_S.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable

import pytest

from shared.contracts import limits, subjects
from shared.contracts.errors import DeadlineExceeded, InvalidRequest, Overloaded
from shared.contracts.ids import WorkerId
from shared.contracts.ports import Bus, Delivery

DEADLINE_S = 10.0
Connect = Callable[[], Awaitable[Bus]]
ANY = subjects.work_any("prefill", "m")
AT = subjects.work_at("prefill", "m", WorkerId("w1"))


class Taker:
    """Pulls in a task of its own and holds what it has got. `room`: how many more it takes."""

    def __init__(self, bus: Bus, *wanted: str, room: int = 100) -> None:
        self.held: list[Delivery] = []
        self.most = 0
        self.room = room
        self._news = asyncio.Condition()
        self._iterator = bus.pull(wanted, lambda: self.room - len(self.held))
        self.task = asyncio.create_task(self._take())

    async def _take(self) -> None:
        async for delivery in self._iterator:
            async with self._news:
                self.held.append(delivery)
                self.most = max(self.most, len(self.held))
                self._news.notify_all()

    async def wait(self, count: int) -> list[Delivery]:
        """The deliveries held, once there are `count` of them."""
        async with asyncio.timeout(DEADLINE_S), self._news:
            await self._news.wait_for(lambda: len(self.held) >= count)
            return list(self.held)

    async def next(self) -> Delivery:
        """The oldest delivery, which does not take room any more."""
        await self.wait(1)
        return self.held.pop(0)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task}, timeout=DEADLINE_S)


async def within(work: Awaitable[object]) -> object:
    async with asyncio.timeout(DEADLINE_S):
        return await work


class BusSuite:
    """See the module's words."""

    @pytest.fixture
    def connect(self) -> Connect:
        raise NotImplementedError

    # -- work ----------------------------------------------------------------------------------------------------------

    async def test_published_work_is_delivered_with_its_payload_subject_and_number(self, connect: Connect) -> None:
        sender, receiver = await connect(), await connect()
        payload = secrets.token_bytes(100_000)
        await sender.publish(ANY, payload, "r1:1:prefill")
        taker = Taker(receiver, ANY)
        delivery = await taker.next()
        assert (delivery.payload, delivery.subject, delivery.number) == (payload, ANY, 1)
        await delivery.ack()
        await taker.stop()

    async def test_acknowledged_and_dropped_work_does_not_come_again(self, connect: Connect) -> None:
        bus = await connect()
        taker = Taker(bus, ANY)
        for number, end in enumerate(("ack", "drop", "none")):
            await bus.publish(ANY, end.encode(), str(number))
        for delivery in await taker.wait(3):
            if delivery.payload != b"none":
                await getattr(delivery, delivery.payload.decode())()
        await taker.held[2].nak(0)
        again = (await taker.wait(4))[3]
        assert (again.payload, again.number) == (b"none", 2)
        await again.ack()
        await taker.stop()

    async def test_work_given_back_comes_again_with_a_higher_number_after_its_delay(self, connect: Connect) -> None:
        bus = await connect()
        taker = Taker(bus, ANY)
        await bus.publish(ANY, b"work", "id")
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await (await taker.next()).nak(0.3)
        again = await taker.next()
        assert again.number == 2
        assert loop.time() - began_s >= 0.29
        await again.in_progress()
        await again.ack()
        await again.in_progress()
        await taker.stop()

    async def test_a_known_message_id_is_not_stored_twice(self, connect: Connect) -> None:
        one, two = await connect(), await connect()
        await one.publish(ANY, b"first", "same")
        await two.publish(ANY, b"second", "same")
        await two.publish(ANY, b"third", "other")
        taker = Taker(one, ANY)
        assert sorted(d.payload for d in await taker.wait(2)) == [b"first", b"third"]
        await taker.stop()

    async def test_two_workers_share_the_work_without_a_repeat(self, connect: Connect) -> None:
        sender = await connect()
        takers = [Taker(await connect(), ANY, room=20) for _ in range(2)]
        for number in range(40):
            await sender.publish(ANY, str(number).encode(), str(number))
        for taker in takers:
            await taker.wait(20)
        got = [int(d.payload) for taker in takers for d in taker.held]
        assert sorted(got) == list(range(40))
        for taker in takers:
            await taker.stop()

    async def test_one_worker_gets_the_work_of_all_its_subjects_and_of_no_other(self, connect: Connect) -> None:
        bus = await connect()
        other = subjects.work_at("prefill", "m", WorkerId("w2"))
        taker = Taker(bus, AT, ANY)
        for subject in (ANY, AT, other, subjects.work_any("decode", "m")):
            await bus.publish(subject, subject.encode(), subject)
        assert sorted(d.payload for d in await taker.wait(2)) == sorted([ANY.encode(), AT.encode()])
        elsewhere = Taker(bus, other)
        assert (await elsewhere.next()).payload == other.encode()
        assert len(taker.held) == 2
        await taker.stop()
        await elsewhere.stop()

    @pytest.mark.parametrize("room", [1, 2, 3])
    async def test_a_worker_never_gets_more_than_it_has_room_for(self, connect: Connect, room: int) -> None:
        bus = await connect()
        taker = Taker(bus, AT, ANY, room=room)
        for number in range(12):
            await bus.publish(ANY if number % 2 else AT, str(number).encode(), str(number))
        done: set[int] = set()
        while len(done) < 12:
            delivery = await taker.next()
            assert delivery.number == 1, "work that nobody tried has used up a delivery"
            await delivery.ack()
            done.add(int(delivery.payload))
        assert done == set(range(12))
        assert taker.most <= room
        await taker.stop()

    async def test_a_worker_without_room_leaves_the_work_to_others(self, connect: Connect) -> None:
        bus = await connect()
        full = Taker(await connect(), AT, ANY, room=1)
        await bus.publish(ANY, b"1", "1")
        await full.wait(1)
        free = Taker(await connect(), ANY)
        for number in range(2, 6):
            await bus.publish(ANY, str(number).encode(), str(number))
        await free.wait(4)
        assert len(full.held) == 1
        full.room = 2
        await bus.publish(AT, b"at", "at")
        assert (await full.wait(2))[1].payload == b"at"
        await full.stop()
        await free.stop()

    async def test_what_a_worker_did_not_take_goes_to_another_when_it_stops(self, connect: Connect) -> None:
        bus = await connect()
        for number in range(10):
            await bus.publish(ANY, str(number).encode(), str(number))
        iterator = bus.pull([ANY], lambda: 10)
        async with asyncio.timeout(DEADLINE_S):
            first = await anext(iterator)
            await iterator.aclose()  # type: ignore[attr-defined]
        rest = Taker(await connect(), ANY)
        got = [int(d.payload) for d in await rest.wait(9)]
        assert sorted([*got, int(first.payload)]) == list(range(10))
        await rest.stop()

    async def test_a_message_over_the_bound_is_refused(self, connect: Connect) -> None:
        bus = await connect()
        with pytest.raises(InvalidRequest):
            await bus.publish(ANY, bytes(limits.MESSAGE_BYTES_MAX + 1), "big")
        with pytest.raises(InvalidRequest):
            await bus.send("x", bytes(limits.MESSAGE_BYTES_MAX + 1))
        await bus.publish(ANY, bytes(limits.MESSAGE_BYTES_MAX - 4096), "fits")

    async def test_a_closed_bus_ends_its_pulls(self, connect: Connect) -> None:
        bus = await connect()
        taker = Taker(bus, ANY)
        await bus.publish(ANY, b"1", "1")
        await (await taker.next()).ack()
        await within(bus.close())  # type: ignore[attr-defined]
        await within(bus.close())  # type: ignore[attr-defined]
        taker.task.cancel()
        await asyncio.wait({taker.task}, timeout=DEADLINE_S)
        assert taker.task.done()

    # -- core messages -------------------------------------------------------------------------------------------------

    async def test_a_request_is_answered_by_whoever_listens(self, connect: Connect) -> None:
        server, client = await connect(), await connect()

        async def answer(subject: str, payload: bytes) -> bytes:
            return subject.encode() + b" " + payload

        await server.subscribe("echo.*", answer, queue="echoes")
        assert await client.request("echo.a", b"hello", DEADLINE_S) == b"echo.a hello"

    async def test_nobody_and_silence_are_different_errors(self, connect: Connect) -> None:
        server, client = await connect(), await connect()

        async def silent(subject: str, payload: bytes) -> None:
            return None

        with pytest.raises(Overloaded):
            await client.request("nobody", b"", DEADLINE_S)
        await server.subscribe("silent", silent)
        with pytest.raises(DeadlineExceeded):
            await client.request("silent", b"", 0.1)

    async def test_without_a_queue_everybody_hears_everything_one_after_another(self, connect: Connect) -> None:
        sender = await connect()
        heard: dict[int, list[int]] = {0: [], 1: []}
        busy = {0: 0, 1: 0}
        most = 0
        all_heard = asyncio.Event()

        def listener(number: int) -> Callable[[str, bytes], Awaitable[None]]:
            async def hear(subject: str, payload: bytes) -> None:
                nonlocal most
                busy[number] += 1
                most = max(most, busy[number])
                await asyncio.sleep(0)
                heard[number].append(int(payload))
                busy[number] -= 1
                if all(len(numbers) == 200 for numbers in heard.values()):
                    all_heard.set()

            return hear

        for number in heard:
            await (await connect()).subscribe("tokens.*", listener(number))
        for number in range(200):
            await sender.send("tokens.g1", str(number).encode())
        await within(all_heard.wait())
        assert heard == {0: list(range(200)), 1: list(range(200))}
        assert most == 1

    async def test_a_queue_group_shares_messages_and_handles_them_at_once(self, connect: Connect) -> None:
        client = await connect()
        together = asyncio.Barrier(4)

        async def answer(subject: str, payload: bytes) -> bytes:
            await together.wait()
            return payload

        for _ in range(2):
            await (await connect()).subscribe("group", answer, queue="g")
        asked = [client.request("group", str(i).encode(), DEADLINE_S) for i in range(4)]
        assert await asyncio.gather(*asked) == [b"0", b"1", b"2", b"3"]

    async def test_nothing_is_heard_after_unsubscribing(self, connect: Connect) -> None:
        server, client = await connect(), await connect()

        async def answer(subject: str, payload: bytes) -> bytes:
            return b"yes"

        unsubscribe = await server.subscribe("short", answer, queue="q")
        assert await client.request("short", b"", DEADLINE_S) == b"yes"
        await unsubscribe()
        await unsubscribe()
        with pytest.raises(Overloaded):
            await client.request("short", b"", DEADLINE_S)
