"""Double entry, pure: what an act on an account's money moves, as entries. No clock, no database.

Each account has its own set of ledger accounts, so that no balance is shared by two customers (and no row is hot over
all of them). An entry moves one positive integer amount from its debit to its credit: a balance is its credits less its
debits, and all balances of an account sum to zero by construction (invariant 2).

    topped_up, granted   what the customer can spend; granted goes first
    held                 reserved by pending holds; equals their sum
    revenue              what requests cost, taken for good
    funding, grants      where topped-up and granted money came from (negative: the outside world)
    uncollected          late usage that the balance no longer covered (negative: what the customer still owes)

    hold    granted, topped_up → held
    settle  held → revenue, and the rest of the hold → topped_up, granted
    release, expire          the whole hold → topped_up, granted
    late_usage  granted, topped_up, uncollected → revenue: usage that arrived after its hold had expired
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from shared.contracts import lifecycle, limits
from shared.contracts.errors import Conflict, IllegalTransition, InsufficientBalance, InvalidRequest
from shared.contracts.lifecycle import HoldEvent, HoldState

INSUFFICIENT: Final = "Insufficient Balance"
"""DeepSeek's text of the 402 (reference, row 55)."""


class Ledger(StrEnum):
    """The ledger accounts of one account."""

    FUNDING = "funding"
    GRANTED = "granted"
    GRANTS = "grants"
    HELD = "held"
    REVENUE = "revenue"
    TOPPED_UP = "topped_up"
    UNCOLLECTED = "uncollected"


UNLIMITED: Final = frozenset({Ledger.FUNDING, Ledger.GRANTS, Ledger.UNCOLLECTED})
"""May go below zero; every other balance may not."""


class Act(StrEnum):
    """Why money moved: the kind of a journal row and of its entries."""

    TOPPED_UP = "topped_up"
    GRANTED = "granted"
    HOLD = "hold"
    SETTLE = "settle"
    RELEASE = "release"
    EXPIRE = "expire"
    LATE_USAGE = "late_usage"


ENDS: Final = (Act.SETTLE, Act.RELEASE, Act.EXPIRE)
"""A hold has exactly one of these (invariant 1)."""


@dataclass(frozen=True)
class Entry:
    """`amount_nano` from `debit` to `credit`, both of one account."""

    debit: Ledger
    credit: Ledger
    amount_nano: int

    def __post_init__(self) -> None:
        if self.amount_nano <= 0:
            raise ValueError(f"an entry moves a positive amount, not {self.amount_nano}")
        if self.debit == self.credit:
            raise ValueError(f"an entry within {self.debit} moves nothing")


@dataclass(frozen=True)
class Funds:
    """Spendable or reserved money by where it came from, in nano-units."""

    granted_nano: int
    topped_up_nano: int

    def __post_init__(self) -> None:
        if min(self.granted_nano, self.topped_up_nano) < 0:
            raise ValueError(f"negative funds: {self!r}")

    @property
    def total_nano(self) -> int:
        return self.granted_nano + self.topped_up_nano


def credit(act: Act, amount_nano: int) -> tuple[Entry, ...]:
    """Money comes in: paid by the customer (TOPPED_UP) or given by the operator (GRANTED)."""
    if not 0 < amount_nano <= limits.AMOUNT_NANO_MAX:
        raise InvalidRequest(f"an amount is more than 0 and at most {limits.AMOUNT_NANO_MAX} nano-units")
    sources = {Act.TOPPED_UP: (Ledger.FUNDING, Ledger.TOPPED_UP), Act.GRANTED: (Ledger.GRANTS, Ledger.GRANTED)}
    if act not in sources:
        raise ValueError(f"{act} brings no money in")
    debit, to = sources[act]
    return (Entry(debit, to, amount_nano),)


def reserve(funds: Funds, amount_nano: int) -> Funds:
    """What a hold takes from `funds`, granted money first. Raises InsufficientBalance.

    An empty balance refuses every hold, also one that would cost nothing.
    """
    if funds.total_nano == 0 or amount_nano > funds.total_nano:
        raise InsufficientBalance(INSUFFICIENT)
    return _granted_first(funds, amount_nano)


def hold(reserved: Funds) -> tuple[Entry, ...]:
    return _entries(
        (Ledger.GRANTED, Ledger.HELD, reserved.granted_nano), (Ledger.TOPPED_UP, Ledger.HELD, reserved.topped_up_nano)
    )


def settle(reserved: Funds, cost_nano: int) -> tuple[Entry, ...]:
    """Takes the cost, granted money first, and returns the rest of the hold to where it came from.

    Raises InvalidRequest when the cost is above the hold: nothing is settled then.
    """
    if not 0 <= cost_nano <= reserved.total_nano:
        raise InvalidRequest(f"a cost of {cost_nano} is outside the hold of {reserved.total_nano} nano-units")
    taken = _granted_first(reserved, cost_nano)
    rest = Funds(reserved.granted_nano - taken.granted_nano, reserved.topped_up_nano - taken.topped_up_nano)
    return _entries((Ledger.HELD, Ledger.REVENUE, cost_nano)) + give_back(rest)


def give_back(reserved: Funds) -> tuple[Entry, ...]:
    """The whole of `reserved` back to where it came from: a release, an expiry, or the rest of a settlement."""
    return _entries(
        (Ledger.HELD, Ledger.GRANTED, reserved.granted_nano), (Ledger.HELD, Ledger.TOPPED_UP, reserved.topped_up_nano)
    )


def late_usage(funds: Funds, cost_nano: int) -> tuple[Entry, ...]:
    """Usage of a hold that expired: taken from what the account has now; what it lacks stands as uncollected."""
    if cost_nano < 0:
        raise InvalidRequest(f"negative cost {cost_nano}")
    taken = _granted_first(funds, min(cost_nano, funds.total_nano))
    return _entries(
        (Ledger.GRANTED, Ledger.REVENUE, taken.granted_nano),
        (Ledger.TOPPED_UP, Ledger.REVENUE, taken.topped_up_nano),
        (Ledger.UNCOLLECTED, Ledger.REVENUE, cost_nano - taken.total_nano),
    )


def end(state: HoldState, event: HoldEvent) -> HoldState:
    """The hold's state after its end. Raises Conflict when it already has one."""
    try:
        return lifecycle.advance(lifecycle.HOLD, state, event)
    except IllegalTransition:
        raise Conflict(f"the hold is already {state.value}; it cannot {event.value}") from None


def _granted_first(funds: Funds, amount_nano: int) -> Funds:
    granted = min(amount_nano, funds.granted_nano)
    return Funds(granted, amount_nano - granted)


def _entries(*moves: tuple[Ledger, Ledger, int]) -> tuple[Entry, ...]:
    """Without the moves of nothing."""
    return tuple(Entry(debit, credit, amount) for debit, credit, amount in moves if amount)
