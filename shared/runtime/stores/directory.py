"""The block store in a local directory: the embedded default (contracts.ports.BlockStore).

    ROOT/pool/ab/ab…-…      objects, sharded by the first two characters of their names
    ROOT/handoff/ab/ab…-…
    ROOT/temporary/…        writes under way; never read, swept by age

A write is whole or absent: temporary file, fsync, atomic rename, fsync of the folder. Files block, so all of it runs in
a bounded pool of threads; a thread that hangs on a dead disk costs its place, and the bound then refuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import structlog

from shared.contracts import limits
from shared.contracts.errors import BlockMiss, DeadlineExceeded, InternalError, Overloaded, SettingsError
from shared.contracts.ports import ObjectInfo, Space

_log = structlog.get_logger()
T = TypeVar("T")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{1,199}", re.ASCII)
_TEMPORARY: Final = "temporary"


class DirectoryStore:
    """Implements `ports.BlockStore`. Several processes may share one directory. Made by `open_directory`."""

    def __init__(self, root: Path, *, free_bytes_min: int = limits.STORE_FREE_BYTES_MIN) -> None:
        self._root = root
        self._free_bytes_min = free_bytes_min
        self._threads = ThreadPoolExecutor(limits.STORE_THREADS, thread_name_prefix="store")
        self._running: set[Future[Any]] = set()

    async def put(self, space: Space, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """Raises Overloaded (no space, too much under way, a disk that fails), DeadlineExceeded."""
        path = self._path(space, name)
        try:
            await self._call(lambda: self._write(path, parts), limits.BLOCK_WRITE_TIMEOUT_S)
        except TimeoutError as error:
            raise DeadlineExceeded("the store did not write in time") from error
        except OSError as error:
            raise Overloaded(f"the store cannot write: {error.strerror or error}") from error

    async def get(self, space: Space, name: str) -> bytes:
        """Raises BlockMiss(absent | late | unreachable)."""
        path = self._path(space, name)
        try:
            return await self._call(lambda: _read(path), limits.BLOCK_READ_TIMEOUT_S)
        except TimeoutError as error:
            raise BlockMiss("late", "the store did not read in time") from error
        except FileNotFoundError as error:
            raise BlockMiss("absent", "no such object") from error
        except (OSError, Overloaded) as error:
            raise BlockMiss("unreachable", f"the store cannot read: {error}") from error

    async def delete(self, space: Space, name: str) -> None:
        """Raises Overloaded, DeadlineExceeded."""
        path = self._path(space, name)
        try:
            await self._call(lambda: path.unlink(missing_ok=True), limits.BLOCK_WRITE_TIMEOUT_S)
        except TimeoutError as error:
            raise DeadlineExceeded("the store did not delete in time") from error
        except OSError as error:
            raise Overloaded(f"the store cannot delete: {error.strerror or error}") from error

    async def list(self, space: Space) -> AsyncIterator[ObjectInfo]:
        """In no order; what is written or deleted meanwhile may be there or not. Raises Overloaded."""
        try:
            for shard in await self._call(lambda: _shards(self._root / space), limits.BLOCK_WRITE_TIMEOUT_S):
                folder = self._root / space / shard
                for info in await self._call(functools.partial(_scan, folder), limits.BLOCK_WRITE_TIMEOUT_S):
                    yield info
        except (OSError, TimeoutError) as error:
            raise Overloaded(f"the store cannot list: {error}") from error

    async def close(self) -> None:
        """Waits for what runs; what has not begun is given up."""
        await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)

    def _path(self, space: Space, name: str) -> Path:
        if space not in get_args(Space) or not _NAME.fullmatch(name):
            raise InternalError(f"no object can be named {name!r} in {space!r}")
        return self._root / space / name[:2] / name

    async def _call(self, work: Callable[[], T], timeout_s: float) -> T:
        """In a thread. A call counts until its thread is done with it, also when nobody waits for it any more."""
        if len(self._running) >= limits.STORE_QUEUE_MAX:
            raise Overloaded("too many operations wait for the store")
        try:
            running = self._threads.submit(work)
        except RuntimeError as error:
            raise Overloaded("the store is closed") from error
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(running)

    def _write(self, path: Path, parts: Sequence[bytes | memoryview]) -> None:
        """Where somebody removed the store's folders meanwhile, they are made again, once."""
        try:
            self._write_into(path, parts)
        except FileNotFoundError:
            _make_folders(self._root)
            _log.warning("folders.made")
            self._write_into(path, parts)

    def _write_into(self, path: Path, parts: Sequence[bytes | memoryview]) -> None:
        space = os.statvfs(self._root)
        if space.f_bavail * space.f_frsize < self._free_bytes_min:
            raise Overloaded(f"less than {self._free_bytes_min} bytes are free in the block store")
        fresh = self._root / _TEMPORARY / secrets.token_hex(16)
        try:
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                _write_all(descriptor, parts)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            _move(fresh, path)
        except BaseException:
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            raise


def open_directory(root: Path) -> DirectoryStore:
    """The store over `root`, which is created where it is missing; sweeps what crashed writers left.

    Raises SettingsError when the directory cannot be used.
    """
    try:
        _make_folders(root)
        _sweep(root / _TEMPORARY, time.time() - limits.STORE_TEMPORARY_AGE_S)
    except OSError as error:
        raise SettingsError(f"cannot use {root} as block store: {error.strerror or error}") from error
    return DirectoryStore(root)


def _make_folders(root: Path) -> None:
    """What is missing of the store's folders, durably."""
    for folder in (root, *(root / space for space in get_args(Space)), root / _TEMPORARY):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _sync(folder.parent)


def _sweep(folder: Path, older_than_s: float) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.stat().st_mtime < older_than_s:
                    os.unlink(entry.path)
                    _log.info("write.swept", name=entry.name)


def _write_all(descriptor: int, parts: Sequence[bytes | memoryview]) -> None:
    """All parts without joining them: a block is a megabyte or more."""
    left = [memoryview(part).cast("B") for part in parts if len(part)]
    while left:
        written = os.writev(descriptor, left)
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]


def _move(fresh: Path, path: Path) -> None:
    """Puts a written file into its place, durably."""
    try:
        fresh.rename(path)
    except FileNotFoundError:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _sync(path.parent.parent)
        fresh.rename(path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        if size > limits.OBJECT_BYTES_MAX:
            raise BlockMiss("foreign", f"a file of {size} bytes is no object")
        data = os.read(descriptor, size)
        while len(data) < size and (more := os.pread(descriptor, size - len(data), len(data))):
            data += more
        return data
    finally:
        os.close(descriptor)


def _shards(space: Path) -> list[str]:
    """Empty where the folder is gone: it is made again by the next write."""
    try:
        return os.listdir(space)
    except FileNotFoundError:
        return []


def _scan(shard: Path) -> list[ObjectInfo]:
    found: list[ObjectInfo] = []
    try:
        entries = os.scandir(shard)
    except FileNotFoundError:
        return found
    with entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                found.append(ObjectInfo(name=entry.name, object_bytes=status.st_size, stored_at_s=status.st_mtime))
    return found
