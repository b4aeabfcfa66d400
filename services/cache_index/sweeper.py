"""Frees the space of expired blocks and of handoff objects that no request can want any more.

Expiry itself is enforced at lookup; the sweeper only deletes, in bounded batches, and in the order that makes a crash
harmless: the row first, then the object. An object whose deletion failed is an orphan, found by its age later.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import structlog

from services.cache_index import policy
from services.cache_index.repository import BlockRepository, Put
from shared.contracts import limits
from shared.contracts.block import object_name
from shared.contracts.errors import DeepServeError
from shared.contracts.ports import BlockStore, Clock, Space

log = structlog.get_logger()


class Sweeper:
    """Run by one owned task; each sweep is bounded, so that a great backlog cannot starve lookups."""

    def __init__(self, repository: BlockRepository, store: BlockStore, clock: Clock, *, interval_s: float) -> None:
        self.counts: Counter[str] = Counter()
        self._interval_s = interval_s
        self._repository = repository
        self._store = store
        self._clock = clock

    async def run(self) -> None:
        """Sweeps until cancelled."""
        handoffs_due_s = self._clock.monotonic_s()
        while True:
            try:
                await self.sweep_rows()
                if self._clock.monotonic_s() >= handoffs_due_s:
                    await self.sweep_handoffs()
                    handoffs_due_s = self._clock.monotonic_s() + limits.HANDOFF_SWEEP_INTERVAL_S
            except DeepServeError as error:
                log.warning("sweep.failed", error=error.message)
            await asyncio.sleep(self._interval_s)

    async def sweep_rows(self) -> int:
        """Deletes expired rows and their objects; returns how many rows."""
        swept = 0
        for _ in range(limits.SWEEP_BATCHES_MAX):
            batch = await self._repository.take_expired(self._clock.now_s(), limits.SWEEP_BATCH_ROWS)
            await self.discard(batch)
            swept += len(batch)
            if len(batch) < limits.SWEEP_BATCH_ROWS:
                break
        if swept:
            log.info("blocks.swept", rows=swept)
        return swept

    async def sweep_handoffs(self) -> int:
        """Deletes handoff objects past their age; returns how many."""
        swept = 0
        async for found in self._store.list("handoff"):
            if policy.handoff_outlived(found.stored_at_s, self._clock.now_s()):
                swept += await self._delete("handoff", found.name)
        if swept:
            log.info("handoffs.swept", objects=swept)
        return swept

    async def discard(self, puts: Sequence[Put]) -> None:
        """Deletes objects whose rows are gone; one that cannot be deleted now is left as an orphan."""
        for put in puts:
            await self._delete("pool", object_name(put.key, put.put_id))

    async def _delete(self, space: Space, name: str) -> bool:
        try:
            await self._store.delete(space, name)
        except DeepServeError as error:
            log.warning("object.left", space=space, error=error.message)
            self.counts[f"sweep.{space}_left"] += 1
            return False
        self.counts[f"sweep.{space}_deleted"] += 1
        return True
