"""One delivery of a work message in memory (contracts.ports.Delivery)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from shared.contracts import limits
from shared.contracts.errors import IllegalTransition
from tests.fakes.jetstream import Consumer, FakeStream, Stored
from tests.fakes.wire import Link, Wire, resolve, within
from tests.sim import process


class Connection(Protocol):
    @property
    def wire(self) -> Wire: ...

    @property
    def connected(self) -> bool: ...


class FakeDelivery:
    """`contracts.ports.Delivery`: a loan of the stream's. `ack` may be lost on its way there or back."""

    def __init__(
        self, connection: Connection, stream: FakeStream, consumer: Consumer, stored: Stored, number: int
    ) -> None:
        self.payload = stored.payload
        self.subject = stored.subject
        self.number = number
        self._connection = connection
        self._stream = stream
        self._consumer = consumer
        self._sequence = stored.sequence
        self._ended = False

    async def ack(self) -> None:
        self._check_open()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def remove() -> None:
            self._stream.done(self._consumer, self._sequence)
            self._carry("acked", resolve, done, None)

        self._carry("ack", remove)
        await within(limits.ACK_TIMEOUT_S, done, "the acknowledgement was not confirmed")
        self._ended = True

    async def nak(self, delay_s: float) -> None:
        self._check_open()
        self._ended = True
        self._carry("nak", self._stream.nak, self._consumer, self._sequence, self.number, delay_s)

    async def in_progress(self) -> None:
        process.check_alive()
        if not self._ended:
            self._carry("progress", self._stream.progress, self._consumer, self._sequence)

    async def drop(self) -> None:
        self._check_open()
        self._ended = True
        self._carry("drop", self._stream.done, self._consumer, self._sequence)

    def _check_open(self) -> None:
        process.check_alive()
        if self._ended:
            raise IllegalTransition(f"delivery {self.number} of {self.subject} has ended already")

    def _carry(self, kind: str, call: Callable[..., object], *args: Any) -> None:
        def arrive() -> None:
            if self._connection.connected:
                call(*args)

        for delay_s in self._connection.wire.legs(kind, self.subject):
            Link().carry(delay_s, arrive)
