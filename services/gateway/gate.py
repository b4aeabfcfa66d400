"""Where requests wait for a place: the fair queue and the workers' capacity, tied to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from services.gateway.admission import Capacity
from services.gateway.queues import FairQueue, Waiting
from services.gateway.workers import Workers
from shared.contracts import limits
from shared.contracts.errors import DeadlineExceeded, Overloaded
from shared.contracts.ids import RequestId
from shared.contracts.messages import Role
from shared.contracts.ports import Clock

_ROLES: Final[tuple[Role, ...]] = ("prefill", "decode")


class Slot:
    """A place among the requests under way."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._handed_off = False

    def handed_off(self) -> None:
        """Prefill is done with it: the next one may be published. Idempotent."""
        if not self._handed_off:
            self._handed_off = True
            self._gate.capacity.handed_off()
            self._gate.pump()

    def leave(self) -> None:
        self._gate.capacity.ended(handed_off=self._handed_off)
        self._gate.pump()


class Gate:
    """For one model."""

    def __init__(self, model: str, workers: Workers, clock: Clock, queued_max: int) -> None:
        self.capacity = Capacity()
        self.gateways = 1
        self._model = model
        self._workers = workers
        self._clock = clock
        self._queue = FairQueue(queued_max)
        self._turns: dict[RequestId, asyncio.Future[Slot]] = {}

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @asynccontextmanager
    async def slot(self, waiting: Waiting) -> AsyncIterator[Slot]:
        """Holds a place for the block, after its turn came. `waiting.deadline_s` is monotonic.

        Raises Overloaded (no workers, the queue is full), DeadlineExceeded.
        """
        slot = await self._turn(waiting)
        try:
            yield slot
        finally:
            slot.leave()

    def pump(self) -> None:
        """Lets in whoever has a place now: after each end, each handoff, each heartbeat."""
        while self._admits():
            waiting = self._queue.pop(self._clock.monotonic_s())
            if waiting is None:
                return
            self.capacity.started()
            self._turns.pop(waiting.request).set_result(Slot(self))

    def close(self) -> None:
        """Turns away everybody who waits."""
        for turn in self._turns.values():
            if not turn.done():
                turn.set_exception(Overloaded("This server is shutting down. Please retry."))

    async def _turn(self, waiting: Waiting) -> Slot:
        if not self._served():
            raise Overloaded("No worker serves this model at present.", retry_after_s=limits.RETRY_AFTER_S)
        self._queue.push(waiting)
        turn: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._turns[waiting.request] = turn
        self.pump()
        left_s = max(waiting.deadline_s - self._clock.monotonic_s(), 0.0)
        came = False
        try:
            async with asyncio.timeout(left_s):
                slot = await asyncio.shield(turn)
            came = True
            return slot
        except TimeoutError as error:
            raise DeadlineExceeded("The request waited too long for a worker. Please retry.") from error
        finally:
            if not came:
                self._forget(waiting, turn)

    def _forget(self, waiting: Waiting, turn: asyncio.Future[Slot]) -> None:
        """It leaves before its turn, or just as its turn came."""
        self._queue.remove(waiting.account, waiting.request)
        self._turns.pop(waiting.request, None)
        if not turn.done():
            turn.cancel()
        elif turn.exception() is None:
            turn.result().leave()

    def _admits(self) -> bool:
        now_s = self._clock.monotonic_s()
        return self.capacity.admits(
            prefill=self._workers.capacity("prefill", self._model, now_s),
            decode=self._workers.capacity("decode", self._model, now_s),
            gateways=self.gateways,
        )

    def _served(self) -> bool:
        now_s = self._clock.monotonic_s()
        return all(self._workers.capacity(role, self._model, now_s) for role in _ROLES)
