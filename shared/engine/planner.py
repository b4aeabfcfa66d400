"""Which rows run in a step: pure arithmetic on counts; no torch, no clock.

There are no phases: tokens computed catch up with tokens known. Ranges of positions are half-open:

    [0, computed)          their KV is in the sequence's pages
    [computed, known)      pending: what a plan takes rows from
    [0, pages × block)     what the pages at hand can hold; a plan may ask for more pages, up to those free
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shared.contracts.ids import RequestId


class Pending(NamedTuple):
    """A sequence that has rows to run, in order of arrival."""

    request: RequestId
    known: int
    computed: int
    pages: int


class Span(NamedTuple):
    """Positions [start, stop) of one sequence; `pages`: how many it needs in all to hold them."""

    request: RequestId
    start: int
    stop: int
    pages: int


class Plan(NamedTuple):
    """`starved`: sequences that had rows and budget but no page."""

    spans: tuple[Span, ...]
    starved: tuple[RequestId, ...]


def pages_for(positions: int, block_tokens: int) -> int:
    """Pages that hold positions [0, `positions`)."""
    return -(-positions // block_tokens)


def make_plan(
    pending: Sequence[Pending], *, budget_rows: int, block_tokens: int, pages_free: int, turn: int = 0
) -> Plan:
    """Decode rows (one pending row) first, then the others in order of arrival.

    A longer span that the budget cuts ends at a block boundary if one lies inside, so that its blocks can be stored
    at once. `turn` rotates the decode rows, so that a budget below their number starves none of them for ever.
    """
    single = [p for p in pending if p.known - p.computed == 1]
    longer = [p for p in pending if p.known - p.computed > 1]
    first = turn % len(single) if single else 0
    spans: list[Span] = []
    starved: list[RequestId] = []
    for sequence in (*single[first:], *single[:first], *longer):
        if budget_rows == 0:
            break
        room = (sequence.pages + pages_free) * block_tokens
        if room <= sequence.computed:
            starved.append(sequence.request)
            continue
        stop = _cut(sequence.computed, min(sequence.known, room), budget_rows, block_tokens)
        pages = max(sequence.pages, pages_for(stop, block_tokens))
        spans.append(Span(sequence.request, sequence.computed, stop, pages))
        budget_rows -= stop - sequence.computed
        pages_free -= pages - sequence.pages
    return Plan(tuple(spans), tuple(starved))


def _cut(start: int, stop: int, budget_rows: int, block_tokens: int) -> int:
    if stop - start <= budget_rows:
        return stop
    cut = start + budget_rows
    boundary = cut // block_tokens * block_tokens
    return boundary if boundary > start else cut
