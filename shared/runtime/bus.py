"""The bus: JetStream carries work, core NATS carries requests, tokens and heartbeats. Owns the NATS library.

Work payloads are sealed with the cluster key, since JetStream keeps files. Truth lives elsewhere (design, section 2):
what is lost here is repaired by the gateway. All errors are of the tree; handlers that fail are contained and logged.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final

import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import Header

from shared.contracts import limits
from shared.contracts.errors import DeadlineExceeded, DeepServeError
from shared.runtime import bus_burial
from shared.runtime.bus_client import OrderedClient
from shared.runtime.bus_pull import NatsDelivery, Puller
from shared.runtime.bus_streams import ensure_streams, translated
from shared.runtime.sealing import open_sealed, seal
from shared.runtime.service import as_internal_error

_log = structlog.get_logger()
_PURPOSE: Final = "work"
Handler = Callable[[str, bytes], Awaitable[bytes | None]]


class NatsBus:
    """Implements `ports.Bus`. Made by `connect`, ended by `close`."""

    def __init__(self, connection: OrderedClient, cluster_key: bytes, log: _ConnectionLog) -> None:
        self._connection = connection
        self._connection_log = log
        self._jetstream = connection.jetstream(timeout=limits.PUBLISH_TIMEOUT_S)
        self._cluster_key = cluster_key
        self._closing = asyncio.Event()
        self._pullers: set[Puller] = set()
        self._subscriptions: set[Subscription] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._burial: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, url: str, cluster_key: bytes, name: str) -> NatsBus:
        """Connects and makes the streams. `url`: servers, separated by commas. `name` is seen in NATS' monitor.

        Raises DeadlineExceeded when no server let us in within limits.CONNECT_TIMEOUT_S. Later the connection is
        renewed for ever.
        """
        log = _ConnectionLog()
        connection = OrderedClient()
        try:
            async with asyncio.timeout(limits.CONNECT_TIMEOUT_S):
                await connection.connect(
                    [server.strip() for server in url.split(",")],
                    name=name,
                    error_cb=log.failed,
                    disconnected_cb=log.disconnected,
                    reconnected_cb=log.reconnected,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=limits.RECONNECT_WAIT_S,
                    ping_interval=limits.PING_INTERVAL_S,
                    pending_size=limits.SEND_BUFFER_BYTES_MAX,
                )
        except (TimeoutError, nats.errors.Error) as error:
            await connection.close()
            raise DeadlineExceeded(f"cannot connect to NATS: {log.last or error}") from error
        bus = cls(connection, cluster_key, log)
        try:
            await ensure_streams(bus._jetstream)
        except DeepServeError:
            await connection.close()
            raise
        return bus

    @property
    def connected(self) -> bool:
        """Whether NATS is there at this moment; part of readiness."""
        return self._connection.is_connected

    # -- work ----------------------------------------------------------------------------------------------------------

    async def publish(self, subject: str, payload: bytes, message_id: str) -> None:
        sealed = seal(self._cluster_key, _PURPOSE, payload)
        with translated(f"publishing to {subject}"):
            # JetStream's refusal (a full stream, no room on its disk) is Overloaded, as is its absence.
            await self._jetstream.publish(
                subject, sealed, timeout=limits.PUBLISH_TIMEOUT_S, headers={Header.MSG_ID: message_id}
            )

    async def pull(self, subjects: Sequence[str], batch: Callable[[], int]) -> AsyncGenerator[NatsDelivery]:
        """Whoever pulls work also buries what nobody could finish."""
        if self._burial is None:
            self._burial = self._own(self._bury())
        puller = self._puller(subjects, lambda sealed: open_sealed(self._cluster_key, _PURPOSE, sealed))
        try:
            async with contextlib.aclosing(puller.deliveries(batch)) as deliveries:
                async for delivery in deliveries:
                    yield delivery
        finally:
            self._pullers.discard(puller)

    def _puller(self, subjects: Sequence[str], unseal: Callable[[bytes], bytes]) -> Puller:
        puller = Puller(self._connection, self._jetstream, subjects, unseal, self._closing)
        self._pullers.add(puller)
        return puller

    async def _bury(self) -> None:
        puller = self._puller([bus_burial.SUBJECT], lambda plain: plain)
        await bus_burial.bury(self._jetstream, puller)

    # -- core messages -------------------------------------------------------------------------------------------------

    async def send(self, subject: str, payload: bytes) -> None:
        with translated(f"sending to {subject}"):
            await self._connection.publish(subject, payload)

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        with translated(f"asking {subject}"):
            reply = await self._connection.request(subject, payload, timeout=timeout_s)
        return reply.data

    async def subscribe(
        self, subject: str, handler: Handler, queue: str | None = None
    ) -> Callable[[], Awaitable[None]]:
        """The unsubscribe lets what had arrived be handled; it must not be called from the handler itself."""
        places = asyncio.Semaphore(limits.HANDLERS_IN_FLIGHT_MAX)

        async def in_order(message: Msg) -> None:
            await self._handle(handler, message)

        async def at_once(message: Msg) -> None:
            await places.acquire()
            self._own(self._handle(handler, message)).add_done_callback(lambda _: places.release())

        with translated(f"subscribing to {subject}"):
            subscription = await self._connection.subscribe(
                subject,
                queue=queue or "",
                cb=in_order if queue is None else at_once,
                pending_msgs_limit=limits.SUBSCRIPTION_MESSAGES_MAX,
                pending_bytes_limit=limits.SUBSCRIPTION_BYTES_MAX,
            )
            # Whoever hears that we listen may send: the server has to know of it before we say so.
            await self._connection.flush(limits.ACK_TIMEOUT_S)  # type: ignore[arg-type]
        self._subscriptions.add(subscription)

        async def unsubscribe() -> None:
            if subscription in self._subscriptions:
                self._subscriptions.discard(subscription)
                await self._drain(subscription)

        return unsubscribe

    async def _handle(self, handler: Handler, message: Msg) -> None:
        try:
            reply = await as_internal_error(handler(message.subject, message.data))
            if reply is not None and message.reply:
                await self.send(message.reply, reply)
        except DeepServeError as error:
            _log.warning("message.refused", subject=message.subject, error=type(error).__name__, message=error.message)

    # -- the end -------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Ends pulls and subscriptions, lets handlers finish, all within limits.DRAIN_TIMEOUT_S; cancels the rest.

        Idempotent. Deliveries that are still worked on stay leased until they are ended or their lease runs out.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        self._connection_log.wanted = True
        try:
            async with asyncio.timeout(limits.DRAIN_TIMEOUT_S):
                for puller in tuple(self._pullers):
                    puller.wake()
                await asyncio.gather(*(self._drain(s) for s in tuple(self._subscriptions)))
                if self._tasks:
                    await asyncio.wait(self._tasks)
                with contextlib.suppress(nats.errors.Error):
                    await self._connection.flush(limits.ACK_TIMEOUT_S)  # type: ignore[arg-type]
        except TimeoutError:
            _log.warning("bus.abandoned", handlers=len(self._tasks))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            async with asyncio.timeout(limits.ACK_TIMEOUT_S):
                await self._connection.close()
        except TimeoutError:
            _log.warning("bus.close_abandoned")

    async def _drain(self, subscription: Subscription) -> None:
        try:
            async with asyncio.timeout(limits.DRAIN_TIMEOUT_S):
                await subscription.drain()  # type: ignore[no-untyped-call]
        except (TimeoutError, nats.errors.Error) as error:
            _log.warning("subscription.abandoned", subject=subscription.subject, error=str(error))

    def _own(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("bus.task_failed", exc_info=error)


class _ConnectionLog:
    """The library's callbacks. `last`: its last error, for a connection that never came about. `wanted`: we are
    closing it ourselves."""

    def __init__(self) -> None:
        self.last: Exception | None = None
        self.wanted = False

    async def failed(self, error: Exception) -> None:
        if str(error) != str(self.last):  # A server that stays away is reported once, not at each try.
            _log.warning("bus.failed", error=str(error) or type(error).__name__)
        self.last = error

    async def disconnected(self) -> None:
        if not self.wanted:
            _log.warning("bus.disconnected")

    async def reconnected(self) -> None:
        self.last = None
        _log.info("bus.reconnected")
