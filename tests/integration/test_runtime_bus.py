"""The bus on a real NATS, beside the suite that it shares: restarts, losses, dead letters, and the client's faults."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import nats
import pytest
from nats.aio.client import Client
from nats.js.errors import NotFoundError

from shared.cli.embedded_nats import start_nats
from shared.contracts import limits, subjects
from shared.contracts.errors import ClaimRefused, DeadlineExceeded, Overloaded
from shared.contracts.ids import WorkerId
from shared.runtime.bus import NatsBus
from shared.runtime.bus_client import OrderedClient
from shared.runtime.bus_streams import consumer_name
from tests.contract.bus_suite import ANY, DEADLINE_S, Taker, within

pytestmark = pytest.mark.servers
KEY = bytes(range(32))


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[NatsBus]:
    bus = await NatsBus.connect(nats_url, KEY, "test")
    yield bus
    await bus.close()


@pytest.fixture
async def raw(nats_url: str) -> AsyncIterator[Client]:
    connection = await nats.connect(nats_url)
    yield connection
    await connection.close()


def change_table(monkeypatch: pytest.MonkeyPatch, **changed: object) -> None:
    """The work streams of the table, with other bounds."""
    streams = tuple(
        msgspec.structs.replace(s, **changed) if s.name in ("PREFILL", "DECODE") else s for s in subjects.STREAMS
    )
    monkeypatch.setattr(subjects, "STREAMS", streams)


async def until(raw: Client, stream: str, messages: int) -> None:
    """Waits until the stream holds this many messages."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if (await raw.jetstream().stream_info(stream)).state.messages == messages:
                return
            await asyncio.sleep(0.01)


async def until_connected(bus: NatsBus, wanted: bool) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if bus.connected == wanted:
                return
            await asyncio.sleep(0.01)


async def test_many_processes_make_the_streams_of_the_table_at_once(nats_url: str, raw: Client) -> None:
    buses = await asyncio.gather(*(NatsBus.connect(nats_url, KEY, f"p{i}") for i in range(6)))
    found = {info.config.name: info.config for info in await raw.jetstream().streams_info()}
    assert set(found) == {"PREFILL", "DECODE", "DEAD", "ADVISORIES"}
    work = found["PREFILL"]
    assert (work.subjects, work.retention, work.storage, work.discard) == (["prefill.>"], "workqueue", "file", "new")
    assert (work.max_msgs, work.max_bytes, work.max_age) == (8_192, 2 * 2**30, 600)
    assert (work.duplicate_window, work.max_msg_size) == (120, 8 * 2**20)
    await asyncio.gather(*(bus.close() for bus in buses))


async def test_a_changed_table_changes_the_streams_in_place(
    nats_url: str, raw: Client, bus: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bus.publish(ANY, b"kept", "1")
    change_table(monkeypatch, messages_max=77)
    await (await NatsBus.connect(nats_url, KEY, "newer")).close()
    info = await raw.jetstream().stream_info("PREFILL")
    assert (info.config.max_msgs, info.state.messages) == (77, 1)


async def test_jetstream_never_holds_a_readable_payload(bus: NatsBus, raw: Client) -> None:
    await bus.publish(ANY, b"the client's words", "1")
    stored = await raw.jetstream().get_msg("PREFILL", 1)
    assert stored.data is not None
    assert b"client" not in stored.data
    assert len(stored.data) > len(b"the client's words")


async def test_work_that_cannot_be_opened_is_dropped_and_the_rest_goes_on(bus: NatsBus, raw: Client) -> None:
    await raw.jetstream().publish(ANY, b"written by a stranger")
    await bus.publish(ANY, b"ours", "1")
    taker = Taker(bus, ANY)
    assert (await taker.next()).payload == b"ours"
    await until(raw, "PREFILL", 1)
    await taker.stop()


async def test_a_full_stream_refuses_and_takes_again(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change_table(monkeypatch, messages_max=2)
    bus = await NatsBus.connect(nats_url, KEY, "test")
    await bus.publish(ANY, b"1", "1")
    await bus.publish(ANY, b"2", "2")
    with pytest.raises(Overloaded):
        await bus.publish(ANY, b"3", "3")
    taker = Taker(bus, ANY)
    await (await taker.next()).ack()
    await bus.publish(ANY, b"3", "3")
    await taker.stop()
    await bus.close()


async def test_work_of_a_worker_that_died_comes_again_after_its_lease(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_table(monkeypatch, ack_wait_s=0.5)
    survivor, dying = [await NatsBus.connect(nats_url, KEY, name) for name in ("survivor", "dying")]
    await survivor.publish(ANY, b"work", "1")
    lost = Taker(dying, ANY)
    held = await lost.next()
    assert dying._connection._transport is not None
    dying._connection._transport.close()  # type: ignore[no-untyped-call]  # As kill -9 would: without a word.
    lost.task.cancel()
    began_s = time.monotonic()
    taker = Taker(survivor, ANY)
    again = await taker.next()
    assert (held.number, again.number, again.payload) == (1, 2, b"work")
    assert time.monotonic() - began_s < 5
    await again.ack()
    await taker.stop()
    await survivor.close()
    await dying.close()


async def test_work_that_used_up_its_deliveries_is_buried(
    nats_url: str, raw: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_table(monkeypatch, deliveries_max=2, ack_wait_s=0.3)
    bus = await NatsBus.connect(nats_url, KEY, "test")
    hears = await raw.subscribe("dead.>")
    await raw.flush()
    await bus.publish(ANY, b"poison", "r1:1:prefill")
    taker = Taker(bus, ANY)
    for number in (1, 2):
        delivery = await taker.next()
        assert delivery.number == number
        await delivery.nak(0)
    announced = await hears.next_msg(timeout=DEADLINE_S)
    assert announced.subject == "dead.PREFILL.1"
    manager = raw.jetstream()
    await until(raw, "ADVISORIES", 0)
    with pytest.raises(NotFoundError):
        await manager.get_msg("PREFILL", 1)
    buried = await manager.get_msg("DEAD", 1)
    assert buried.subject == "dead.PREFILL.1"
    assert buried.headers is not None
    assert buried.headers["Deepserve-Subject"] == ANY
    assert buried.headers["Deepserve-Message-Id"] == "r1:1:prefill"
    assert buried.headers["Deepserve-Deliveries"] == "2"
    await bus.publish(ANY, b"after", "r2:1:prefill")
    assert (await taker.next()).payload == b"after"
    await taker.stop()
    await bus.close()


async def test_a_worker_goes_on_when_nats_was_restarted_under_it(tmp_path: Path) -> None:
    server = await asyncio.to_thread(start_nats, tmp_path / "nats")
    bus = await NatsBus.connect(server.url, KEY, "test")
    heard = asyncio.Event()

    async def hear(subject: str, payload: bytes) -> None:
        heard.set()

    await bus.subscribe("news", hear)
    taker = Taker(bus, ANY)
    await bus.publish(ANY, b"before", "1")
    held = await taker.next()
    await asyncio.to_thread(server.stop, 10)
    await until_connected(bus, False)
    with pytest.raises(DeadlineExceeded):
        await held.ack()
    server = await asyncio.to_thread(start_nats, tmp_path / "nats", port=server.port)
    try:
        async with asyncio.timeout(20):
            await until_connected(bus, True)
            await bus.publish(ANY, b"after", "2")
            assert (await taker.wait(1))[0].payload == b"after"
        await held.ack()
        await bus.send("news", b"")
        await within(heard.wait())
        await taker.stop()
    finally:
        await bus.close()
        server.stop(10)


@pytest.mark.parametrize("what", ["consumer", "stream"])
async def test_a_consumer_or_stream_that_vanished_is_made_again(bus: NatsBus, raw: Client, what: str) -> None:
    taker = Taker(bus, ANY)
    await bus.publish(ANY, b"1", "1")
    await (await taker.next()).ack()
    if what == "consumer":
        await raw.jetstream().delete_consumer("PREFILL", consumer_name(ANY))
    else:
        await raw.jetstream().delete_stream("PREFILL")
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(Overloaded):
                await bus.publish(ANY, b"2", "2")
                break
            await asyncio.sleep(0.05)
        assert (await taker.wait(1))[0].payload == b"2"
    await taker.stop()


async def test_a_workers_own_consumer_goes_with_it_and_the_shared_one_stays(bus: NatsBus, raw: Client) -> None:
    at = subjects.work_at("prefill", "m", WorkerId("w1"))
    taker = Taker(bus, at, ANY)
    await bus.publish(at, b"1", "1")
    await taker.next()
    manager = raw.jetstream()
    own = (await manager.consumer_info("PREFILL", consumer_name(at))).config
    shared = (await manager.consumer_info("PREFILL", consumer_name(ANY))).config
    assert (own.inactive_threshold, shared.inactive_threshold) == (60, None)
    assert (shared.max_deliver, shared.ack_wait, shared.ack_policy) == (5, 15, "explicit")
    await taker.stop()


async def test_thousands_of_rounds_leave_nothing_behind(bus: NatsBus, raw: Client) -> None:
    taker = Taker(bus, ANY, subjects.work_at("prefill", "m", WorkerId("w1")), room=2)
    for number in range(1_000):
        await bus.publish(ANY, b"", str(number))
        await (await taker.next()).ack()
    subscriptions = len(bus._connection._subs)
    assert subscriptions < 10
    waiting = (await raw.jetstream().consumer_info("PREFILL", consumer_name(ANY))).num_waiting
    assert waiting is not None
    assert waiting <= 2
    await taker.stop()


async def test_a_handler_that_breaks_costs_its_message_only(bus: NatsBus) -> None:
    heard: list[bytes] = []
    all_heard = asyncio.Event()

    async def hear(subject: str, payload: bytes) -> None:
        heard.append(payload)
        if payload == b"bug":
            raise KeyError("bug")
        if payload == b"refused":
            raise ClaimRefused("refused")
        if payload == b"last":
            all_heard.set()

    await bus.subscribe("s", hear)
    for payload in (b"bug", b"refused", b"last"):
        await bus.send("s", payload)
    await within(all_heard.wait())
    assert heard == [b"bug", b"refused", b"last"]


async def test_closing_waits_for_handlers_and_no_longer_than_its_bound(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "DRAIN_TIMEOUT_S", 0.3)
    client, server = [await NatsBus.connect(nats_url, KEY, name) for name in ("client", "server")]
    entered = asyncio.Event()
    cancelled = asyncio.Event()

    async def slow(subject: str, payload: bytes) -> bytes:
        entered.set()
        if payload == b"forever":
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
        await asyncio.sleep(0.1)
        return b"done"

    await server.subscribe("slow", slow, queue="q")
    asked = asyncio.create_task(client.request("slow", b"", DEADLINE_S))
    await within(entered.wait())
    entered.clear()
    stuck = asyncio.create_task(client.request("slow", b"forever", 2))
    await within(entered.wait())
    began_s = time.monotonic()
    await server.close()
    assert time.monotonic() - began_s < 2
    assert await asked == b"done"
    assert cancelled.is_set()
    with pytest.raises(DeadlineExceeded):
        await stuck
    await client.close()


async def test_a_server_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONNECT_TIMEOUT_S", 0.3)
    with pytest.raises(DeadlineExceeded, match="cannot connect to NATS"):
        await NatsBus.connect("nats://127.0.0.1:1", KEY, "test")


async def test_what_a_closed_bus_is_asked_is_refused(nats_url: str) -> None:
    bus = await NatsBus.connect(nats_url, KEY, "test")
    await bus.close()
    for call in (bus.send("s", b""), bus.publish(ANY, b"", "1"), bus.request("s", b"", 1)):
        with pytest.raises(Overloaded):
            await call


# -- what we count on in the client ------------------------------------------------------------------------------------


@pytest.fixture
async def client(nats_url: str) -> AsyncIterator[OrderedClient]:
    client = OrderedClient()
    await client.connect(nats_url)
    yield client
    await client.close()


async def test_after_a_flush_the_server_knows_of_every_listener(client: OrderedClient, raw: Client) -> None:
    async def answer(message: object) -> None:
        await message.respond(b"yes")  # type: ignore[attr-defined]

    for number in range(200):
        subscription = await client.subscribe(f"known.{number}", cb=answer)
        await client.flush()
        assert (await raw.request(f"known.{number}", b"", timeout=5)).data == b"yes"
        await subscription.drain()  # type: ignore[no-untyped-call]
        with pytest.raises(nats.errors.NoRespondersError):
            await raw.request(f"known.{number}", b"", timeout=5)


async def test_a_flush_that_was_cancelled_leaves_the_connection_whole(client: OrderedClient) -> None:
    for _ in range(20):
        flushing = asyncio.create_task(client.flush())
        await asyncio.sleep(0)
        flushing.cancel()
        await asyncio.wait({flushing})
    await client.flush(2)
    assert client.is_connected
    assert not client._reading_task.done()  # type: ignore[union-attr]
