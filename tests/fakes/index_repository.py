"""The index's rows in memory: what `services.cache_index.repository.BlockRepository` answers, without Postgres.

One `IndexRows` for all, which outlives every process; one `MemoryIndex` for each process. A call has its whole effect
at one instant between its two legs, as the real one's transaction has. Times are whole microseconds, as in Postgres.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.cache_index.lookup import Rows
from services.cache_index.repository import Committer, Put
from shared.contracts.ids import NamespaceId, RequestId
from shared.contracts.messages import BlockRef, CommitBlock
from tests.fakes.database import MemoryServer


def _micros(seconds: float) -> int:
    return round(seconds * 1_000_000)


@dataclass(frozen=True, slots=True)
class Row:
    """Times in microseconds since the epoch."""

    put_id: bytes
    position: int
    object_bytes: int
    by: Committer
    created_at: int
    last_used_at: int
    expires_at: int


class IndexRows:
    """The table."""

    def __init__(self, server: MemoryServer) -> None:
        self.server = server
        self.rows: dict[tuple[NamespaceId, bytes], Row] = {}

    def connect(self) -> MemoryIndex:
        return MemoryIndex(self)


class MemoryIndex:
    """In place of `BlockRepository`."""

    def __init__(self, table: IndexRows) -> None:
        self._table = table

    async def find(self, wanted: dict[NamespaceId, list[bytes]], now_s: float, not_by: RequestId) -> Rows:
        now = _micros(now_s)

        def work() -> Rows:
            found: dict[tuple[NamespaceId, bytes], bytes] = {}
            for namespace, keys in wanted.items():
                for key in keys:
                    row = self._table.rows.get((namespace, key))
                    if row is not None and row.expires_at > now and row.by.request != not_by:
                        found[namespace, key] = row.put_id
            return found

        return await self._table.server.call("find", work)

    async def commit(
        self, by: Committer, blocks: Sequence[CommitBlock], now_s: float, expires_s: float
    ) -> tuple[dict[bytes, bytes], list[Put]]:
        now, expires = _micros(now_s), _micros(expires_s)

        def work() -> tuple[dict[bytes, bytes], list[Put]]:
            rows, replaced = self._table.rows, []
            mending = {(block.key, block.replaces) for block in blocks}
            for key in sorted({block.key for block in blocks}):
                row = rows.get((by.namespace, key))
                if row is not None and (row.expires_at <= now or (key, row.put_id) in mending):
                    replaced.append(Put(key, row.put_id))
                    del rows[by.namespace, key]
            for block in blocks:
                row = Row(block.put_id, block.position, block.object_bytes, by, now, now, expires)
                rows.setdefault((by.namespace, block.key), row)
            return {block.key: rows[by.namespace, block.key].put_id for block in blocks}, replaced

        return await self._table.server.call("commit", work)

    async def touch(self, refs: Sequence[BlockRef], now_s: float, expires_s: float, below_s: float) -> None:
        now, expires, below = _micros(now_s), _micros(expires_s), _micros(below_s)

        def work() -> None:
            for ref in refs:
                row = self._table.rows.get((ref.namespace, ref.key))
                if row is not None and now < row.expires_at < below:
                    self._table.rows[ref.namespace, ref.key] = replace(
                        row, expires_at=max(row.expires_at, expires), last_used_at=max(row.last_used_at, now)
                    )

        await self._table.server.call("touch", work)

    async def take_expired(self, now_s: float, rows_max: int) -> list[Put]:
        now = _micros(now_s)

        def work() -> list[Put]:
            rows = self._table.rows
            due = sorted((row.expires_at, name) for name, row in rows.items() if row.expires_at <= now)[:rows_max]
            taken = [Put(name[1], rows[name].put_id) for _, name in due]
            for _, name in due:
                del rows[name]
            return taken

        return await self._table.server.call("take_expired", work)
