"""What every block store promises (contracts.ports.BlockStore): run on each of them alike.

A subclass gives the fixture `store`, an empty store.
"""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from shared.contracts.errors import BlockMiss, DeepServeError
from shared.contracts.ports import BlockStore, ObjectInfo, Space

NAME = "00" * 32 + "-" + "11" * 16
OTHER = "00" * 32 + "-" + "22" * 16


async def listed(store: BlockStore, space: Space) -> dict[str, ObjectInfo]:
    return {info.name: info async for info in store.list(space)}


class StoreSuite:
    """See the module's words."""

    @pytest.fixture
    def store(self) -> BlockStore:
        raise NotImplementedError

    @pytest.mark.parametrize(
        "parts",
        [
            [b"header", b"payload"],
            [b"one"],
            [b"", b"x", b""],
            [memoryview(bytearray(b"abcdef"))[2:4], b"-", memoryview(b"gh")],
            [os.urandom(3), os.urandom(3 * 2**20 + 1)],
        ],
    )
    async def test_what_was_put_is_got_whole(self, store: BlockStore, parts: list[bytes | memoryview]) -> None:
        await store.put("pool", NAME, parts)
        assert await store.get("pool", NAME) == b"".join(parts)

    async def test_what_is_not_there_is_a_miss(self, store: BlockStore) -> None:
        with pytest.raises(BlockMiss) as missed:
            await store.get("pool", NAME)
        assert missed.value.reason == "absent"

    async def test_spaces_are_apart(self, store: BlockStore) -> None:
        await store.put("pool", NAME, [b"pool"])
        await store.put("handoff", NAME, [b"handoff"])
        assert await store.get("pool", NAME) == b"pool"
        await store.delete("pool", NAME)
        assert await store.get("handoff", NAME) == b"handoff"
        assert set(await listed(store, "pool")) == set()
        assert set(await listed(store, "handoff")) == {NAME}

    async def test_deleting_is_idempotent_and_spares_the_others(self, store: BlockStore) -> None:
        await store.put("pool", NAME, [b"1"])
        await store.put("pool", OTHER, [b"2"])
        await store.delete("pool", NAME)
        await store.delete("pool", NAME)
        with pytest.raises(BlockMiss):
            await store.get("pool", NAME)
        assert await store.get("pool", OTHER) == b"2"

    async def test_an_object_can_be_put_again(self, store: BlockStore) -> None:
        for content in (b"a longer first one", b"second"):
            await store.put("pool", NAME, [content])
            assert await store.get("pool", NAME) == content
        await store.delete("pool", NAME)
        await store.put("pool", NAME, [b"third"])
        assert await store.get("pool", NAME) == b"third"

    async def test_all_objects_are_listed_with_size_and_time(self, store: BlockStore) -> None:
        before_s = time.time()
        names = [f"{i:02x}" * 32 + "-" + "11" * 16 for i in range(40)]
        await asyncio.gather(*(store.put("pool", name, [bytes(i + 1)]) for i, name in enumerate(names)))
        found = await listed(store, "pool")
        assert {name: info.object_bytes for name, info in found.items()} == {n: i + 1 for i, n in enumerate(names)}
        assert all(before_s - 2 <= info.stored_at_s <= time.time() + 2 for info in found.values())

    async def test_many_calls_at_once(self, store: BlockStore) -> None:
        names = [f"{i:02x}" * 32 + "-" + "11" * 16 for i in range(48)]
        contents = [os.urandom(50_000) for _ in names]
        await asyncio.gather(*(store.put("pool", n, [c]) for n, c in zip(names, contents, strict=True)))
        assert await asyncio.gather(*(store.get("pool", name) for name in names)) == contents

    @pytest.mark.parametrize("name", ["", ".", "..", "../../etc/passwd", "a/b", "a\0b", "ab\n", "x" * 300])
    async def test_a_name_that_is_none_reaches_nothing(self, store: BlockStore, name: str) -> None:
        for call in (store.get("pool", name), store.put("pool", name, [b"x"]), store.delete("pool", name)):
            with pytest.raises(DeepServeError):
                await call
        assert await listed(store, "pool") == {}
