"""The bus in memory: one `Broker` for all, one `FakeBus` for each process (contracts.ports.Bus).

Core messages reach whoever is subscribed when they arrive, at most once, in order for each pair of connections; queue
groups draw one member; a request that nobody hears is refused at once. Work follows `jetstream.py`. When a process dies
its subscriptions and pulls vanish, and what it had on loan comes again after the ack wait. While the broker is down,
what is sent is lost and what is asked stays unanswered.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from shared.contracts import limits
from shared.contracts.errors import DeepServeError, InvalidRequest, Overloaded
from shared.contracts.ports import Delivery
from shared.contracts.subjects import STREAMS, Stream, dead
from tests.fakes.delivery import FakeDelivery
from tests.fakes.jetstream import FakeStream, Fetch, Stored, StreamFull, matches
from tests.fakes.wire import CALM, Link, Wire, resolve, within
from tests.sim import process

log = structlog.get_logger()
Reply = Callable[[bytes], None]
Message = tuple[str, bytes, Reply | None]
"""(subject, payload, how to reply)."""
RECALL_S: Final = 0.0005
"""Until the server has taken pull requests back, and the worker is asked for its room again."""
Handler = Callable[[str, bytes], Awaitable[bytes | None]]


@dataclass(eq=False, slots=True)
class Subscription:
    """`inbox` holds messages that have arrived; None ends it."""

    subject: str
    queue: str | None
    inbox: asyncio.Queue[Message | None]
    links: dict[int, Link]
    owner: str | None


class Broker:
    """The server. `wire` may be changed while it runs. `cut_off`: names of processes that cannot reach it, nor be
    reached; it takes some time until a real server notices, and so their subscriptions stay."""

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
        self.cut_off: set[str] = set()
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

    def reaches(self, owner: str | None) -> bool:
        return self.up and owner not in self.cut_off

    # -- core messages -----------------------------------------------------------------------------------------------

    def listeners(self, subject: str) -> list[Subscription]:
        """Who gets a message: each plain subscription, and one drawn member of each queue group."""
        found = [s for s in self._subscriptions if matches(s.subject, subject)]
        groups: dict[str, list[Subscription]] = {}
        for subscription in found:
            if subscription.queue is not None:
                groups.setdefault(subscription.queue, []).append(subscription)
        return [s for s in found if s.queue is None] + [self._random.choice(group) for group in groups.values()]

    def route(self, sender: int, ordered: bool, subject: str, payload: bytes, reply: Reply | None) -> int:
        """Sends a message on its way to its listeners; returns how many there are."""
        listeners = self.listeners(subject)
        for subscription in listeners:
            link = subscription.links.setdefault(sender, Link(ordered))
            for delay_s in self.wire.legs("core", subject):
                link.carry(delay_s, self._arrive, subscription, subject, payload, reply)
        return len(listeners)

    def _arrive(self, subscription: Subscription, subject: str, payload: bytes, reply: Reply | None) -> None:
        if self.reaches(subscription.owner) and subscription in self._subscriptions:
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
        subject = dead(stream.name, stored.sequence)
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
        self._fetches: list[Fetch] = []
        self._closed = False
        self._work_link = Link()
        member = process.current()
        self._owner = member.name if member is not None else None
        if member is not None:
            member.at_death(self._die)

    @property
    def wire(self) -> Wire:
        return self._broker.wire

    @property
    def connected(self) -> bool:
        return self._broker.reaches(self._owner)

    # -- work --------------------------------------------------------------------------------------------------------

    async def publish(self, subject: str, payload: bytes, message_id: str) -> None:
        process.check_alive()
        _check_size(payload)
        stream = self._broker.stream_of(subject)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def store() -> None:
            if not self.connected:
                return
            try:
                stream.store(subject, payload, message_id)
                stored = True
            except StreamFull:
                stored = False
            for delay_s in self._broker.wire.legs("stored", subject):
                Link().carry(delay_s, resolve, answer, stored)

        for delay_s in self._broker.wire.legs("publish", subject):
            self._work_link.carry(delay_s, store)
        if not await within(limits.PUBLISH_TIMEOUT_S, answer, "the stream did not acknowledge"):
            raise Overloaded(f"stream {stream.config.name} is full")

    async def pull(self, subjects: Sequence[str], batch: Callable[[], int]) -> AsyncIterator[Delivery]:
        """In rounds, as the real one: each subject is asked for its share of the room until something arrives. What
        comes after that is kept for the next round, or given back when there is no room for it."""
        process.check_alive()
        arrived: deque[FakeDelivery] = deque()
        try:
            while not self._closed:
                process.check_alive()
                room = batch()
                if room <= 0:
                    await _give_back(arrived)
                    await asyncio.sleep(limits.PULL_IDLE_S)
                    continue
                if not arrived:
                    await self._round(subjects, room, arrived)
                for _ in range(min(room, len(arrived))):
                    yield arrived.popleft()
                await asyncio.sleep(RECALL_S)
        finally:
            self._recall()
            await _give_back(arrived)

    async def _round(self, subjects: Sequence[str], room: int, arrived: deque[FakeDelivery]) -> None:
        news = asyncio.Event()
        if self.connected:
            for subject, share in zip(subjects, _shares(room, len(subjects)), strict=True):
                self._ask(subject, share, arrived, news)
        try:
            async with asyncio.timeout(limits.PULL_WAIT_S):
                await news.wait()
        except TimeoutError:
            pass
        self._recall()

    def _ask(self, subject: str, room: int, arrived: deque[FakeDelivery], news: asyncio.Event) -> None:
        stream = self._broker.stream_of(subject)
        consumer = stream.consumer(subject)

        def arrive(delivery: FakeDelivery) -> None:
            if not self.connected:
                return
            arrived.append(delivery)
            news.set()

        def give(stored: Stored, number: int) -> None:
            delivery = FakeDelivery(self, stream, consumer, stored, number)
            for delay_s in self._broker.wire.legs("deliver", stored.subject)[:1]:
                self._work_link.carry(delay_s, arrive, delivery)

        fetch = Fetch(room)
        self._fetches.append(fetch)
        stream.fetch(consumer, fetch, give)

    def _recall(self) -> None:
        for fetch in self._fetches:
            fetch.open = False
        self._fetches.clear()

    # -- core messages -----------------------------------------------------------------------------------------------

    async def send(self, subject: str, payload: bytes) -> None:
        process.check_alive()
        _check_size(payload)
        if self.connected:
            self._broker.route(self._number, self._ordered, subject, payload, None)

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        process.check_alive()
        _check_size(payload)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def reply(answered: bytes) -> None:
            if not self.connected:
                return
            for delay_s in self._broker.wire.legs("reply", subject):
                Link().carry(delay_s, resolve, answer, answered)

        if self.connected and not self._broker.route(self._number, self._ordered, subject, payload, reply):
            raise Overloaded(f"nobody listens to {subject}")
        answered: bytes = await within(timeout_s, answer, f"no answer from {subject}")
        return answered

    async def subscribe(
        self, subject: str, handler: Handler, queue: str | None = None
    ) -> Callable[[], Awaitable[None]]:
        process.check_alive()
        subscription = Subscription(subject, queue, asyncio.Queue(), {}, self._owner)
        self._broker.add(subscription)
        self._subscriptions.append(subscription)
        serve = self._serve_in_order if queue is None else self._serve_at_once
        task = asyncio.create_task(serve(subscription, handler), name=f"subscription {subject}")
        self._tasks.add(task)

        async def unsubscribe() -> None:
            """What had arrived is handled."""
            self._broker.discard(subscription)
            subscription.inbox.put_nowait(None)
            await asyncio.wait({task}, timeout=limits.DRAIN_TIMEOUT_S)
            task.cancel()
            await asyncio.wait({task})
            self._tasks.discard(task)

        return unsubscribe

    async def _serve_in_order(self, subscription: Subscription, handler: Handler) -> None:
        while (message := await subscription.inbox.get()) is not None:
            await self._answer(handler, *message)

    async def _serve_at_once(self, subscription: Subscription, handler: Handler) -> None:
        places = asyncio.Semaphore(limits.HANDLERS_IN_FLIGHT_MAX)

        async def answer(message: Message) -> None:
            try:
                await self._answer(handler, *message)
            finally:
                places.release()

        async with asyncio.TaskGroup() as group:
            while (message := await subscription.inbox.get()) is not None:
                await places.acquire()
                group.create_task(answer(message), name=f"handler {message[0]}")

    async def _answer(self, handler: Handler, subject: str, payload: bytes, reply: Reply | None) -> None:
        """An error of the handler costs its message; one outside of the tree is a bug, and the loop is told of it."""
        try:
            answered = await handler(subject, payload)
        except DeepServeError as error:
            log.warning("message.refused", subject=subject, error=type(error).__name__, message=error.message)
            return
        except Exception as error:  # noqa: BLE001  as the real bus, which supervises its handlers
            asyncio.get_running_loop().call_exception_handler({"message": f"handler of {subject}", "exception": error})
            return
        if reply is not None and answered is not None and self.connected:
            reply(answered)

    async def close(self) -> None:
        """Ends subscriptions and pulls; handlers finish. Idempotent."""
        self._closed = True
        self._die()
        for subscription in self._subscriptions:
            subscription.inbox.put_nowait(None)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limits.DRAIN_TIMEOUT_S)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _die(self) -> None:
        for subscription in self._subscriptions:
            self._broker.discard(subscription)
        for fetch in self._fetches:
            fetch.open = False


async def _give_back(arrived: deque[FakeDelivery]) -> None:
    while arrived:
        await arrived.popleft().nak(0.0)


def _shares(room: int, subjects: int) -> list[int]:
    """Room over subjects; each may fill it where there is less room than subjects."""
    if room < subjects:
        return [room] * subjects
    return [room // subjects + (1 if i < room % subjects else 0) for i in range(subjects)]


def _check_size(payload: bytes) -> None:
    if len(payload) > limits.MESSAGE_BYTES_MAX:
        raise InvalidRequest(f"a message of {len(payload)} bytes, at most {limits.MESSAGE_BYTES_MAX}")
