"""The bus in memory: one `Broker` for all, one `FakeBus` for each process (contracts.ports.Bus).

Core messages reach whoever is subscribed when they arrive, at most once, in order for each pair of connections; queue
groups draw one member; a request that nobody hears is refused at once. Work follows `jetstream.py`. When a process dies
its subscriptions and pulls vanish, and what it had on loan comes again after the ack wait. While the broker is down,
what is sent is lost and what is asked stays unanswered.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shared.contracts import limits
from shared.contracts.errors import DeadlineExceeded, InvalidRequest, Overloaded
from shared.contracts.ports import Delivery
from shared.contracts.subjects import STREAMS, Stream
from tests.fakes.jetstream import Consumer, FakeStream, Fetch, Stored, StreamFull, matches
from tests.fakes.wire import CALM, Link, Wire
from tests.sim import process

Handler = Callable[[str, bytes], Awaitable[bytes | None]]


@dataclass(eq=False, slots=True)
class Subscription:
    """`inbox` holds (subject, payload, reply) of messages that have arrived."""

    subject: str
    queue: str | None
    inbox: asyncio.Queue[tuple[str, bytes, Callable[[bytes], None] | None]]
    links: dict[int, Link]


@dataclass(slots=True)
class Pulled:
    """What one pull iterator is owed. `under_way`: lent to it and not yet taken."""

    arrived: asyncio.Queue[Delivery]
    under_way: int = 0
    fetch: Fetch | None = None

    async def take(self, wait_s: float) -> list[Delivery]:
        """What has arrived; nothing after `wait_s`."""
        found: list[Delivery] = []
        try:
            async with asyncio.timeout(wait_s):
                found.append(await self.arrived.get())
        except TimeoutError:
            return found
        while not self.arrived.empty():
            found.append(self.arrived.get_nowait())
        self.under_way -= len(found)
        return found


class Broker:
    """The server. `wire` may be changed while it runs."""

    def __init__(
        self,
        *,
        streams: Sequence[Stream] = STREAMS,
        wire: Wire = CALM,
        seed: int = 0,
        now_s: Callable[[], float] | None = None,
    ) -> None:
        self.wire = wire
        self.up = True
        self.dead_letters: list[Stored] = []
        self.on_dead: Callable[[Stream, Stored], None] = self._to_dead_stream
        self._random = random.Random(f"{seed}/broker")
        self._subscriptions: list[Subscription] = []
        self._now_s = now_s or (lambda: asyncio.get_running_loop().time())
        self.streams = [FakeStream(config, self._now_s, self._bury) for config in streams]

    def connect(self, *, ordered: bool = True) -> FakeBus:
        """The bus of one process. `ordered=False`: its core messages may overtake one another."""
        return FakeBus(self, ordered)

    def stop(self) -> None:
        """Unreachable from now on; keeps what it has."""
        self.up = False

    def start(self) -> None:
        self.up = True

    def crash(self, lost_s: float = 0.0) -> list[Stored]:
        """Restarts without the work that was stored in the last `lost_s` seconds, acknowledged or not; returns it."""
        return [stored for stream in self.streams for stored in stream.crash(lost_s)]

    def stream_of(self, subject: str) -> FakeStream:
        for stream in self.streams:
            if any(matches(pattern, subject) for pattern in stream.config.subjects):
                return stream
        raise ValueError(f"no stream takes {subject}")

    # -- core messages -----------------------------------------------------------------------------------------------

    def listeners(self, subject: str) -> list[Subscription]:
        """Who gets a message: each plain subscription, and one drawn member of each queue group."""
        found = [s for s in self._subscriptions if matches(s.subject, subject)]
        groups: dict[str, list[Subscription]] = {}
        for subscription in found:
            if subscription.queue is not None:
                groups.setdefault(subscription.queue, []).append(subscription)
        return [s for s in found if s.queue is None] + [self._random.choice(group) for group in groups.values()]

    def route(
        self, sender: int, ordered: bool, subject: str, payload: bytes, reply: Callable[[bytes], None] | None
    ) -> int:
        """Sends a message on its way to its listeners; returns how many there are."""
        listeners = self.listeners(subject)
        for subscription in listeners:
            link = subscription.links.setdefault(sender, Link(ordered))
            for delay_s in self.wire.legs("core", subject):
                link.carry(delay_s, self._arrive, subscription, subject, payload, reply)
        return len(listeners)

    def _arrive(
        self, subscription: Subscription, subject: str, payload: bytes, reply: Callable[[bytes], None] | None
    ) -> None:
        if self.up and subscription in self._subscriptions:
            subscription.inbox.put_nowait((subject, payload, reply))

    def add(self, subscription: Subscription) -> None:
        self._subscriptions.append(subscription)

    def discard(self, subscription: Subscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    # -- dead letters ------------------------------------------------------------------------------------------------

    def _bury(self, stream: Stream, stored: Stored) -> None:
        self.dead_letters.append(stored)
        if stream.dead_end is not None:
            self.on_dead(stream, stored)

    def _to_dead_stream(self, stream: Stream, stored: Stored) -> None:
        subject = f"dead.{stored.subject}"
        self.stream_of(subject).store(subject, stored.payload, f"{stream.name}:{stored.sequence}")


class FakeBus:
    """`contracts.ports.Bus` of one process; made by `Broker.connect` within it."""

    _made = 0

    def __init__(self, broker: Broker, ordered: bool) -> None:
        FakeBus._made += 1
        self._number = FakeBus._made
        self._broker = broker
        self._ordered = ordered
        self._subscriptions: list[Subscription] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._fetches: set[Fetch] = set()
        self._work_link = Link()
        member = process.current()
        if member is not None:
            member.at_death(self._die)

    # -- work --------------------------------------------------------------------------------------------------------

    async def publish(self, subject: str, payload: bytes, message_id: str) -> None:
        process.check_alive()
        _check_size(payload)
        stream = self._broker.stream_of(subject)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def store() -> None:
            if not self._broker.up:
                return
            try:
                stream.store(subject, payload, message_id)
                stored = True
            except StreamFull:
                stored = False
            for delay_s in self._broker.wire.legs("stored", subject):
                Link().carry(delay_s, _resolve, answer, stored)

        for delay_s in self._broker.wire.legs("publish", subject):
            self._work_link.carry(delay_s, store)
        if not await _within(limits.PUBLISH_TIMEOUT_S, answer, "the stream did not acknowledge"):
            raise Overloaded(f"stream {stream.config.name} is full")

    async def pull(self, subjects: Sequence[str], batch: Callable[[], int]) -> AsyncIterator[Delivery]:
        process.check_alive()
        pulled = Pulled(asyncio.Queue())
        try:
            while True:
                process.check_alive()
                room = batch() - pulled.under_way
                if room > 0 and self._broker.up:
                    self._ask(subjects, room, pulled)
                    wait_s = limits.PULL_WAIT_S
                else:
                    wait_s = limits.PULL_IDLE_S
                for delivery in await pulled.take(wait_s):
                    yield delivery
        finally:
            self._end_fetch(pulled)

    def _ask(self, subjects: Sequence[str], room: int, pulled: Pulled) -> None:
        """One pull request over all subjects, in place of the last one."""
        self._end_fetch(pulled)
        fetch = Fetch(room)
        pulled.fetch = fetch
        self._fetches.add(fetch)
        for subject in subjects:
            stream = self._broker.stream_of(subject)
            consumer = stream.consumer(subject)

            def give(stored: Stored, number: int, stream: FakeStream = stream, consumer: Consumer = consumer) -> None:
                delivery = FakeDelivery(self._broker, stream, consumer, stored, number)
                pulled.under_way += 1
                legs = self._broker.wire.legs("deliver", stored.subject)[:1]
                if not legs:
                    pulled.under_way -= 1
                for delay_s in legs:
                    self._work_link.carry(delay_s, pulled.arrived.put_nowait, delivery)

            stream.fetch(consumer, fetch, give)

    def _end_fetch(self, pulled: Pulled) -> None:
        if pulled.fetch is not None:
            pulled.fetch.open = False
            self._fetches.discard(pulled.fetch)

    # -- core messages -----------------------------------------------------------------------------------------------

    async def send(self, subject: str, payload: bytes) -> None:
        process.check_alive()
        _check_size(payload)
        if self._broker.up:
            self._broker.route(self._number, self._ordered, subject, payload, None)

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        process.check_alive()
        _check_size(payload)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def reply(answered: bytes) -> None:
            for delay_s in self._broker.wire.legs("reply", subject):
                Link().carry(delay_s, _resolve, answer, answered)

        if self._broker.up and not self._broker.route(self._number, self._ordered, subject, payload, reply):
            raise Overloaded(f"nobody listens to {subject}")
        answered: bytes = await _within(timeout_s, answer, f"no answer from {subject}")
        return answered

    async def subscribe(
        self, subject: str, handler: Handler, queue: str | None = None
    ) -> Callable[[], Awaitable[None]]:
        process.check_alive()
        subscription = Subscription(subject, queue, asyncio.Queue(), {})
        self._broker.add(subscription)
        self._subscriptions.append(subscription)
        serve = self._serve_in_order if queue is None else self._serve_at_once
        task = asyncio.create_task(serve(subscription, handler), name=f"subscription {subject}")
        self._tasks.add(task)

        async def unsubscribe() -> None:
            self._broker.discard(subscription)
            task.cancel()
            await asyncio.wait({task})
            self._tasks.discard(task)

        return unsubscribe

    async def _serve_in_order(self, subscription: Subscription, handler: Handler) -> None:
        while True:
            await self._answer(handler, *await subscription.inbox.get())

    async def _serve_at_once(self, subscription: Subscription, handler: Handler) -> None:
        room = asyncio.Semaphore(limits.HANDLERS_IN_FLIGHT_MAX)

        async def answer(*message: Any) -> None:
            try:
                await self._answer(handler, *message)
            finally:
                room.release()

        async with asyncio.TaskGroup() as group:
            while True:
                message = await subscription.inbox.get()
                await room.acquire()
                group.create_task(answer(*message))

    async def _answer(
        self, handler: Handler, subject: str, payload: bytes, reply: Callable[[bytes], None] | None
    ) -> None:
        answered = await handler(subject, payload)
        if reply is not None and answered is not None and self._broker.up:
            reply(answered)

    async def close(self) -> None:
        """Ends subscriptions and pulls."""
        self._die()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _die(self) -> None:
        for subscription in self._subscriptions:
            self._broker.discard(subscription)
        for fetch in self._fetches:
            fetch.open = False


class FakeDelivery:
    """`contracts.ports.Delivery`: a loan of the stream's. `ack` may be lost on its way there or back."""

    def __init__(self, broker: Broker, stream: FakeStream, consumer: Consumer, stored: Stored, number: int) -> None:
        self.payload = stored.payload
        self.subject = stored.subject
        self.number = number
        self._broker = broker
        self._stream = stream
        self._consumer = consumer
        self._sequence = stored.sequence

    async def ack(self) -> None:
        process.check_alive()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def remove() -> None:
            self._stream.remove(self._sequence)
            self._carry("acked", _resolve, done, None)

        self._carry("ack", remove)
        await _within(limits.ACK_TIMEOUT_S, done, "the acknowledgement was not confirmed")

    async def nak(self, delay_s: float) -> None:
        process.check_alive()
        self._carry("nak", self._stream.nak, self._consumer, self._sequence, self.number, delay_s)

    async def in_progress(self) -> None:
        process.check_alive()
        self._carry("progress", self._stream.progress, self._consumer, self._sequence)

    async def drop(self) -> None:
        process.check_alive()
        self._carry("drop", self._stream.remove, self._sequence)

    def _carry(self, kind: str, call: Callable[..., object], *args: Any) -> None:
        def arrive() -> None:
            if self._broker.up:
                call(*args)

        for delay_s in self._broker.wire.legs(kind, self.subject):
            Link().carry(delay_s, arrive)


def _check_size(payload: bytes) -> None:
    if len(payload) > limits.MESSAGE_BYTES_MAX:
        raise InvalidRequest(f"a message of {len(payload)} bytes, at most {limits.MESSAGE_BYTES_MAX}")


def _resolve(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


async def _within(timeout_s: float, answer: asyncio.Future[Any], failure: str) -> Any:
    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except TimeoutError as error:
        raise DeadlineExceeded(failure) from error
