"""JetStream's semantics in memory: streams that keep work, consumers that lend it out, dead letters.

Owns what the server knows; no networking. Work-queue streams refuse when full, know message ids for a window (even of
messages that are gone), lend each message to one consumer until an acknowledgement or the ack wait, number the
deliveries, and give up after the last one. An acknowledgement counts whoever sends it, however late.
"""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shared.contracts.subjects import Stream
from tests.sim.process import OUTSIDE


@functools.lru_cache(maxsize=65_536)
def matches(pattern: str, subject: str) -> bool:
    """NATS's wildcards: `*` one token, a last `>` one or more."""
    wanted, given = pattern.split("."), subject.split(".")
    for index, token in enumerate(wanted):
        if token == ">":
            return len(given) > index
        if index >= len(given) or token not in ("*", given[index]):
            return False
    return len(wanted) == len(given)


class StreamFull(Exception):
    """The stream refuses: new messages are discarded, not old ones."""


@dataclass(slots=True)
class Stored:
    """A message of a stream; `sequence` from 1."""

    sequence: int
    subject: str
    payload: bytes
    message_id: str
    stored_at_s: float


@dataclass(slots=True)
class Loan:
    """A delivered message that is not acknowledged: to be delivered again at `due_s`."""

    number: int
    due_s: float
    timer: asyncio.TimerHandle | None = None


@dataclass(eq=False, slots=True)
class Fetch:
    """A pull request that waits for up to `room` messages, at one or more consumers."""

    room: int
    open: bool = True


Give = Callable[[Stored, int], None]
"""Takes (message, number of the delivery)."""


@dataclass(slots=True)
class Consumer:
    """A durable pull consumer of one subject. `delivered`: how often each message was lent."""

    subject: str
    waiting: deque[tuple[Fetch, Give]] = field(default_factory=deque)
    delivered: dict[int, int] = field(default_factory=dict)
    loans: dict[int, Loan] = field(default_factory=dict)
    again: deque[int] = field(default_factory=deque)
    next_sequence: int = 1


class FakeStream:
    """One stream. `now_s` is the server's clock; timers run on the running loop."""

    def __init__(self, config: Stream, now_s: Callable[[], float], dead: Callable[[Stream, Stored], None]) -> None:
        self.config = config
        self.messages: OrderedDict[int, Stored] = OrderedDict()
        self.consumers: dict[str, Consumer] = {}
        self._now_s = now_s
        self._dead = dead
        self._bytes = 0
        self._last_sequence = 0
        self._known: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def store(self, subject: str, payload: bytes, message_id: str) -> bool:
        """False for a known message id. Raises StreamFull."""
        now_s = self._now_s()
        self._expire(now_s)
        if message_id in self._known:
            return False
        size = len(payload) + len(subject)
        if len(self.messages) >= self.config.messages_max or self._bytes + size > self.config.bytes_max:
            raise StreamFull(self.config.name)
        self._last_sequence += 1
        stored = Stored(self._last_sequence, subject, payload, message_id, now_s)
        self.messages[stored.sequence] = stored
        self._bytes += size
        self._known[message_id] = (stored.sequence, now_s)
        for consumer in self.consumers.values():
            if matches(consumer.subject, subject):
                self._lend(consumer)
        return True

    def consumer(self, subject: str) -> Consumer:
        """The durable of this subject; made on first need, and it lasts."""
        return self.consumers.setdefault(subject, Consumer(subject))

    def fetch(self, consumer: Consumer, fetch: Fetch, give: Give) -> None:
        """Messages are given as they come until the fetch is full or closed."""
        self._expire(self._now_s())
        consumer.waiting.append((fetch, give))
        self._lend(consumer)

    # -- what a receiver says ----------------------------------------------------------------------------------------

    def done(self, consumer: Consumer, sequence: int) -> None:
        """Acknowledged or terminated, by whoever and however late. A work-queue stream forgets the message."""
        if self.config.retention == "workqueue":
            self.remove(sequence)
        else:
            self._end_loan(consumer, sequence)

    def remove(self, sequence: int) -> None:
        """The message is gone, wherever it is on loan. Idempotent."""
        stored = self.messages.pop(sequence, None)
        if stored is None:
            return
        self._bytes -= len(stored.payload) + len(stored.subject)
        for consumer in self.consumers.values():
            self._end_loan(consumer, sequence)
            consumer.delivered.pop(sequence, None)

    def nak(self, consumer: Consumer, sequence: int, number: int, delay_s: float) -> None:
        """Given back: delivered again after the delay. That of an older delivery says nothing."""
        loan = consumer.loans.get(sequence)
        if loan is None or loan.number != number:
            return
        if delay_s <= 0:
            self._overdue(consumer, sequence)
        else:
            self._set_due(consumer, sequence, loan, delay_s)

    def progress(self, consumer: Consumer, sequence: int) -> None:
        loan = consumer.loans.get(sequence)
        if loan is not None:
            self._set_due(consumer, sequence, loan, self.config.ack_wait_s)

    # -- a crash of the server ---------------------------------------------------------------------------------------

    def crash(self, lost_s: float) -> list[Stored]:
        """The server restarts without what it stored in the last `lost_s` seconds: returns that. Pull requests are
        gone; message ids of messages that are gone are forgotten; loans run on."""
        horizon_s = self._now_s() - lost_s
        lost = [stored for stored in self.messages.values() if stored.stored_at_s > horizon_s]
        for stored in lost:
            self.remove(stored.sequence)
        self._known = OrderedDict(
            (message_id, entry) for message_id, entry in self._known.items() if entry[0] in self.messages
        )
        for consumer in self.consumers.values():
            for fetch, _ in consumer.waiting:
                fetch.open = False
            consumer.waiting.clear()
        return lost

    # -- inside ------------------------------------------------------------------------------------------------------

    def _expire(self, now_s: float) -> None:
        """Old messages and ids out of their window go."""
        while self._known:
            message_id, (_, stored_at_s) = next(iter(self._known.items()))
            if stored_at_s + self.config.duplicate_window_s > now_s:
                break
            del self._known[message_id]
        while self.messages:
            stored = next(iter(self.messages.values()))
            if stored.stored_at_s + self.config.age_max_s > now_s:
                break
            self.remove(stored.sequence)

    def _lend(self, consumer: Consumer) -> None:
        while consumer.waiting:
            fetch, give = consumer.waiting[0]
            if not fetch.open or fetch.room <= 0:
                consumer.waiting.popleft()
                continue
            stored = self._next(consumer)
            if stored is None:
                return
            fetch.room -= 1
            consumer.waiting.rotate(-1)
            number = consumer.delivered.get(stored.sequence, 0) + 1
            consumer.delivered[stored.sequence] = number
            loan = Loan(number, 0.0)
            consumer.loans[stored.sequence] = loan
            self._set_due(consumer, stored.sequence, loan, self.config.ack_wait_s)
            give(stored, number)

    def _next(self, consumer: Consumer) -> Stored | None:
        while consumer.again:
            stored = self.messages.get(consumer.again.popleft())
            if stored is not None:
                return stored
        for sequence in list(self.messages):
            if sequence < consumer.next_sequence:
                continue
            stored = self.messages[sequence]
            if matches(consumer.subject, stored.subject):
                consumer.next_sequence = sequence + 1
                return stored
        consumer.next_sequence = self._last_sequence + 1
        return None

    def _set_due(self, consumer: Consumer, sequence: int, loan: Loan, delay_s: float) -> None:
        if loan.timer is not None:
            loan.timer.cancel()
        loan.due_s = self._now_s() + delay_s
        loop = asyncio.get_running_loop()
        loan.timer = loop.call_later(delay_s, self._overdue, consumer, sequence, context=OUTSIDE.copy())

    def _end_loan(self, consumer: Consumer, sequence: int) -> None:
        loan = consumer.loans.pop(sequence, None)
        if loan is not None and loan.timer is not None:
            loan.timer.cancel()

    def _overdue(self, consumer: Consumer, sequence: int) -> None:
        """Not acknowledged: again, or dead after the last delivery."""
        self._end_loan(consumer, sequence)
        stored = self.messages.get(sequence)
        if stored is None:
            return
        if consumer.delivered[sequence] >= self.config.deliveries_max:
            self._dead(self.config, stored)
            self.remove(sequence)
            return
        consumer.again.append(sequence)
        self._lend(consumer)

    def pending(self) -> Sequence[Stored]:
        return tuple(self.messages.values())
