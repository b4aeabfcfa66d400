"""Full blocks of running sequences on their way to the store (invariant 6).

A block waits as a reference to its page, which stays in the engine; its bytes are copied out only when one of
limits.BLOCK_WRITES_IN_FLIGHT_MAX slots is free. Computing never waits for a write. A write that fails is a counter:
whoever needed the block computes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import structlog

from shared.contracts import limits
from shared.contracts.errors import BlockMiss, DeepServeError
from shared.contracts.ids import RequestId
from shared.contracts.messages import BlockRef
from shared.contracts.ports import Clock
from shared.worker.breaker import Breaker
from shared.worker.counters import Counters
from shared.worker.engine_loop import EngineLoop

log = structlog.get_logger()

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class Target(Protocol):
    """Where a block goes: the pool or the request's handoff objects."""

    async def store(self, key: bytes, position: int, payload: bytes) -> BlockRef:
        """Durable when this returns, and readable by the reference. Raises an error of the tree."""
        ...


class BlockWriter:
    """One for each worker: bounds what is in flight and what waits, over all its sequences."""

    def __init__(self, engine: EngineLoop, breaker: Breaker, counters: Counters, clock: Clock) -> None:
        self._engine = engine
        self._breaker = breaker
        self._counters = counters
        self._clock = clock
        self._slots = asyncio.Semaphore(limits.BLOCK_WRITES_IN_FLIGHT_MAX)
        self._waiting = 0

    async def write(
        self, request: RequestId, position: int, tokens: int, key: bytes, targets: Sequence[Target]
    ) -> BlockRef | None:
        """Stores the first `tokens` positions of the block at `position` in the first of `targets` that takes it.
        None: none did, or the writer is overrun, or the sequence left the engine."""
        if self._waiting >= limits.BLOCK_WRITES_WAITING_MAX:
            self._counters.add("write.overrun")
            return None
        self._waiting += 1
        try:
            async with self._slots:
                return await self._export_and_store(request, position, tokens, key, targets)
        finally:
            self._waiting -= 1

    async def _export_and_store(
        self, request: RequestId, position: int, tokens: int, key: bytes, targets: Sequence[Target]
    ) -> BlockRef | None:
        payload: bytes | None = None
        for target in targets:
            if not self._breaker.allows(self._clock.monotonic_s()):
                self._counters.add("write.breaker_open")
                return None
            try:
                if payload is None:
                    payload = await self._engine.export(request, position, tokens)
                return await self._store(target, key, position, payload)
            except BlockMiss as error:
                self._counters.add(f"write.{error.reason}")
                return None
            except (DeepServeError, TimeoutError) as error:
                self._counters.add("write.failed")
                log.warning("block.dropped", request=request, position=position, error=str(error))
        return None

    async def _store(self, target: Target, key: bytes, position: int, payload: bytes) -> BlockRef:
        async with asyncio.timeout(limits.BLOCK_WRITE_TIMEOUT_S):
            ref = await target.store(key, position, payload)
        self._counters.add(f"write.{ref.source}")
        return ref


class SequenceWrites:
    """The writes of one sequence: begun as its blocks fill, awaited when their references are needed."""

    def __init__(self, writer: BlockWriter, request: RequestId, block_tokens: int, spawn: Spawn) -> None:
        self._writer = writer
        self._request = request
        self._block_tokens = block_tokens
        self._spawn = spawn
        self._refs: dict[int, BlockRef] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def begin(self, position: int, key: bytes, targets: Sequence[Target], tokens: int | None = None) -> None:
        """`tokens`: fewer than a whole block for a tail. A position is begun once; again changes nothing."""
        if targets and position not in self._tasks:
            self._tasks[position] = self._spawn(self._write(position, tokens or self._block_tokens, key, targets))

    async def wait(self, timeout_s: float) -> None:
        """Until everything that was begun is stored or given up, at most `timeout_s`."""
        if self._tasks:
            await asyncio.wait(set(self._tasks.values()), timeout=timeout_s)

    def ref(self, position: int) -> BlockRef | None:
        """Where the block is stored; None while it is not."""
        return self._refs.get(position)

    def stored(self) -> Sequence[BlockRef]:
        """Everything that this sequence has stored by now."""
        return tuple(self._refs.values())

    async def _write(self, position: int, tokens: int, key: bytes, targets: Sequence[Target]) -> None:
        ref = await self._writer.write(self._request, position, tokens, key, targets)
        if ref is not None:
            self._refs[position] = ref
