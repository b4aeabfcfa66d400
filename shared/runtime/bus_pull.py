"""Pulling work: deliveries of several durable consumers, never more of them than the worker has room for.

Part of the bus; like it, one of the few files that know the NATS library.

Work goes in rounds. A round asks each consumer for its share of the room and waits until something arrives; then what
is still asked for is called back before the worker is asked for its room again. Calling back means: take the
subscription away at the server, and wait for its word that nothing more is on the way. Without it, room promised to an
empty subject would keep a full one waiting, or two subjects would fill one place. What still comes while it is called
back is kept for the next round, or given back at once when there is no room for it.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Final

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext
from nats.js.api import Header

from shared.contracts import limits
from shared.contracts.errors import DeadlineExceeded, IllegalTransition, InternalError, Overloaded
from shared.runtime.bus_streams import ensure_consumer, ensure_streams, translated

_log = structlog.get_logger()
_NOTHING: Final = ("404", "408")
"""Statuses of a pull request that ended with fewer messages than it asked for."""
_NANO: Final = 1_000_000_000


class NatsDelivery:
    """Implements `ports.Delivery`."""

    def __init__(self, message: Msg, payload: bytes) -> None:
        self._message = message
        self.payload = payload
        self.subject = message.subject
        self.number = message.metadata.num_delivered

    async def ack(self) -> None:
        self._open()
        with translated(f"acknowledging {self.subject}"):
            await self._message.ack_sync(limits.ACK_TIMEOUT_S)

    async def nak(self, delay_s: float) -> None:
        self._open()
        with translated(f"giving {self.subject} back"):
            await self._message.nak(delay_s)

    async def drop(self) -> None:
        self._open()
        with translated(f"dropping {self.subject}"):
            await self._message.term()

    async def in_progress(self) -> None:
        """After the delivery's end it says nothing: a renewal may be on its way when the work is done."""
        if not self._message.is_acked:
            with translated(f"renewing {self.subject}"):
                await self._message.in_progress()

    def _open(self) -> None:
        if self._message.is_acked:
            raise IllegalTransition(f"delivery {self.number} of {self.subject} has ended already")


class Puller:
    """Pulls from `subjects`, each with its own durable consumer. `unseal` turns a message's data into a payload."""

    def __init__(
        self,
        connection: Client,
        jetstream: JetStreamContext,
        subjects: Sequence[str],
        unseal: Callable[[bytes], bytes],
        closing: asyncio.Event,
    ) -> None:
        self._connection = connection
        self._jetstream = jetstream
        self._subjects = tuple(subjects)
        self._unseal = unseal
        self._closing = closing
        self._consumers: list[tuple[str, str]] = []
        self._asked: list[Subscription] = []
        self._arrived: deque[Msg] = deque()
        self._news = asyncio.Event()
        self._recalling: asyncio.Task[None] | None = None
        self._retry_s = limits.PULL_RETRY_S
        self._turn = 0

    def wake(self) -> None:
        """Ends a round that waits: the bus closes."""
        self._news.set()

    async def deliveries(self, batch: Callable[[], int]) -> AsyncGenerator[NatsDelivery]:
        """Until the bus closes. Closing the iterator gives back what had arrived and was not taken."""
        try:
            while not self._closing.is_set():
                await self._recalled()
                room = batch()
                if room <= 0:
                    await self._give_back()
                    await self._pause(limits.PULL_IDLE_S)
                    continue
                if not self._arrived:
                    await self._round(room)
                for _ in range(min(room, len(self._arrived))):
                    delivery = await self._open(self._arrived.popleft())
                    if delivery is not None:
                        yield delivery
        finally:
            self._recall()
            await self._recalled()
            await self._give_back()

    async def _round(self, room: int) -> None:
        """Asks, waits for the first arrival, and begins to call the rest back."""
        if not self._connection.is_connected:
            await self._pause(limits.PULL_RETRY_S)  # The bus says once that NATS is away.
            return
        self._news.clear()
        try:
            await self._ask(room)
            tight = room < len(self._subjects)
            async with asyncio.timeout(limits.PULL_TURN_S if tight else limits.PULL_WAIT_S):
                await self._news.wait()
            if not self._consumers and not self._arrived:
                raise Overloaded("JetStream refused the pull request")
            self._retry_s = limits.PULL_RETRY_S
        except TimeoutError:
            pass  # Nothing came. The requests have expired or were lost with the connection: ask again.
        except (Overloaded, DeadlineExceeded) as error:
            _log.warning("pull.failed", subjects=self._subjects, error=error.message)
            self._consumers = []
            await self._pause(self._retry_s)
            self._retry_s = min(2 * self._retry_s, limits.PULL_RETRY_MAX_S)
        self._recall()

    async def _ask(self, room: int) -> None:
        with translated("pulling work"):
            if not self._consumers:
                await ensure_streams(self._jetstream)
                self._consumers = [await ensure_consumer(self._jetstream, subject) for subject in self._subjects]
            shares = _shares(room, len(self._subjects), self._turn)
            self._turn = (self._turn + 1) % len(self._subjects)
            for (stream, consumer), share in zip(self._consumers, shares, strict=True):
                if not share:
                    continue
                inbox = self._connection.new_inbox()
                self._asked.append(await self._connection.subscribe(inbox, cb=self._receive))
                wish = json.dumps({"batch": share, "expires": int(limits.PULL_WAIT_S * _NANO)})
                next_message = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
                await self._connection.publish(next_message, wish.encode(), reply=inbox)

    async def _receive(self, message: Msg) -> None:
        headers = message.headers or {}
        status = headers.get(Header.STATUS)
        if status is None:
            self._arrived.append(message)
        elif status in _NOTHING:
            return  # The round ends by its own clock, since other subjects may still have something.
        else:
            _log.warning("pull.refused", status=status, description=headers.get(Header.DESCRIPTION, ""))
            self._consumers = []
        self._news.set()

    def _recall(self) -> None:
        """Idempotent. In the background: what has arrived does not wait for it."""
        if self._asked:
            self._recalling = asyncio.create_task(self._call_back(self._asked))
            self._asked = []

    async def _recalled(self) -> None:
        if self._recalling is not None:
            await self._recalling
            self._recalling = None

    async def _call_back(self, subscriptions: Sequence[Subscription]) -> None:
        """Bounded: what a lost connection keeps is given up, and JetStream delivers again."""
        results = await asyncio.gather(*(self._end(s) for s in subscriptions), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, (nats.errors.Error, TimeoutError)):
                raise result

    async def _end(self, subscription: Subscription) -> None:
        try:
            async with asyncio.timeout(limits.ACK_TIMEOUT_S):
                await subscription.drain()  # type: ignore[no-untyped-call]
        finally:
            # After a failed drain the library would renew the subscription at each reconnect, for ever.
            self._connection._remove_sub(subscription._id)

    async def _open(self, message: Msg) -> NatsDelivery | None:
        try:
            return NatsDelivery(message, self._unseal(message.data))
        except InternalError as error:
            _log.error("work.unreadable", subject=message.subject, error=error.message)
            await _end_quietly(message, message.term)
            return None

    async def _give_back(self) -> None:
        while self._arrived:
            message = self._arrived.popleft()
            await _end_quietly(message, message.nak)

    async def _pause(self, pause_s: float) -> None:
        """Sleeps, at most until the bus closes."""
        try:
            async with asyncio.timeout(pause_s):
                await self._closing.wait()
        except TimeoutError:
            pass


async def _end_quietly(message: Msg, end: Callable[[], Awaitable[None]]) -> None:
    """Where it fails, the delivery ends by its lease."""
    try:
        with translated("ending a delivery"):
            await end()
    except (Overloaded, DeadlineExceeded) as error:
        _log.warning("delivery.kept", subject=message.subject, error=error.message)


def _shares(room: int, subjects: int, turn: int) -> list[int]:
    """Room over subjects, never more in all than there is: a surplus given back would use up deliveries of work that
    nobody tried. With less room than subjects they take turns, the `turn`-th of them first."""
    shares = [room // subjects] * subjects
    for i in range(room % subjects):
        shares[(turn + i) % subjects] += 1
    return shares
