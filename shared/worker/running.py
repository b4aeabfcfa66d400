"""A worker as one running thing: its parts made, started in order, watched, drained, ended in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
import structlog

from shared.contracts import limits, messages, subjects
from shared.contracts.errors import DeepServeError
from shared.contracts.ids import WorkerId
from shared.contracts.messages import NAMESPACE_KEY_SEAL, Revoked, Role, WorkerHeartbeat
from shared.contracts.ports import BlockStore, Bus, Clock, Delivery, Engine
from shared.contracts.tag import GrantClaims
from shared.runtime import sealing, signing
from shared.worker.background import Background
from shared.worker.block_reader import BlockReader
from shared.worker.block_writer import BlockWriter
from shared.worker.breaker import Breaker
from shared.worker.counters import Counters
from shared.worker.emitter import Emitter
from shared.worker.engine_loop import EngineLoop
from shared.worker.floor import Floor
from shared.worker.namespace_keys import NamespaceKeys
from shared.worker.objects import BlockObjects
from shared.worker.page_gate import PageGate
from shared.worker.race import stop
from shared.worker.settlement import Settlement
from shared.worker.step_router import StepRouter
from shared.worker.work_loop import WorkLoop

log = structlog.get_logger()

Handle = Callable[[Delivery], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What a composition root gives a worker: adapters, secrets, sizes. `entropy(n)`: n random bytes."""

    role: Role
    worker: WorkerId
    model: str
    bus: Bus
    store: BlockStore
    engine: Engine
    clock: Clock
    cluster_key: bytes
    verify_key: bytes
    entropy: Callable[[int], bytes]
    step_rows: int
    capacity: int
    grace_s: float
    """How long a drain lets running requests finish."""


class Worker:
    """Made inside a running loop. `run` once; `floor` is what the role's own code stands on."""

    def __init__(self, means: Means) -> None:
        self.role = means.role
        self._means = means
        self._background = Background()
        self._revocations = signing.Revocations()
        self.floor = self._make_floor()

    def _make_floor(self) -> Floor:
        means = self._means
        counters, breaker = Counters(), Breaker()
        engine = EngineLoop(means.engine, means.step_rows)
        emitter = Emitter(means.bus, means.worker, means.clock)
        objects = BlockObjects(means.store, engine.profile, breaker, means.clock, means.entropy)

        def verify(statement: str, now_s: float) -> GrantClaims:
            return signing.verify(GrantClaims, statement, means.verify_key, now_s)

        def open_namespace_key(sealed: bytes) -> bytes:
            return sealing.open_sealed(means.cluster_key, NAMESPACE_KEY_SEAL, sealed)

        return Floor(
            worker=means.worker,
            model=means.model,
            bus=means.bus,
            clock=means.clock,
            counters=counters,
            engine=engine,
            router=StepRouter(engine, emitter),
            emitter=emitter,
            pages=PageGate(engine.profile.pages),
            objects=objects,
            reader=BlockReader(objects, breaker, counters, means.clock),
            writer=BlockWriter(engine, breaker, counters, means.clock),
            keys=NamespaceKeys(means.bus, open_namespace_key, means.clock),
            settlement=Settlement(means.bus, means.worker, means.clock),
            verify=verify,
            check_revoked=self._revocations.check,
            entropy=means.entropy,
            spawn=self._background.spawn,
            fingerprint=engine.profile.fingerprint.digest(),
        )

    async def run(self, handle: Handle, drain: asyncio.Event, ready: Callable[[], None]) -> None:
        """Until drained; raises what broke the engine or a task. `ready` is called when work may be claimed."""
        means, floor = self._means, self.floor
        at = subjects.work_at(means.role, means.model, means.worker)
        work = WorkLoop(
            means.bus, (subjects.work_any(means.role, means.model), at), means.capacity, means.grace_s, handle
        )
        listening = asyncio.Event()
        stop_revocations = await means.bus.subscribe(subjects.REVOKED, self._on_revoked)
        try:
            async with asyncio.TaskGroup() as group:
                vital = [
                    group.create_task(floor.engine.run(), name="engine"),
                    group.create_task(floor.router.run(), name="steps"),
                    group.create_task(self._background.run(), name="background"),
                    group.create_task(floor.emitter.run(listening), name="emitter"),
                ]
                await listening.wait()
                vital.append(group.create_task(self._beat(work), name="heartbeat"))
                ready()
                await work.run(drain)
                await self._background.close(limits.DRAIN_TIMEOUT_S)
                for task in vital:
                    await stop(task)
        finally:
            await floor.keys.close()
            await stop_revocations()
            log.info("worker.stopped", counts=dict(floor.counters.snapshot()), busy_s=round(floor.router.busy_s, 3))

    async def _beat(self, work: WorkLoop) -> None:
        means = self._means
        while True:
            try:
                beat = messages.encode(self.heartbeat(work))
                await means.bus.send(subjects.worker_heartbeat(means.worker), beat)
            except DeepServeError as error:
                log.warning("heartbeat.missed", error=error.message)
            await asyncio.sleep(limits.HEARTBEAT_S)

    async def _on_revoked(self, subject: str, payload: bytes) -> None:
        try:
            revoked = messages.decode(Revoked, payload)
        except msgspec.MsgspecError as error:
            log.warning("revocation.unreadable", subject=subject, error=str(error))
            return
        self._revocations.apply(revoked, self._means.clock.now_s())

    def heartbeat(self, work: WorkLoop) -> WorkerHeartbeat:
        means, profile = self._means, self.floor.profile
        return WorkerHeartbeat(
            worker=means.worker,
            role=means.role,
            model=means.model,
            capacity=work.capacity,
            running=work.running,
            pages_free=self.floor.engine.pages_free,
            pages=profile.pages,
            context_tokens=profile.context_tokens,
            block_tokens=profile.block_tokens,
            fingerprint=self.floor.fingerprint,
            sent_at_s=means.clock.now_s(),
            draining=work.draining,
        )
