"""The suite of the books on billing's tables in memory, and the completeness of what stands in place of its SQL."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator

import pytest

from services.billing.accounts import moment
from tests.contract.books_suite import BooksSuite
from tests.fakes import billing_repository
from tests.fakes.books import MemoryDatabase, Tables
from tests.fakes.database import MemoryServer
from tests.integration.billing_books import PRICES, Books, SetClock


class TestMemoryBooks(BooksSuite):
    @pytest.fixture
    async def books(self) -> AsyncIterator[Books]:  # type: ignore[override]
        tables, clock = Tables.empty(), SetClock()
        with billing_repository.installed():
            await billing_repository.adopt(tables, PRICES, moment(clock.now_s()))
            yield Books("", MemoryDatabase(tables, MemoryServer()), clock)  # type: ignore[arg-type]


@pytest.mark.parametrize("module", billing_repository.MODULES, ids=lambda module: module.__name__.split(".")[-1])
def test_every_statement_has_its_like_in_memory(module: object) -> None:
    for name, real in billing_repository.statements(module).items():  # type: ignore[arg-type]
        fake = getattr(billing_repository, name)
        assert list(inspect.signature(fake).parameters)[1:] == list(inspect.signature(real).parameters)[1:], name
