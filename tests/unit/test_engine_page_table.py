"""Page tables with exact expectations; tests/stateful has the machine."""

from __future__ import annotations

import pytest

from shared.contracts.errors import OutOfPages
from shared.contracts.ids import RequestId
from shared.engine.page_table import PageTable, contiguous

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
TILE = 4


def test_a_table_takes_neighbouring_pages() -> None:
    table = PageTable(16, TILE)
    table.open(A, 6)
    assert table.table(A) == [0, 1, 2, 3, 4, 5]
    assert table.pages_free == 10


def test_another_sequence_starts_where_it_can_grow() -> None:
    table = PageTable(16, TILE)
    table.open(A, 2)
    table.open(B, 1)
    table.grow(A, 4)
    assert (table.table(A), table.table(B)) == ([0, 1, 2, 3], [4])


def test_growth_takes_the_neighbour_and_less_is_no_change() -> None:
    table = PageTable(16, TILE)
    table.open(A, 3)
    table.grow(A, 4)
    table.grow(A, 2)
    assert table.table(A) == [0, 1, 2, 3]


def test_a_broken_tile_takes_a_scrap_and_leaves_whole_runs_alone() -> None:
    table = PageTable(12, TILE)
    table.open(A, 3)
    table.open(B, 4)
    table.open(C, 4)
    table.close(C)
    table.open(C, 3)
    assert table.table(C) == [8, 9, 10]
    table.close(B)
    table.open(B, 1)  # whole run 4..7
    table.grow(A, 4)
    assert table.table(A) == [0, 1, 2, 3]
    table.grow(A, 5)  # a new tile starts at the longest run
    assert table.table(A)[4] == 5


def test_out_of_pages_changes_nothing() -> None:
    table = PageTable(4, TILE)
    table.open(A, 3)
    with pytest.raises(OutOfPages):
        table.open(B, 2)
    with pytest.raises(OutOfPages):
        table.grow(A, 5)
    assert table.table(A) == [0, 1, 2]
    assert table.pages_free == 1
    table.open(B, 1)
    assert table.pages_free == 0
    table.check()


def test_close_frees_and_is_idempotent() -> None:
    table = PageTable(4, TILE)
    table.open(A, 4)
    table.close(A)
    table.close(A)
    assert table.pages_free == 4
    table.open(B, 4)
    assert table.table(B) == [0, 1, 2, 3]


def test_check_finds_a_page_in_two_tables_and_a_lost_one() -> None:
    table = PageTable(4, TILE)
    table.open(A, 1)
    table.open(B, 1)
    table._tables[B][0] = table._tables[A][0]
    with pytest.raises(AssertionError, match="two tables"):
        table.check()
    del table._tables[B]
    with pytest.raises(AssertionError, match="lost"):
        table.check()


def test_contiguous() -> None:
    assert contiguous([])
    assert contiguous([7])
    assert contiguous([3, 4, 5])
    assert not contiguous([3, 5])
    assert not contiguous([4, 3])
