"""The suite of the books on a real Postgres."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.contract.books_suite import BooksSuite
from tests.integration.billing_books import Books, open_books


@pytest.mark.servers
class TestPostgresBooks(BooksSuite):
    @pytest.fixture
    async def books(self, fresh_database: str) -> AsyncIterator[Books]:  # type: ignore[override]
        async with open_books(fresh_database) as opened:
            yield opened
            assert await opened.faults() == {}
