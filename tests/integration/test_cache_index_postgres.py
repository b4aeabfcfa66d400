"""The index's SQL and rights on a real Postgres: who wins, what expires, what a touch gains, what is swept."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import asyncpg
import msgspec
import pytest
from nacl.signing import SigningKey

from services.cache_index.handlers import IndexHandlers
from services.cache_index.repository import BlockRepository
from services.cache_index.schema import make_tables
from services.cache_index.sweeper import Sweeper
from shared.contracts import limits
from shared.contracts.block import object_name
from shared.contracts.errors import AuthenticationFailed, ClaimRefused, InvalidRequest, Overloaded
from shared.contracts.ids import AccountId, GrantId, HoldId, KeyId, NamespaceId, RequestId
from shared.contracts.messages import BlockRef, Chain, Commit, CommitBlock, Lookup, Touch
from shared.contracts.tag import GrantClaims
from shared.runtime import signing
from shared.runtime.database import make_pool
from tests.fakes.store import Fate, MemoryDisk

pytestmark = pytest.mark.servers

OWN = NamespaceId("ns_" + "a" * 32)
OTHER = NamespaceId("ns_" + "b" * 32)
SHARED = NamespaceId("ns_" + "c" * 32)
START_S = 1_800_000_000.0
DAY_S = 86_400


class SetClock:
    """Shows what a test sets."""

    def __init__(self) -> None:
        self.at_s = START_S

    def now_s(self) -> float:
        return self.at_s

    def monotonic_s(self) -> float:
        return self.at_s


def key(i: int) -> bytes:
    return i.to_bytes(32, "big")


def block(i: int, put_at_s: float = START_S, put_id: bytes | None = None) -> CommitBlock:
    return CommitBlock(key=key(i), put_id=put_id or os.urandom(16), position=i, object_bytes=1_000, put_at_s=put_at_s)


@dataclass
class Index:
    pool: asyncpg.Pool[Any]
    disk: MemoryDisk
    clock: SetClock
    handlers: IndexHandlers
    sweeper: Sweeper
    signing_key: bytes

    def grant(self, request: str, namespace: NamespaceId = OWN, **changes: Any) -> str:
        claims: dict[str, Any] = {
            "grant_id": GrantId("g"),
            "request": RequestId(request),
            "hold": HoldId("h"),
            "account": AccountId("acc"),
            "key_id": KeyId("k"),
            "model": "m",
            "namespace": namespace,
            "shared": (SHARED,),
            "cache_read": True,
            "cache_write": True,
            "traffic_class": "agent",
            "retention_s": 3 * DAY_S,
            "prompt_tokens": 10,
            "max_output_tokens": 10,
            "issued_at_s": START_S,
            "deadline_s": START_S + 30 * DAY_S,
        }
        return signing.sign(GrantClaims(**claims | changes), self.signing_key)

    async def commit(self, grant: str, *blocks: CommitBlock) -> tuple[bytes, ...]:
        return (await self.handlers.commit(Commit(grant=grant, blocks=blocks))).put_ids

    async def lookup(self, request: str, count: int, namespace: NamespaceId = OWN, **changes: Any) -> list[bytes]:
        """Put ids of the run."""
        chains = tuple(Chain(namespace=n, keys=b"".join(map(key, range(count)))) for n in (namespace, SHARED))
        message = Lookup(grant=self.grant(request, namespace, **changes), request=RequestId(request), chains=chains)
        return [ref.put_id for ref in (await self.handlers.lookup(message)).blocks]

    async def expiry_s(self, i: int) -> float:
        found = await self.pool.fetchval("SELECT expires_at FROM cache_index.blocks WHERE key = $1", key(i))
        return float(found.timestamp())


@pytest.fixture
async def index(fresh_database: str) -> AsyncIterator[Index]:
    await asyncio.gather(make_tables(fresh_database), make_tables(fresh_database))
    pool = await make_pool(fresh_database, name="test", durable=False)
    clock, seed = SetClock(), os.urandom(32)
    disk = MemoryDisk(clock.now_s)
    repository = BlockRepository(pool)
    sweeper = Sweeper(repository, disk.connect(), clock, interval_s=1.0)
    verifier = signing.Verifier(bytes(SigningKey(seed).verify_key))
    yield Index(pool, disk, clock, IndexHandlers(repository, verifier.grant, sweeper.discard, clock), sweeper, seed)
    await pool.close()


async def test_the_first_commit_of_a_key_wins_and_a_retry_changes_nothing(index: Index) -> None:
    first, second = block(0), block(0)
    assert await index.commit(index.grant("r1"), first) == (first.put_id,)
    assert await index.commit(index.grant("r1"), first) == (first.put_id,)
    assert await index.commit(index.grant("r2"), second) == (first.put_id,)
    assert await index.lookup("r3", 1) == [first.put_id]
    assert index.handlers.counts["commit.lost"] == 1


async def test_concurrent_commits_of_one_prefix_have_one_winner_a_block_and_no_deadlock(index: Index) -> None:
    tries = [[block(i) for i in range(40)] for _ in range(6)]
    tries[1::2] = [list(reversed(blocks)) for blocks in tries[1::2]]
    replies = await asyncio.gather(*(index.commit(index.grant(f"r{n}"), *blocks) for n, blocks in enumerate(tries)))
    winners = [
        {one.key: held for one, held in zip(blocks, reply, strict=True)}
        for blocks, reply in zip(tries, replies, strict=True)
    ]
    assert all(winner == winners[0] for winner in winners)
    assert await index.lookup("x", 40) == [winners[0][key(i)] for i in range(40)]


async def test_rows_of_the_asking_request_itself_do_not_count(index: Index) -> None:
    mine, theirs = block(0), block(1)
    await index.commit(index.grant("r1"), mine)
    await index.commit(index.grant("r2"), theirs)
    assert await index.lookup("r1", 2) == []
    assert await index.lookup("r2", 2) == [mine.put_id]
    assert await index.lookup("r3", 2) == [mine.put_id, theirs.put_id]


async def test_a_long_run_is_found_across_stretches_up_to_its_gap(index: Index) -> None:
    blocks = [block(i) for i in range(300) if i != 250]
    await index.commit(index.grant("r1"), *blocks)
    assert await index.lookup("r2", 300) == [b.put_id for b in blocks[:250]]


async def test_expiry_counts_at_lookup_and_an_expired_row_is_replaced_with_its_object(index: Index) -> None:
    old, new = block(0), block(0)
    index.disk.write("pool", object_name(old.key, old.put_id), b"x")
    await index.commit(index.grant("r1"), old)
    index.clock.at_s = START_S + 3 * DAY_S - 1
    assert await index.lookup("r2", 1) == [old.put_id]
    index.clock.at_s = START_S + 3 * DAY_S
    assert await index.lookup("r2", 1) == []
    renewed = CommitBlock(key=new.key, put_id=new.put_id, position=0, object_bytes=5, put_at_s=index.clock.at_s)
    assert await index.commit(index.grant("r3"), renewed) == (new.put_id,)
    assert await index.lookup("r2", 1) == [new.put_id]
    assert index.disk.names("pool") == []


async def test_a_mended_block_takes_the_row_and_the_old_object_goes_once_it_has_none(index: Index) -> None:
    old, new, theirs = block(0), block(0), block(0)
    for one in (old, theirs):
        index.disk.write("pool", object_name(one.key, one.put_id), b"x")
    await index.commit(index.grant("r1"), old)
    await index.commit(index.grant("r2", OTHER), theirs)
    mended = msgspec.structs.replace(new, replaces=old.put_id)
    with pytest.raises(ClaimRefused):
        await index.commit(index.grant("trial", cache_write=False), mended)
    stolen = msgspec.structs.replace(new, replaces=theirs.put_id)
    assert await index.commit(index.grant("thief"), stolen) == (old.put_id,)
    assert await index.commit(index.grant("r3"), mended) == (new.put_id,)
    assert await index.commit(index.grant("r3"), mended) == (new.put_id,)
    assert await index.lookup("r4", 1) == [new.put_id]
    assert index.disk.names("pool") == [object_name(theirs.key, theirs.put_id)]
    for torn in (b"x", new.put_id):
        with pytest.raises(InvalidRequest):
            await index.commit(index.grant("r3"), msgspec.structs.replace(new, replaces=torn))


async def test_mends_at_once_have_one_winner_and_no_deadlock(index: Index) -> None:
    old = [block(i) for i in range(20)]
    await index.commit(index.grant("r0"), *old)
    tries = [[msgspec.structs.replace(block(b.position), replaces=b.put_id) for b in old] for _ in range(6)]
    tries[1::2] = [list(reversed(blocks)) for blocks in tries[1::2]]
    replies = await asyncio.gather(*(index.commit(index.grant(f"r{n}"), *blocks) for n, blocks in enumerate(tries)))
    held = await index.lookup("x", 20)
    assert not set(held).intersection(b.put_id for b in old)
    for blocks, reply in zip(tries, replies, strict=True):
        assert [put for _, put in sorted((b.position, put) for b, put in zip(blocks, reply, strict=True))] == held


async def test_commits_of_old_puts_are_refused(index: Index) -> None:
    old, fresh = block(0, START_S - limits.ORPHAN_GRACE_S / 2 - 1), block(1)
    assert await index.commit(index.grant("r1"), old, fresh) == (b"", fresh.put_id)
    assert await index.lookup("r2", 1) == []


async def test_a_touch_extends_by_the_users_class_at_most_every_few_minutes_and_never_shortens(index: Index) -> None:
    held = block(0)
    await index.commit(index.grant("r1"), held)
    refs = (BlockRef(source="pool", namespace=OWN, key=key(0), put_id=held.put_id),)

    async def touch(at_s: float, retention_s: int) -> float:
        index.clock.at_s = at_s
        await index.handlers.touch(Touch(grant=index.grant("r2", retention_s=retention_s), blocks=refs))
        return await index.expiry_s(0)

    assert await touch(START_S + 200, 3 * DAY_S) == START_S + 3 * DAY_S
    assert await touch(START_S + 300, 3 * DAY_S) == START_S + 300 + 3 * DAY_S
    assert await touch(START_S + 600, DAY_S) == START_S + 300 + 3 * DAY_S
    assert await touch(START_S + 600, 7 * DAY_S) == START_S + 600 + 7 * DAY_S
    # What has expired is not brought back.
    late_s = START_S + 600 + 7 * DAY_S
    assert await touch(late_s, 7 * DAY_S) == late_s


async def test_a_lookup_alone_extends_nothing(index: Index) -> None:
    await index.commit(index.grant("r1"), block(0))
    index.clock.at_s = START_S + DAY_S
    await index.lookup("r2", 1)
    assert await index.expiry_s(0) == START_S + 3 * DAY_S


async def test_another_namespaces_rows_answer_nobody_else(index: Index) -> None:
    await index.commit(index.grant("r1"), block(0))
    assert await index.lookup("r2", 1, OTHER) == []
    theirs = block(0)
    assert await index.commit(index.grant("r3", OTHER), theirs) == (theirs.put_id,)
    assert await index.lookup("r4", 1, OTHER) == [theirs.put_id]


async def test_shared_rows_fill_the_gaps_of_the_own_chain(index: Index) -> None:
    own, shared = block(1), block(0)
    await index.commit(index.grant("r1"), own)
    await index.commit(index.grant("r2", SHARED), shared)
    assert await index.lookup("r3", 2) == [shared.put_id, own.put_id]


async def test_rights_come_from_the_grant_alone(index: Index) -> None:
    with pytest.raises(ClaimRefused):
        await index.lookup("r1", 1, cache_read=False)
    with pytest.raises(ClaimRefused):
        await index.commit(index.grant("r1", cache_write=False), block(0))
    with pytest.raises(ClaimRefused):
        await index.lookup("r1", 1, shared=())
    foreign = (BlockRef(source="pool", namespace=OTHER, key=key(0), put_id=bytes(16)),)
    with pytest.raises(ClaimRefused):
        await index.handlers.touch(Touch(grant=index.grant("r1"), blocks=foreign))
    message = Lookup(grant=index.grant("r1"), request=RequestId("r2"), chains=())
    with pytest.raises(ClaimRefused):
        await index.handlers.lookup(message)
    with pytest.raises(AuthenticationFailed):
        await index.handlers.touch(Touch(grant=index.grant("r1")[:-4] + "AAAA", blocks=()))
    assert await index.pool.fetchval("SELECT count(*) FROM cache_index.blocks") == 0


async def test_the_sweeper_deletes_expired_rows_then_their_objects(index: Index, monkeypatch: Any) -> None:
    monkeypatch.setattr(limits, "SWEEP_BATCH_ROWS", 3)
    short = [block(i) for i in range(8)]
    await index.commit(index.grant("r1", retention_s=60), *short)
    kept = block(9)
    await index.commit(index.grant("r1"), kept)
    for one in (*short, kept):
        index.disk.write("pool", object_name(one.key, one.put_id), b"x")
    assert await index.sweeper.sweep_rows() == 0
    index.clock.at_s = START_S + 60
    stubborn = object_name(short[4].key, short[4].put_id)

    def fate(operation: str, space: str, name: str) -> Fate:
        return Fate(applied=False, error=Overloaded("busy")) if name == stubborn else Fate()

    index.disk.fate = fate  # type: ignore[assignment]
    assert await index.sweeper.sweep_rows() == 8
    assert index.disk.names("pool") == sorted([object_name(kept.key, kept.put_id), stubborn])
    assert await index.pool.fetchval("SELECT count(*) FROM cache_index.blocks") == 1


async def test_handoff_objects_are_swept_by_age(index: Index) -> None:
    index.disk.write("handoff", "old", b"x")
    index.clock.at_s = START_S + limits.HANDOFF_TTL_S
    index.disk.write("handoff", "new", b"x")
    assert await index.sweeper.sweep_handoffs() == 0
    index.clock.at_s += 1
    assert await index.sweeper.sweep_handoffs() == 1
    assert index.disk.names("handoff") == ["new"]


async def test_constraints_keep_what_no_row_may_say(index: Index) -> None:
    values = "$1, $2, $3, $4, $5, $6, 'acc', 'r', $7::timestamptz, $7, $7 + interval '1 day'"
    insert = f"INSERT INTO cache_index.blocks VALUES ({values})"
    good = ("ns_" + "a" * 32, bytes(32), bytes(16), 0, 1, "agent", datetime.now(UTC))
    for position, bad in [(0, "mine"), (1, bytes(31)), (2, bytes(15)), (3, -1), (4, 0), (5, "robot")]:
        row = (*good[:position], bad, *good[position + 1 :])
        with pytest.raises(asyncpg.CheckViolationError):
            await index.pool.execute(insert, *row)
    await index.pool.execute(insert, *good)
