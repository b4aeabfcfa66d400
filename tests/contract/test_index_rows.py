"""The suite of the index's rows on a real Postgres and in memory, and the completeness of the one in memory."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator

import pytest

from services.cache_index.repository import BlockRepository
from services.cache_index.schema import make_tables
from shared.runtime.database import make_pool
from tests.contract.index_suite import Index, IndexSuite
from tests.fakes.database import MemoryServer
from tests.fakes.index_repository import IndexRows, MemoryIndex


@pytest.mark.servers
class TestPostgresIndex(IndexSuite):
    @pytest.fixture
    async def index(self, fresh_database: str) -> AsyncIterator[Index]:  # type: ignore[override]
        await make_tables(fresh_database)
        pool = await make_pool(fresh_database, name="test", durable=False)
        yield BlockRepository(pool)
        await pool.close()


class TestMemoryIndex(IndexSuite):
    @pytest.fixture
    def index(self) -> Index:
        return IndexRows(MemoryServer()).connect()


def test_every_method_has_its_like_in_memory() -> None:
    for name, real in inspect.getmembers(BlockRepository, inspect.iscoroutinefunction):
        assert inspect.signature(getattr(MemoryIndex, name)) == inspect.signature(real), name
