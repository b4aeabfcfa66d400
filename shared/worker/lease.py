"""The lease on a delivered request: renewed while the work goes on, by one owned task (design, section 5).

It is a courtesy to the others and no lock: JetStream may deliver again all the same, and only epochs tell who counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from shared.contracts import limits
from shared.contracts.errors import DeepServeError
from shared.contracts.ports import Delivery
from shared.worker.race import stop

log = structlog.get_logger()


@asynccontextmanager
async def lease(delivery: Delivery) -> AsyncIterator[None]:
    """Renews every limits.LEASE_RENEW_S until the block ends; the renewing task never outlives it."""
    task = asyncio.create_task(_renew(delivery), name="lease")
    try:
        yield
    finally:
        await stop(task)


async def _renew(delivery: Delivery) -> None:
    while True:
        await asyncio.sleep(limits.LEASE_RENEW_S)
        try:
            await delivery.in_progress()
        except DeepServeError as error:
            log.warning("lease.unrenewed", subject=delivery.subject, error=error.message)
