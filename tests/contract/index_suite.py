"""What the index's rows promise: run on Postgres and in memory alike. A subclass gives the fixture `index`."""

from __future__ import annotations

import pytest

from services.cache_index.repository import BlockRepository, Committer, Put
from shared.contracts.ids import AccountId, NamespaceId, RequestId
from shared.contracts.messages import BlockRef, CommitBlock
from tests.fakes.index_repository import MemoryIndex

NOW = 1_800_000_000.0
HOUR = 3_600.0
MINE, THEIRS = NamespaceId("ns_" + "1" * 32), NamespaceId("ns_" + "2" * 32)
Index = BlockRepository | MemoryIndex


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def put(number: int) -> bytes:
    return number.to_bytes(16, "big")


def block(number: int, put_number: int | None = None, replaces: bytes = b"") -> CommitBlock:
    put_id = put(number if put_number is None else put_number)
    return CommitBlock(
        key=key(number), put_id=put_id, position=number, object_bytes=100, put_at_s=NOW, replaces=replaces
    )


def by(request: str, namespace: NamespaceId = MINE) -> Committer:
    return Committer(namespace, AccountId("acct"), RequestId(request), "chat")


async def found(index: Index, numbers: list[int], now_s: float, request: str = "reader") -> dict[int, bytes]:
    rows = await index.find({MINE: [key(n) for n in numbers]}, now_s, RequestId(request))
    return {n: rows[MINE, key(n)] for n in numbers if (MINE, key(n)) in rows}


class IndexSuite:
    @pytest.fixture
    def index(self) -> Index:
        raise NotImplementedError

    async def test_committed_rows_are_found_by_others_until_they_expire(self, index: Index) -> None:
        holders, replaced = await index.commit(by("writer"), [block(2), block(1)], NOW, NOW + HOUR)
        assert (holders, replaced) == ({key(1): put(1), key(2): put(2)}, [])
        assert await found(index, [1, 2, 3], NOW + HOUR - 1) == {1: put(1), 2: put(2)}
        assert await found(index, [1, 2, 3], NOW, "writer") == {}
        assert await found(index, [1, 2, 3], NOW + HOUR) == {}

    async def test_a_namespace_sees_only_its_own(self, index: Index) -> None:
        await index.commit(by("a", MINE), [block(1, 10)], NOW, NOW + HOUR)
        await index.commit(by("b", THEIRS), [block(1, 20), block(2, 21)], NOW, NOW + HOUR)
        rows = await index.find({MINE: [key(1), key(2)], THEIRS: [key(1)]}, NOW, RequestId("reader"))
        assert rows == {(MINE, key(1)): put(10), (THEIRS, key(1)): put(20)}

    async def test_the_first_commit_of_a_key_wins_and_repeats_change_nothing(self, index: Index) -> None:
        await index.commit(by("first"), [block(1, 10)], NOW, NOW + HOUR)
        holders, replaced = await index.commit(by("second"), [block(1, 11), block(2, 12)], NOW + 1, NOW + 2 * HOUR)
        assert (holders, replaced) == ({key(1): put(10), key(2): put(12)}, [])
        again, _ = await index.commit(by("first"), [block(1, 10)], NOW + 2, NOW + 3 * HOUR)
        assert again == {key(1): put(10)}
        assert await found(index, [1], NOW + HOUR) == {}

    async def test_an_expired_row_is_replaced_and_its_object_named(self, index: Index) -> None:
        await index.commit(by("old"), [block(1, 10), block(2, 20)], NOW, NOW + HOUR)
        holders, replaced = await index.commit(by("new"), [block(1, 11)], NOW + HOUR, NOW + 2 * HOUR)
        assert holders == {key(1): put(11)}
        assert replaced == [Put(key(1), put(10))]
        assert await found(index, [1, 2], NOW + HOUR) == {1: put(11)}

    async def test_a_block_replaces_the_put_that_it_names_and_its_object_is_named(self, index: Index) -> None:
        await index.commit(by("old"), [block(1, 10), block(2, 20), block(3, 30)], NOW, NOW + HOUR)
        mended = [block(1, 11, put(10)), block(2, 21), block(4, 41, put(40))]
        holders, replaced = await index.commit(by("new"), mended, NOW + 1, NOW + 2 * HOUR)
        assert holders == {key(1): put(11), key(2): put(20), key(4): put(41)}
        assert replaced == [Put(key(1), put(10))]
        assert await found(index, [1, 2, 3, 4], NOW + 1) == {1: put(11), 2: put(20), 3: put(30), 4: put(41)}
        assert await found(index, [1, 4], NOW + 1, "new") == {}
        assert await found(index, [1, 2], NOW + 2 * HOUR - 1) == {1: put(11)}

    async def test_a_row_that_was_mended_before_is_not_replaced_again(self, index: Index) -> None:
        await index.commit(by("old"), [block(1, 10), block(2, 20)], NOW, NOW + HOUR)
        first, second = block(1, 11, put(10)), block(1, 12, put(10))
        await index.commit(by("first"), [first], NOW, NOW + HOUR)
        for late in (second, first, block(1, 13, put(20))):
            holders, replaced = await index.commit(by("late"), [late], NOW + 1, NOW + 2 * HOUR)
            assert (holders, replaced) == ({key(1): put(11)}, [])
        assert await found(index, [1, 2], NOW) == {1: put(11), 2: put(20)}
        assert await found(index, [1, 2], NOW + HOUR) == {}

    async def test_an_expired_row_is_replaced_whatever_put_is_named(self, index: Index) -> None:
        await index.commit(by("old"), [block(1, 10), block(2, 20)], NOW, NOW + HOUR)
        mended = [block(1, 11, put(10)), block(2, 21, put(99))]
        holders, replaced = await index.commit(by("new"), mended, NOW + HOUR, NOW + 2 * HOUR)
        assert holders == {key(1): put(11), key(2): put(21)}
        assert sorted(p.put_id for p in replaced) == [put(10), put(20)]

    async def test_another_namespaces_put_is_not_replaced(self, index: Index) -> None:
        await index.commit(by("a", MINE), [block(1, 10)], NOW, NOW + HOUR)
        holders, replaced = await index.commit(by("b", THEIRS), [block(1, 11, put(10))], NOW, NOW + HOUR)
        assert (holders, replaced) == ({key(1): put(11)}, [])
        assert await found(index, [1], NOW) == {1: put(10)}

    async def test_a_touch_extends_and_never_shortens(self, index: Index) -> None:
        await index.commit(by("w"), [block(1), block(2)], NOW, NOW + HOUR)
        refs = [BlockRef(source="pool", namespace=MINE, key=key(n), put_id=put(n)) for n in (1, 3)]
        await index.touch(refs, NOW + 60, NOW + 2 * HOUR, NOW + 2 * HOUR - 240)
        assert await found(index, [1, 2], NOW + HOUR) == {1: put(1)}
        await index.touch(refs, NOW + 120, NOW + HOUR, NOW + 3 * HOUR)
        assert await found(index, [1], NOW + 2 * HOUR - 1) == {1: put(1)}

    async def test_a_touch_that_gains_too_little_or_comes_too_late_changes_nothing(self, index: Index) -> None:
        await index.commit(by("w"), [block(1)], NOW, NOW + HOUR)
        ref = BlockRef(source="pool", namespace=MINE, key=key(1), put_id=put(1))
        await index.touch([ref], NOW + 60, NOW + HOUR + 60, NOW + HOUR)
        await index.touch([ref], NOW + HOUR, NOW + 2 * HOUR, NOW + 2 * HOUR)
        assert await found(index, [1], NOW + HOUR) == {}

    async def test_expired_rows_are_taken_oldest_first_within_a_bound(self, index: Index) -> None:
        for number, life in ((1, 3), (2, 1), (3, 2), (4, 9)):
            await index.commit(by(f"w{number}"), [block(number)], NOW, NOW + life * HOUR)
        taken = await index.take_expired(NOW + 3 * HOUR, 2)
        assert sorted(p.put_id for p in taken) == [put(2), put(3)]
        assert await index.take_expired(NOW + 3 * HOUR, 2) == [Put(key(1), put(1))]
        assert await index.take_expired(NOW + 3 * HOUR, 2) == []
        assert await found(index, [1, 2, 3, 4], NOW) == {4: put(4)}
