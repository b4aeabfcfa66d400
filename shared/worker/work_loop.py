"""Taking work: pulls deliveries within the worker's capacity, runs each in its own task, drains.

A task that is stopped gives its delivery back, so that another worker has it at once. A bug in one request's handling
costs that request its try and nobody else anything; after the last delivery it is buried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from shared.contracts.errors import DeepServeError
from shared.contracts.ports import Bus, Delivery
from shared.runtime.service import as_internal_error
from shared.worker.race import stop

log = structlog.get_logger()


class WorkLoop:
    """`capacity`: requests that are worked on at once. `handle` ends its delivery (ack, nak or drop) itself."""

    def __init__(
        self,
        bus: Bus,
        subjects: Sequence[str],
        capacity: int,
        grace_s: float,
        handle: Callable[[Delivery], Awaitable[None]],
    ) -> None:
        self.capacity = capacity
        self.draining = False
        self._bus = bus
        self._subjects = subjects
        self._grace_s = grace_s
        self._handle = handle
        self._running: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> int:
        return len(self._running)

    async def run(self, drain: asyncio.Event) -> None:
        """Works until `drain` is set, then finishes what runs within `grace_s` and gives the rest back."""
        async with asyncio.TaskGroup() as group:
            pulling = group.create_task(self._pull(group), name="pull")
            await drain.wait()
            self.draining = True
            log.info("worker.drained", running=self.running)
            await stop(pulling)
            if self._running:
                await asyncio.wait(set(self._running), timeout=self._grace_s)
            for task in set(self._running):
                task.cancel()

    async def _pull(self, group: asyncio.TaskGroup) -> None:
        async for delivery in self._bus.pull(self._subjects, self._room):
            task = group.create_task(self._work(delivery), name=f"work {delivery.subject}")
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _room(self) -> int:
        return 0 if self.draining else self.capacity - self.running

    async def _work(self, delivery: Delivery) -> None:
        try:
            await as_internal_error(self._handle(delivery))
        except asyncio.CancelledError:
            await _give_back(delivery)
            raise
        except DeepServeError as error:
            log.warning("work.returned", subject=delivery.subject, delivery=delivery.number, error=error.message)
            await _give_back(delivery)


async def _give_back(delivery: Delivery) -> None:
    try:
        await delivery.nak(0.0)
    except DeepServeError as error:
        log.warning("work.kept", subject=delivery.subject, error=error.message)
