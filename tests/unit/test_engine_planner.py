"""Plans with exact expectations."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.ids import RequestId
from shared.engine.planner import Pending, Plan, Span, make_plan, pages_for

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
BLOCK = 64


def plan(*pending: Pending, budget: int, free: int = 100, turn: int = 0) -> Plan:
    return make_plan(pending, budget_rows=budget, block_tokens=BLOCK, pages_free=free, turn=turn)


def test_decode_rows_come_before_an_earlier_prompt() -> None:
    got = plan(Pending(A, 300, 0, 5), Pending(B, 101, 100, 2), budget=600)
    assert got == Plan((Span(B, 100, 101, 2), Span(A, 0, 300, 5)), ())


def test_a_cut_prompt_ends_at_a_block() -> None:
    got = plan(Pending(A, 300, 0, 5), Pending(B, 101, 100, 2), budget=200)
    assert got.spans == (Span(B, 100, 101, 2), Span(A, 0, 192, 5))


def test_a_cut_from_the_middle_of_a_block_ends_at_the_next_blocks_start() -> None:
    assert plan(Pending(A, 300, 70, 5), budget=100).spans == (Span(A, 70, 128, 5),)


def test_a_budget_below_a_block_is_used_whole() -> None:
    assert plan(Pending(A, 300, 0, 5), budget=10).spans == (Span(A, 0, 10, 5),)


def test_what_a_cut_leaves_goes_to_the_next_in_order_of_arrival() -> None:
    got = plan(Pending(A, 300, 0, 5), Pending(B, 50, 0, 1), budget=200)
    assert got.spans == (Span(A, 0, 192, 5), Span(B, 0, 8, 1))


def test_replayed_tokens_are_rows_like_others() -> None:
    assert plan(Pending(A, 140, 100, 3), budget=512).spans == (Span(A, 100, 140, 3),)


def test_a_missing_page_is_asked_for() -> None:
    assert plan(Pending(A, 129, 128, 2), budget=8, free=1).spans == (Span(A, 128, 129, 3),)


def test_without_a_free_page_the_span_ends_with_the_pages_at_hand() -> None:
    got = plan(Pending(A, 300, 100, 2), budget=512, free=0)
    assert got == Plan((Span(A, 100, 128, 2),), ())


def test_without_any_room_a_sequence_starves_and_others_go_on() -> None:
    got = plan(Pending(A, 129, 128, 2), Pending(B, 11, 10, 1), budget=512, free=0)
    assert got == Plan((Span(B, 10, 11, 1),), (A,))


def test_the_last_free_page_goes_to_the_first_in_turn_only() -> None:
    got = plan(Pending(A, 65, 64, 1), Pending(B, 65, 64, 1), budget=512, free=1)
    assert got == Plan((Span(A, 64, 65, 2),), (B,))


def test_turns_rotate_decode_rows_when_the_budget_is_short() -> None:
    pending = (Pending(A, 2, 1, 1), Pending(B, 2, 1, 1), Pending(C, 2, 1, 1))
    first_two = [tuple(s.request for s in plan(*pending, budget=2, turn=turn).spans) for turn in range(3)]
    assert first_two == [(A, B), (B, C), (C, A)]


def test_nothing_pending_is_an_empty_plan() -> None:
    assert plan(budget=512) == Plan((), ())


def test_pages_for() -> None:
    assert [pages_for(n, BLOCK) for n in (0, 1, 64, 65, 128)] == [0, 1, 1, 2, 2]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Pending], int, int]:
    pending = []
    for i in range(draw(st.integers(0, 6))):
        computed = draw(st.integers(0, 300))
        known = computed + draw(st.integers(1, 200))
        pages = pages_for(computed, BLOCK) + draw(st.integers(0, 3))
        pending.append(Pending(RequestId(str(i)), known, computed, pages))
    return pending, draw(st.integers(1, 400)), draw(st.integers(0, 5))


@given(cases())
def test_a_plan_keeps_its_bounds(case: tuple[list[Pending], int, int]) -> None:
    pending, budget, free = case
    got = plan(*pending, budget=budget, free=free)
    by_request = {p.request: p for p in pending}
    assert sum(s.stop - s.start for s in got.spans) <= budget
    assert sum(s.pages - by_request[s.request].pages for s in got.spans) <= free
    assert len({s.request for s in got.spans} | set(got.starved)) == len(got.spans) + len(got.starved)
    for span in got.spans:
        p = by_request[span.request]
        assert p.computed == span.start < span.stop <= p.known
        assert span.stop <= span.pages * BLOCK
    if pending and not got.spans:
        assert set(got.starved) == set(by_request)
        assert free == 0
