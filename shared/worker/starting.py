"""What both workers' composition roots do alike: secrets, bus, engine, the worker, its metrics."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from shared.contracts import limits
from shared.contracts.ids import WorkerId
from shared.contracts.messages import Role
from shared.contracts.ports import Engine
from shared.runtime.bus import NatsBus
from shared.runtime.config import WorkerSettings
from shared.runtime.key_files import read_key, read_public_key
from shared.runtime.service import Service
from shared.runtime.stores.open import open_store
from shared.worker.floor import Floor
from shared.worker.running import Handle, Means, Worker

GRACE_PART = 0.8
"""Of the drain's time: how long running requests may finish; the rest is for giving back what did not."""


def pages_of(settings: WorkerSettings, kv_bytes_token: int) -> int:
    """Pages that the settings give an engine whose KV of one token has `kv_bytes_token`."""
    if settings.kv_pages is not None:
        return settings.kv_pages
    return max(settings.kv_bytes // (kv_bytes_token * limits.BLOCK_TOKENS_DEFAULT), 1)


async def start_worker(
    service: Service,
    settings: WorkerSettings,
    role: Role,
    load: Callable[[], Engine],
    handler: Callable[[Floor], Handle],
) -> None:
    """Spawns the worker, which is ready when it may claim work. `load` may take seconds: it runs in a thread."""
    cluster_key = read_key(settings.cluster_key_file, "cluster key")
    verify_key = read_public_key(settings.verify_key_file, "verify key")
    service.waiting_for("the model")
    engine = await asyncio.to_thread(load)
    store = open_store(settings.store)
    service.on_stop("store", store.close)
    service.waiting_for("NATS")
    bus = await NatsBus.connect(settings.nats_url, cluster_key, settings.worker_id)
    service.on_stop("bus", bus.close)
    service.require(lambda: None if bus.connected else "NATS is away")
    worker = Worker(
        Means(
            role=role,
            worker=WorkerId(settings.worker_id),
            model=settings.model,
            bus=bus,
            store=store,
            engine=engine,
            clock=service.clock,
            cluster_key=cluster_key,
            verify_key=verify_key,
            entropy=os.urandom,
            step_rows=settings.step_rows,
            capacity=settings.sequences_max,
            grace_s=min(limits.WORKER_GRACE_S, GRACE_PART * settings.drain_timeout_s),
        )
    )
    _watch(service, worker.floor)
    service.spawn(worker.run(handler(worker.floor), service.draining, service.ready), "worker", drains=True)


def _watch(service: Service, floor: Floor) -> None:
    watch = service.metrics
    watch.watch_counts("worker_events", "Misses, drops and other events, by name.", "what", floor.counters.snapshot)
    watch.watch("device_busy_seconds", "Time in forward passes.", None, lambda: {"": floor.router.busy_s})
    settled = watch.histogram("settlement_seconds", "From an answer's end until billing had committed its usage.")
    floor.settlement.observe = settled.observe
    watch.watch("pages_free", "Pages that no sequence has.", None, lambda: {"": float(floor.engine.pages_free)})
