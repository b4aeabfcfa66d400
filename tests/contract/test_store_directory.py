"""The suite of the block store on a local directory, and what only a directory can suffer."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import stat
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.contracts import limits
from shared.contracts.errors import BlockMiss, DeadlineExceeded, Overloaded, SettingsError
from shared.runtime.stores import directory
from shared.runtime.stores.directory import DirectoryStore, open_directory
from shared.runtime.stores.open import open_store
from tests.contract.store_suite import NAME, OTHER, StoreSuite


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[DirectoryStore]:
    store = open_directory(tmp_path / "store")
    yield store
    await store.close()


class TestDirectoryStore(StoreSuite):
    @pytest.fixture
    def store(self, store: DirectoryStore) -> DirectoryStore:
        return store


def files(root: Path) -> list[Path]:
    return sorted(path.relative_to(root) for path in root.rglob("*") if path.is_file())


async def test_objects_lie_in_shards_and_nobody_else_may_read_them(store: DirectoryStore, tmp_path: Path) -> None:
    await store.put("pool", NAME, [b"x"])
    root = tmp_path / "store"
    assert files(root) == [Path("pool") / "00" / NAME]
    for path, mode in ((root / "pool" / "00" / NAME, 0o600), (root / "pool" / "00", 0o700), (root, 0o700)):
        assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.parametrize("lost", ["store", "store/pool", "store/pool/00", "store/temporary"])
async def test_folders_that_were_removed_meanwhile_are_made_again(
    store: DirectoryStore, tmp_path: Path, lost: str
) -> None:
    await store.put("pool", NAME, [b"before"])
    shutil.rmtree(tmp_path / lost)
    left = [] if lost != "store/temporary" else [NAME]
    assert [info.name async for info in store.list("pool")] == left
    await asyncio.gather(*(store.put("pool", name, [b"after"]) for name in (NAME, OTHER)))
    assert [await store.get("pool", name) for name in (NAME, OTHER)] == [b"after"] * 2
    assert stat.S_IMODE((tmp_path / "store" / "pool").stat().st_mode) == 0o700


async def test_objects_outlive_the_store_and_are_shared(store: DirectoryStore, tmp_path: Path) -> None:
    await store.put("handoff", NAME, [b"kept"])
    other = open_store(f"dir:{tmp_path / 'store'}")
    assert await other.get("handoff", NAME) == b"kept"
    await other.close()


async def test_a_write_is_on_the_disk_before_it_has_its_name(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def see_fsync(descriptor: int) -> None:
        order.append("sync folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "sync file")
        fsync(descriptor)

    def see_rename(self: Path, target: Path) -> Path:
        moved = rename(self, target)
        order.append("rename")
        return moved

    await store.put("pool", NAME, [b"makes the shard"])
    monkeypatch.setattr(os, "fsync", see_fsync)
    monkeypatch.setattr(Path, "rename", see_rename)
    await store.put("pool", OTHER, [b"x"])
    assert order == ["sync file", "rename", "sync folder"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
async def test_a_write_that_fails_leaves_nothing(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(descriptor: int, parts: object) -> int:
        os.write(descriptor, b"half")
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "writev", fail)
    with pytest.raises(Overloaded):
        await store.put("pool", NAME, [b"whole"])
    assert files(tmp_path / "store") == []


async def test_short_writes_are_continued(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    writev = os.writev

    def three_bytes(descriptor: int, parts: list[memoryview]) -> int:
        return writev(descriptor, [parts[0][:3]])

    monkeypatch.setattr(os, "writev", three_bytes)
    await store.put("pool", NAME, [b"abcde", b"", b"fghij", b"k"])
    assert await store.get("pool", NAME) == b"abcdefghijk"


async def test_a_full_disk_is_left_room(tmp_path: Path) -> None:
    open_directory(tmp_path)
    store = DirectoryStore(tmp_path, free_bytes_min=2**62)
    with pytest.raises(Overloaded, match="free"):
        await store.put("pool", NAME, [b"x"])
    await store.close()


class Stuck:
    """Stands in for a call into a disk that does not answer until it is let go."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.let_go = threading.Event()

    def __call__(self, *arguments: object) -> bytes:
        self.entered.release()
        self.let_go.wait(30)
        return b""


async def test_a_disk_that_hangs_is_late_and_then_unreachable_while_the_loop_goes_on(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Stuck()
    monkeypatch.setattr(directory, "_read", stuck)
    monkeypatch.setattr(directory, "_write_all", stuck)
    monkeypatch.setattr(limits, "BLOCK_READ_TIMEOUT_S", 0.05)
    monkeypatch.setattr(limits, "BLOCK_WRITE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(limits, "STORE_QUEUE_MAX", 4)
    try:
        with pytest.raises(DeadlineExceeded):
            await store.put("pool", NAME, [b"x"])
        for reason in ("late", "late", "late", "unreachable", "unreachable"):
            began_s = time.monotonic()
            with pytest.raises(BlockMiss) as missed:
                await store.get("pool", NAME)
            assert missed.value.reason == reason
            assert time.monotonic() - began_s < 1
        with pytest.raises(Overloaded):
            await store.delete("pool", NAME)
    finally:
        stuck.let_go.set()


async def test_calls_that_nobody_waits_for_any_more_give_their_place_back(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Stuck()
    monkeypatch.setattr(limits, "STORE_QUEUE_MAX", 1)
    with monkeypatch.context() as patched:
        patched.setattr(directory, "_read", stuck)
        reading = asyncio.create_task(store.get("pool", NAME))
        assert await asyncio.to_thread(stuck.entered.acquire, timeout=10)
        reading.cancel()
        await asyncio.wait({reading})
        with pytest.raises(BlockMiss, match="too many"):
            await store.get("pool", NAME)
        stuck.let_go.set()
    async with asyncio.timeout(10):
        reason = "unreachable"
        while reason == "unreachable":
            with pytest.raises(BlockMiss) as missed:
                await store.get("pool", NAME)
            reason = missed.value.reason
    assert reason == "absent"


async def test_a_file_that_cannot_be_an_object_is_no_object(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "OBJECT_BYTES_MAX", 10)
    await store.put("pool", NAME, [b"elevenbytes"])
    with pytest.raises(BlockMiss) as missed:
        await store.get("pool", NAME)
    assert missed.value.reason == "foreign"


async def test_what_crashed_writers_left_is_swept_by_age(store: DirectoryStore, tmp_path: Path) -> None:
    temporary = tmp_path / "store" / "temporary"
    (temporary / "old").write_bytes(b"half")
    (temporary / "new").write_bytes(b"half")
    long_ago_s = time.time() - limits.STORE_TEMPORARY_AGE_S - 10
    os.utime(temporary / "old", (long_ago_s, long_ago_s))
    await open_directory(tmp_path / "store").close()
    assert files(tmp_path / "store") == [Path("temporary") / "new"]
    assert [info async for info in store.list("pool")] == []


async def test_a_closed_store_refuses(store: DirectoryStore) -> None:
    await store.close()
    await store.close()
    with pytest.raises(Overloaded):
        await store.put("pool", NAME, [b"x"])


def test_a_directory_that_cannot_be_used_is_a_settings_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SettingsError, match="file"):
        open_store(f"dir:{tmp_path / 'file'}")
    with pytest.raises(SettingsError, match="dir:PATH"):
        open_store("s3:bucket")
