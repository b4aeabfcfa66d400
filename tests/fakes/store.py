"""The block store in memory: one `MemoryDisk` for all, one `MemoryStore` for each process (contracts.ports.BlockStore).

The disk outlives every process. A put whose caller dies may or may not appear, whole; hooks make objects torn, lost,
missing, slow or refused.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from shared.contracts import limits
from shared.contracts.errors import BlockMiss, DeadlineExceeded, DeepServeError, InternalError, Overloaded
from shared.contracts.ports import ObjectInfo, Space
from tests.fakes.wire import CALM, Link, Wire, resolve, within
from tests.sim import process

Operation = Literal["put", "get", "delete"]
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{1,199}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Fate:
    """What befalls one operation. `error` is raised after `applied` was decided; `damage` changes the bytes that are
    stored (put) or returned (get)."""

    delay_s: float = 0.0
    applied: bool = True
    error: DeepServeError | None = None
    damage: Callable[[bytes], bytes] | None = None


FINE: Final = Fate()


def torn(data: bytes) -> bytes:
    """The first half."""
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    """One bit is another."""
    return data[:-1] + bytes([data[-1] ^ 1])


class MemoryDisk:
    """`fate` is asked at each operation."""

    def __init__(self, now_s: Callable[[], float], *, wire: Wire = CALM) -> None:
        self.objects: dict[tuple[Space, str], tuple[bytes, float]] = {}
        self.fate: Callable[[Operation, Space, str], Fate] = lambda operation, space, name: FINE
        self.up = True
        self.wire = wire
        self._now_s = now_s

    def names(self, space: Space) -> list[str]:
        return sorted(name for kept, name in self.objects if kept == space)

    def write(self, space: Space, name: str, data: bytes) -> None:
        self.objects[space, name] = (data, self._now_s())

    def connect(self) -> MemoryStore:
        return MemoryStore(self)


class MemoryStore:
    """`contracts.ports.BlockStore` of one process."""

    def __init__(self, disk: MemoryDisk) -> None:
        self._disk = disk
        self._closed = False

    async def put(self, space: Space, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """Durable and whole, or absent. Raises Overloaded, DeadlineExceeded; then the object may still appear."""
        data = b"".join(parts)
        fate = self._disk.fate("put", space, name)

        def write() -> None:
            self._disk.write(space, name, data if fate.damage is None else fate.damage(data))

        await self._call(space, name, write, fate, limits.BLOCK_WRITE_TIMEOUT_S)

    async def get(self, space: Space, name: str) -> bytes:
        """Raises BlockMiss(absent | late | unreachable)."""
        fate = self._disk.fate("get", space, name)
        found: list[bytes] = []

        def read() -> None:
            kept = self._disk.objects.get((space, name))
            if kept is not None:
                found.append(kept[0] if fate.damage is None else fate.damage(kept[0]))

        try:
            await self._call(space, name, read, fate, limits.BLOCK_READ_TIMEOUT_S)
        except DeadlineExceeded as error:
            raise BlockMiss("late", error.message) from error
        except Overloaded as error:
            raise BlockMiss("unreachable", error.message) from error
        if not found:
            raise BlockMiss("absent", f"no object {name}")
        return found[0]

    async def delete(self, space: Space, name: str) -> None:
        """Idempotent. Raises Overloaded, DeadlineExceeded."""
        fate = self._disk.fate("delete", space, name)
        forget = self._disk.objects.pop
        await self._call(space, name, lambda: forget((space, name), None), fate, limits.BLOCK_WRITE_TIMEOUT_S)

    async def list(self, space: Space) -> AsyncIterator[ObjectInfo]:
        process.check_alive()
        if self._closed or not self._disk.up:
            raise Overloaded("the store is away")
        for name in self._disk.names(space):
            kept = self._disk.objects.get((space, name))
            if kept is not None:
                yield ObjectInfo(name=name, object_bytes=len(kept[0]), stored_at_s=kept[1])
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Idempotent."""
        self._closed = True

    async def _call(self, space: Space, name: str, effect: Callable[[], object], fate: Fate, timeout_s: float) -> None:
        """The effect happens at the disk while the caller waits, or after it died. Raises Overloaded,
        DeadlineExceeded, InternalError for what is no name."""
        process.check_alive()
        if space not in get_args(Space) or not _NAME.fullmatch(name):
            raise InternalError(f"no object can be named {name!r} in {space!r}")
        if self._closed:
            raise Overloaded("the store is closed")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def act() -> None:
            if not self._disk.up:
                return
            if fate.applied:
                effect()
            for delay_s in self._disk.wire.legs("answer", name):
                Link().carry(delay_s, resolve, done, None)

        for delay_s in self._disk.wire.legs("call", name):
            Link().carry(delay_s + fate.delay_s, act)
        await within(timeout_s, done, "the store did not answer")
        if fate.error is not None:
            raise fate.error
