"""Which page belongs to which sequence. Pure Python, no torch.

Owns the free pages and the tables (invariant 5: free pages plus pages in tables, each once, are all pages). A table is
a list of pages: page i of it holds positions [i × block, (i + 1) × block). Attention reads a tile of `tile_pages` pages
without copying if they lie next to each other, so the table prefers the neighbour of the last page, and starts a tile
where the longest run of free pages is. Contiguity is a matter of speed only, never of results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from shared.contracts.errors import OutOfPages
from shared.contracts.ids import RequestId


class PageTable:
    def __init__(self, pages: int, tile_pages: int) -> None:
        assert pages > 0
        assert tile_pages > 0
        self._free = [True] * pages
        self._free_count = pages
        self._tile_pages = tile_pages
        self._tables: dict[RequestId, list[int]] = {}

    @property
    def pages(self) -> int:
        return len(self._free)

    @property
    def pages_free(self) -> int:
        return self._free_count

    def open(self, request: RequestId, count: int) -> None:
        """A new table with `count` pages. Raises OutOfPages; then nothing has changed."""
        assert request not in self._tables
        self._require(count)
        self._tables[request] = []
        self._take(self._tables[request], count)

    def grow(self, request: RequestId, count: int) -> None:
        """Lengthens the table to `count` pages, if it is shorter. Raises OutOfPages; then nothing has changed."""
        table = self._tables[request]
        missing = count - len(table)
        if missing > 0:
            self._require(missing)
            self._take(table, missing)

    def close(self, request: RequestId) -> None:
        """Frees the pages. Idempotent."""
        for page in self._tables.pop(request, ()):
            assert not self._free[page]
            self._free[page] = True
            self._free_count += 1

    def table(self, request: RequestId) -> list[int]:
        """The pages in order of position. The caller does not change the list."""
        return self._tables[request]

    def check(self) -> None:
        """Invariant 5, in time linear in the pages: run it when idle. A breach is a bug and ends the worker."""
        held = [page for table in self._tables.values() for page in table]
        assert len(set(held)) == len(held), "a page is in two tables"
        assert not any(self._free[page] for page in held), "a page in a table is free"
        assert sum(self._free) == self._free_count == len(self._free) - len(held), "a page is lost"

    def _require(self, count: int) -> None:
        if count > self._free_count:
            raise OutOfPages(f"{count} pages wanted, {self._free_count} of {len(self._free)} free")

    def _take(self, table: list[int], count: int) -> None:
        for _ in range(count):
            starts_tile = len(table) % self._tile_pages == 0
            page = table[-1] + 1 if table else len(self._free)
            if starts_tile or page >= len(self._free) or not self._free[page]:
                page = self._start_of_run(longest=starts_tile)
            self._free[page] = False
            self._free_count -= 1
            table.append(page)

    def _start_of_run(self, *, longest: bool) -> int:
        """First page of the longest run (room to grow), or of the shortest (a scrap for a tile already broken)."""
        best_start, best_length = -1, 0
        for start, length in self._runs():
            if best_length == 0 or (length > best_length if longest else length < best_length):
                best_start, best_length = start, length
        assert best_length > 0
        return best_start

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Runs (start, length) of free pages inside each stretch of `tile_pages` pages."""
        for base in range(0, len(self._free), self._tile_pages):
            end = min(base + self._tile_pages, len(self._free))
            page = base
            while page < end:
                start = page
                while page < end and self._free[page]:
                    page += 1
                if page > start:
                    yield start, page - start
                page += 1


def contiguous(pages: Sequence[int]) -> bool:
    """Whether the pages lie next to each other, in order."""
    return all(after == before + 1 for before, after in pairwise(pages))
