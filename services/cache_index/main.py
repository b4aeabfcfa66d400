"""The cache index's process: which blocks exist, for whom, how long."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import msgspec
import structlog

from services.cache_index.handlers import IndexHandlers, serve
from services.cache_index.repository import BlockRepository
from services.cache_index.schema import make_tables
from services.cache_index.sweeper import Sweeper
from shared.contracts import messages, subjects
from shared.contracts.messages import Revoked
from shared.contracts.ports import Bus, Clock
from shared.runtime.bus import NatsBus
from shared.runtime.config import CacheIndexSettings
from shared.runtime.database import make_pool
from shared.runtime.key_files import read_key, read_public_key
from shared.runtime.service import Service, run
from shared.runtime.signing import Revocations, Verifier
from shared.runtime.stores.open import open_store

log = structlog.get_logger()

ROLE = "cache_index"


async def hear_revocations(bus: Bus, revocations: Revocations, clock: Clock) -> None:
    """From now on a revoked grant is refused at its next message."""

    async def on_revoked(subject: str, payload: bytes) -> None:
        try:
            revocations.apply(messages.decode(Revoked, payload), clock.now_s())
        except msgspec.MsgspecError as error:
            log.warning("revocation.unreadable", subject=subject, error=str(error))

    await bus.subscribe(subjects.REVOKED, on_revoked)


async def start(service: Service, settings: CacheIndexSettings) -> None:
    cluster_key = read_key(settings.cluster_key_file, "cluster key")
    verifier = Verifier(read_public_key(settings.verify_key_file, "verify key"))
    service.waiting_for("the database")
    await make_tables(settings.database_url)
    pool = await make_pool(settings.database_url, name=ROLE, durable=False)
    service.on_stop("pool", pool.close)
    store = open_store(settings.store)
    service.on_stop("store", store.close)
    service.waiting_for("NATS")
    bus = await NatsBus.connect(settings.nats_url, cluster_key, ROLE)
    service.on_stop("bus", bus.close)
    service.require(lambda: None if bus.connected else "NATS is away")

    repository = BlockRepository(pool)
    sweeper = Sweeper(repository, store, service.clock, interval_s=settings.sweep_interval_s)
    handlers = IndexHandlers(repository, verifier.grant, sweeper.discard, service.clock)
    service.metrics.watch_counts(
        "index", "What the index was asked and what it swept.", "what", lambda: counts(handlers, sweeper)
    )
    await hear_revocations(bus, verifier.revocations, service.clock)
    for name, stop in zip(("lookup", "commit", "touch"), await serve(bus, handlers), strict=True):
        service.on_stop(name, stop)
    service.spawn(sweeper.run(), "sweeper")
    service.ready()


def counts(handlers: IndexHandlers, sweeper: Sweeper) -> Mapping[str, float]:
    return {**handlers.counts, **sweeper.counts}


if __name__ == "__main__":
    sys.exit(run(CacheIndexSettings, start))
