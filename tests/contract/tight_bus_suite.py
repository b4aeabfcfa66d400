"""What every bus promises at its bounds: leases that run out, last deliveries, full streams, forgotten message ids.

Run on NATS and on the bus in memory alike, with streams whose bounds are near. A subclass gives the fixture `connect`.
Waits are for events; only where a lease is renewed, or a window runs out, does time itself pass.
"""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from shared.contracts import subjects
from shared.contracts.errors import Overloaded
from tests.contract.bus_suite import ANY, Connect, Taker

ACK_WAIT_S = 0.5
DELIVERIES = 2
MESSAGES = 3
WINDOW_S = 0.5
TIGHT_STREAMS = tuple(
    msgspec.structs.replace(
        stream,
        ack_wait_s=ACK_WAIT_S,
        deliveries_max=DELIVERIES,
        messages_max=MESSAGES,
        duplicate_window_s=WINDOW_S,
    )
    if stream.name in ("PREFILL", "DECODE")
    else stream
    for stream in subjects.STREAMS
)


class TightBusSuite:
    """See the module's words."""

    @pytest.fixture
    def connect(self) -> Connect:
        raise NotImplementedError

    async def test_work_whose_lease_ran_out_comes_again_and_a_late_ack_still_counts(self, connect: Connect) -> None:
        slow, quick, sender = Taker(await connect(), ANY, room=1), Taker(await connect(), ANY), await connect()
        quick.room = 0
        await sender.publish(ANY, b"work", "id")
        late = (await slow.wait(1))[0]
        quick.room = 1
        again = (await quick.wait(1))[0]
        assert (late.number, again.number, again.payload) == (1, 2, b"work")
        await late.ack()
        # The slow one's word ended the message: the quick one's lease leads to nothing more, and nobody is buried.
        await sender.publish(ANY, b"next", "next")
        quick.room = 2
        assert [d.payload for d in await quick.wait(2)] == [b"work", b"next"]
        await again.ack()
        await slow.stop()
        await quick.stop()

    async def test_a_renewed_lease_keeps_the_work(self, connect: Connect) -> None:
        bus = await connect()
        holder, other = Taker(bus, ANY, room=1), Taker(await connect(), ANY, room=0)
        await bus.publish(ANY, b"work", "id")
        held = (await holder.wait(1))[0]
        other.room = 1
        loop = asyncio.get_running_loop()
        until_s = loop.time() + 3 * ACK_WAIT_S
        while loop.time() < until_s:
            await held.in_progress()
            await asyncio.sleep(ACK_WAIT_S / 5)
        assert not other.held
        assert (await other.wait(1))[0].number == 2
        await holder.stop()
        await other.stop()

    async def test_work_that_used_up_its_deliveries_lies_with_the_dead(self, connect: Connect) -> None:
        bus = await connect()
        taker = Taker(bus, ANY)
        await bus.publish(ANY, b"poison", "id")
        for number in range(1, DELIVERIES + 1):
            assert (await taker.next()).number == number
        dead = Taker(await connect(), subjects.dead("PREFILL", 1))
        assert (await dead.next()).payload == b"poison"
        await bus.publish(ANY, b"next", "next")
        assert (await taker.next()).payload == b"next"
        await taker.stop()
        await dead.stop()

    async def test_work_given_back_for_the_last_time_lies_with_the_dead(self, connect: Connect) -> None:
        bus = await connect()
        taker = Taker(bus, ANY)
        await bus.publish(ANY, b"poison", "id")
        for _ in range(DELIVERIES):
            await (await taker.next()).nak(0)
        dead = Taker(await connect(), subjects.dead("PREFILL", 1))
        assert (await dead.next()).payload == b"poison"
        await taker.stop()
        await dead.stop()

    async def test_a_full_stream_refuses_new_work_until_it_has_room(self, connect: Connect) -> None:
        bus = await connect()
        for number in range(MESSAGES):
            await bus.publish(ANY, b"x", str(number))
        with pytest.raises(Overloaded):
            await bus.publish(ANY, b"x", "one more")
        await bus.publish(subjects.work_any("decode", "m"), b"x", "another stream")
        taker = Taker(bus, ANY)
        await (await taker.next()).ack()
        await bus.publish(ANY, b"x", "one more")
        await taker.stop()

    async def test_a_message_id_is_known_after_its_message_and_forgotten_after_its_window(
        self, connect: Connect
    ) -> None:
        bus = await connect()
        taker = Taker(bus, ANY)
        await bus.publish(ANY, b"first", "id")
        await (await taker.next()).ack()
        await bus.publish(ANY, b"repeat", "id")
        await bus.publish(ANY, b"marker", "marker")
        assert (await taker.next()).payload == b"marker"
        for attempt in range(100):
            await bus.publish(ANY, b"later", "id")
            await bus.publish(ANY, b"marker", f"marker {attempt}")
            delivery = await taker.next()
            await delivery.ack()
            if delivery.payload == b"later":
                break
            await asyncio.sleep(WINDOW_S / 10)
        else:
            pytest.fail("the message id was never forgotten")
        await taker.stop()
