"""Entries of each act, written out by hand."""

from __future__ import annotations

import pytest

from services.billing import ledger
from services.billing.ledger import Act, Entry, Funds, Ledger
from shared.contracts.errors import Conflict, InsufficientBalance, InvalidRequest
from shared.contracts.lifecycle import HoldEvent, HoldState

G, T, H, R, U = Ledger.GRANTED, Ledger.TOPPED_UP, Ledger.HELD, Ledger.REVENUE, Ledger.UNCOLLECTED


def test_money_comes_in_from_its_source() -> None:
    assert ledger.credit(Act.TOPPED_UP, 7) == (Entry(Ledger.FUNDING, T, 7),)
    assert ledger.credit(Act.GRANTED, 7) == (Entry(Ledger.GRANTS, G, 7),)
    for amount in (0, -1, 10**18 + 1):
        with pytest.raises(InvalidRequest):
            ledger.credit(Act.GRANTED, amount)
    with pytest.raises(ValueError):
        ledger.credit(Act.SETTLE, 1)


@pytest.mark.parametrize(
    ("funds", "amount", "reserved"),
    [
        (Funds(10, 20), 7, Funds(7, 0)),
        (Funds(10, 20), 10, Funds(10, 0)),
        (Funds(10, 20), 25, Funds(10, 15)),
        (Funds(10, 20), 30, Funds(10, 20)),
        (Funds(0, 20), 5, Funds(0, 5)),
        (Funds(1, 0), 0, Funds(0, 0)),
    ],
)
def test_a_hold_takes_granted_money_first(funds: Funds, amount: int, reserved: Funds) -> None:
    assert ledger.reserve(funds, amount) == reserved


@pytest.mark.parametrize(("funds", "amount"), [(Funds(10, 20), 31), (Funds(0, 0), 1), (Funds(0, 0), 0)])
def test_a_hold_beyond_the_balance_is_deepseeks_402(funds: Funds, amount: int) -> None:
    with pytest.raises(InsufficientBalance) as refused:
        ledger.reserve(funds, amount)
    assert (refused.value.message, refused.value.status) == ("Insufficient Balance", 402)


def test_hold_release_and_settle_as_entries() -> None:
    reserved = Funds(10, 15)
    assert ledger.hold(reserved) == (Entry(G, H, 10), Entry(T, H, 15))
    assert ledger.give_back(reserved) == (Entry(H, G, 10), Entry(H, T, 15))
    assert ledger.settle(reserved, 0) == (Entry(H, G, 10), Entry(H, T, 15))
    assert ledger.settle(reserved, 4) == (Entry(H, R, 4), Entry(H, G, 6), Entry(H, T, 15))
    assert ledger.settle(reserved, 12) == (Entry(H, R, 12), Entry(H, T, 13))
    assert ledger.settle(reserved, 25) == (Entry(H, R, 25),)


@pytest.mark.parametrize("cost", [26, -1])
def test_nothing_settles_above_its_hold(cost: int) -> None:
    with pytest.raises(InvalidRequest):
        ledger.settle(Funds(10, 15), cost)


def test_late_usage_takes_what_is_there_and_names_the_rest() -> None:
    assert ledger.late_usage(Funds(3, 4), 5) == (Entry(G, R, 3), Entry(T, R, 2))
    assert ledger.late_usage(Funds(3, 4), 9) == (Entry(G, R, 3), Entry(T, R, 4), Entry(U, R, 2))
    assert ledger.late_usage(Funds(0, 0), 9) == (Entry(U, R, 9),)
    assert ledger.late_usage(Funds(3, 4), 0) == ()


@pytest.mark.parametrize(("credit", "amount_nano"), [(H, 0), (H, -1), (G, 1)])
def test_an_entry_moves_something_between_two(credit: Ledger, amount_nano: int) -> None:
    with pytest.raises(ValueError):
        Entry(G, credit, amount_nano)


def test_a_second_end_is_a_conflict() -> None:
    for event, state in (
        (HoldEvent.SETTLE, HoldState.SETTLED),
        (HoldEvent.RELEASE, HoldState.RELEASED),
        (HoldEvent.EXPIRE, HoldState.EXPIRED),
    ):
        assert ledger.end(HoldState.PENDING, event) is state
        for second in HoldEvent:
            with pytest.raises(Conflict):
                ledger.end(state, second)
