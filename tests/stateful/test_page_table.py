"""A machine over the page table, against a model that only counts (invariant 5)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from shared.contracts.errors import OutOfPages
from shared.contracts.ids import RequestId
from shared.engine.page_table import PageTable


class PageTableMachine(RuleBasedStateMachine):
    requests = Bundle("requests")

    @initialize(pages=st.integers(1, 24), tile_pages=st.sampled_from([1, 4, 16]))
    def start(self, pages: int, tile_pages: int) -> None:
        self.pages = pages
        self.real = PageTable(pages, tile_pages)
        self.sizes: dict[RequestId, int] = {}
        self.tables: dict[RequestId, list[int]] = {}
        self.opened = 0

    def free(self) -> int:
        return self.pages - sum(self.sizes.values())

    @rule(target=requests, count=st.integers(0, 26))
    def open(self, count: int) -> RequestId:
        self.opened += 1
        request = RequestId(str(self.opened))
        if count > self.free():
            with pytest.raises(OutOfPages):
                self.real.open(request, count)
            return request
        self.real.open(request, count)
        self.sizes[request] = count
        self.tables[request] = list(self.real.table(request))
        return request

    @rule(request=requests, count=st.integers(0, 26))
    def grow(self, request: RequestId, count: int) -> None:
        if request not in self.sizes:
            return
        missing = max(0, count - self.sizes[request])
        if missing > self.free():
            with pytest.raises(OutOfPages):
                self.real.grow(request, count)
            return
        self.real.grow(request, count)
        self.sizes[request] += missing
        before = self.tables[request]
        self.tables[request] = list(self.real.table(request))
        assert self.tables[request][: len(before)] == before, "growth moved a page that holds KV"

    @rule(request=consumes(requests))
    def close(self, request: RequestId) -> None:
        self.real.close(request)
        self.sizes.pop(request, None)
        self.tables.pop(request, None)

    @invariant()
    def pages_are_conserved(self) -> None:
        if not hasattr(self, "real"):
            return
        assert self.real.pages_free == self.free()
        held = [page for table in self.tables.values() for page in table]
        assert len(set(held)) == len(held)
        assert all(0 <= page < self.pages for page in held)
        for request, table in self.tables.items():
            assert self.real.table(request) == table
            assert len(table) == self.sizes[request]
        self.real.check()


PageTableMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPageTable = PageTableMachine.TestCase
