"""The index's SQL, over one asyncpg pool whose sessions do not wait for the disk.

`synchronous_commit = off` is right here and never for money: the index can be rebuilt, and a lost row is a miss. All
statements are raw asyncpg: the lookup is on the way of every request, where SQLAlchemy costs as much as the query.
Rows are locked in the order of their keys everywhere, so that writers of one prefix wait and do not deadlock.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import asyncpg

from services.cache_index.lookup import Rows
from shared.contracts import limits
from shared.contracts.errors import Overloaded
from shared.contracts.ids import AccountId, NamespaceId, RequestId
from shared.contracts.messages import BlockRef, CommitBlock
from shared.contracts.tag import TrafficClass

_FIND: Final = """
SELECT key, put_id FROM cache_index.blocks
WHERE namespace = $1 AND key = ANY($2::bytea[]) AND expires_at > $3 AND request <> $4
"""
_TAKE_VOID: Final = """
DELETE FROM cache_index.blocks WHERE namespace = $1 AND key IN (
    SELECT key FROM cache_index.blocks
    WHERE namespace = $1 AND key = ANY($2::bytea[]) AND (
        expires_at <= $3 OR (key, put_id) IN (SELECT * FROM unnest($4::bytea[], $5::bytea[])))
    ORDER BY key FOR UPDATE)
RETURNING key, put_id
"""
_INSERT: Final = """
INSERT INTO cache_index.blocks (namespace, key, put_id, position, object_bytes, traffic_class, account, request,
                                created_at, last_used_at, expires_at)
SELECT $1, new.key, new.put_id, new.position, new.object_bytes, $6, $7, $8, $9, $9, $10
FROM unnest($2::bytea[], $3::bytea[], $4::int[], $5::bigint[]) AS new(key, put_id, position, object_bytes)
ORDER BY new.key
ON CONFLICT (namespace, key) DO NOTHING
"""
_HOLDERS: Final = "SELECT key, put_id FROM cache_index.blocks WHERE namespace = $1 AND key = ANY($2::bytea[])"
_TOUCH: Final = """
UPDATE cache_index.blocks SET expires_at = greatest(expires_at, $3), last_used_at = greatest(last_used_at, $4)
WHERE namespace = $1 AND key IN (
    SELECT key FROM cache_index.blocks
    WHERE namespace = $1 AND key = ANY($2::bytea[]) AND expires_at > $4 AND expires_at < $5
    ORDER BY key FOR UPDATE)
"""
_SWEEP: Final = """
DELETE FROM cache_index.blocks WHERE (namespace, key) IN (
    SELECT namespace, key FROM cache_index.blocks
    WHERE expires_at <= $1 ORDER BY expires_at LIMIT $2 FOR UPDATE SKIP LOCKED)
RETURNING key, put_id
"""


@dataclass(frozen=True, slots=True)
class Put:
    """An object of the pool that no row names any more."""

    key: bytes
    put_id: bytes


@dataclass(frozen=True, slots=True)
class Committer:
    """On whose behalf rows are written; taken from a verified grant."""

    namespace: NamespaceId
    account: AccountId
    request: RequestId
    traffic_class: TrafficClass


def _when(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


class BlockRepository:
    """Rows of blocks. Holds no state but the pool, which its maker closes."""

    def __init__(self, pool: asyncpg.Pool[Any]) -> None:
        self._pool = pool

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        """Postgres' troubles as errors of the tree: Overloaded, whatever they are, since a lookup is then a miss."""
        try:
            async with self._pool.acquire(timeout=limits.INDEX_STATEMENT_TIMEOUT_S) as connection:
                yield connection
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
            raise Overloaded(f"the index's database: {type(error).__name__}") from error

    async def find(self, wanted: dict[NamespaceId, list[bytes]], now_s: float, not_by: RequestId) -> Rows:
        """Unexpired rows of the wanted keys, of each namespace its own, that `not_by` did not commit itself."""
        rows: dict[tuple[NamespaceId, bytes], bytes] = {}
        async with self._connection() as connection:
            for namespace, keys in wanted.items():
                for key, put_id in await connection.fetch(_FIND, namespace, keys, _when(now_s), not_by):
                    rows[namespace, key] = put_id
        return rows

    async def commit(
        self, by: Committer, blocks: Sequence[CommitBlock], now_s: float, expires_s: float
    ) -> tuple[dict[bytes, bytes], list[Put]]:
        """Rows for stored objects: the first unexpired (namespace, key) wins; replaced is a row that expired, or that
        still holds the put which its block `replaces`. Idempotent.

        Returns the put id that holds each key now, and the objects of replaced rows, which the caller deletes.
        """
        keys = sorted({block.key for block in blocks})
        mending = [block for block in blocks if block.replaces]
        async with self._connection() as connection, connection.transaction():
            replaced = await connection.fetch(
                _TAKE_VOID,
                by.namespace,
                keys,
                _when(now_s),
                [block.key for block in mending],
                [block.replaces for block in mending],
            )
            await connection.execute(
                _INSERT,
                by.namespace,
                [block.key for block in blocks],
                [block.put_id for block in blocks],
                [block.position for block in blocks],
                [block.object_bytes for block in blocks],
                by.traffic_class,
                by.account,
                by.request,
                _when(now_s),
                _when(expires_s),
            )
            holders = await connection.fetch(_HOLDERS, by.namespace, keys)
        return {row["key"]: row["put_id"] for row in holders}, [Put(row["key"], row["put_id"]) for row in replaced]

    async def touch(self, refs: Sequence[BlockRef], now_s: float, expires_s: float, below_s: float) -> None:
        """Extends unexpired rows of `refs` that expire before `below_s` to `expires_s`; never shortens one."""
        wanted: dict[NamespaceId, list[bytes]] = {}
        for ref in refs:
            wanted.setdefault(ref.namespace, []).append(ref.key)
        async with self._connection() as connection:
            for namespace in sorted(wanted):
                keys = sorted(wanted[namespace])
                await connection.execute(_TOUCH, namespace, keys, _when(expires_s), _when(now_s), _when(below_s))

    async def take_expired(self, now_s: float, rows_max: int) -> list[Put]:
        """Deletes at most `rows_max` expired rows, the longest expired first; the caller deletes their objects."""
        async with self._connection() as connection:
            taken = await connection.fetch(_SWEEP, _when(now_s), rows_max)
        return [Put(row["key"], row["put_id"]) for row in taken]
