"""The blocks of a prefix, read all at once (design, section 4: anything wrong with a block is a miss).

Reading n blocks may take limits.BLOCK_READ_BASE_S + n · limits.BLOCK_READ_EACH_S; what has not arrived by then is
computed. Only the run from the first block is of use, so that the first miss ends the reads behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from shared.contracts import limits
from shared.contracts.errors import BlockMiss
from shared.contracts.messages import BlockRef
from shared.contracts.ports import Clock
from shared.worker.breaker import Breaker
from shared.worker.counters import Counters
from shared.worker.objects import BlockObjects

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block to read: where it is, the secret that opens it, the size that its payload must have."""

    ref: BlockRef
    secret: bytes
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """`payloads`: of the blocks from the first on, up to the first miss. `missed`: index → reason, where reads
    failed. `intact`: indices of all that were read, those behind the first miss too."""

    payloads: list[bytes]
    missed: Mapping[int, str]
    intact: frozenset[int] = frozenset()


class BlockReader:
    """Bounds the reads in flight over all requests of a worker."""

    def __init__(self, objects: BlockObjects, breaker: Breaker, counters: Counters, clock: Clock) -> None:
        self._objects = objects
        self._breaker = breaker
        self._counters = counters
        self._clock = clock
        self._slots = asyncio.Semaphore(limits.BLOCK_READS_IN_FLIGHT_MAX)

    async def read(self, wanted: Sequence[Wanted]) -> Run:
        """Never raises for a block: a miss shortens the run and is counted by its reason."""
        if not wanted:
            return Run([], {})
        if not self._breaker.allows(self._clock.monotonic_s()):
            self._counters.add("miss.breaker_open", len(wanted))
            return Run([], {})
        payloads: dict[int, bytes] = {}
        missed: dict[int, str] = {}
        tasks = [asyncio.ensure_future(self._read(i, w, payloads, missed)) for i, w in enumerate(wanted)]
        try:
            await self._until_known(tasks, missed)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        return self._run(len(wanted), payloads, missed)

    async def _until_known(self, tasks: Sequence[asyncio.Task[None]], missed: Mapping[int, str]) -> None:
        """Waits until every block before the first miss is there, or the time is over."""
        count = len(tasks)
        deadline_s = self._clock.monotonic_s() + limits.BLOCK_READ_BASE_S + count * limits.BLOCK_READ_EACH_S
        for index, task in enumerate(tasks):
            left_s = deadline_s - self._clock.monotonic_s()
            if not task.done():
                await asyncio.wait({task}, timeout=max(left_s, 0.0))
            if index in missed or not task.done():
                return

    async def _read(self, index: int, wanted: Wanted, payloads: dict[int, bytes], missed: dict[int, str]) -> None:
        async with self._slots:
            try:
                payloads[index] = await self._objects.get(wanted.ref, wanted.secret, wanted.payload_bytes)
            except BlockMiss as miss:
                missed[index] = miss.reason

    def _run(self, count: int, payloads: Mapping[int, bytes], missed: Mapping[int, str]) -> Run:
        length = next((i for i in range(count) if i not in payloads), count)
        if length < count and length not in missed:
            missed = {**missed, length: "late"}
            self._breaker.failed(self._clock.monotonic_s())
        for reason in missed.values():
            self._counters.add(f"miss.{reason}")
        if missed:
            log.warning("blocks.missed", wanted=count, read=length, reasons=sorted(set(missed.values())))
        return Run([payloads[i] for i in range(length)], missed, frozenset(payloads))
