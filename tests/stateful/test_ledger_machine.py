"""Random lives of an account's money, against books that the test keeps in its own way.

The machine's books are plain numbers: what came in, what each hold reserved, what was taken. The ledger's entries are
added up beside them; both must say the same after every act.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from services.billing import ledger
from services.billing.ledger import Act, Entry, Funds
from shared.contracts.errors import Conflict, InsufficientBalance, InvalidRequest
from shared.contracts.lifecycle import HoldEvent, HoldState

amounts = st.integers(1, 1_000)
LIMITED = ("granted", "topped_up", "held", "revenue")


@dataclass
class HeldMoney:
    reserved: Funds
    state: HoldState = HoldState.PENDING
    ends: int = 0
    late: bool = False


class LedgerMachine(RuleBasedStateMachine):
    holds = Bundle("holds")

    def __init__(self) -> None:
        super().__init__()
        self.debits: Counter[str] = Counter()
        self.credits: Counter[str] = Counter()
        self.known: list[HeldMoney] = []
        self.came_in = 0
        self.taken = 0

    def balance(self, name: str) -> int:
        return self.credits[name] - self.debits[name]

    def funds(self) -> Funds:
        return Funds(self.balance("granted"), self.balance("topped_up"))

    def post(self, entries: tuple[Entry, ...]) -> None:
        for entry in entries:
            assert entry.amount_nano > 0
            self.debits[entry.debit.value] += entry.amount_nano
            self.credits[entry.credit.value] += entry.amount_nano

    @rule(amount=amounts, act=st.sampled_from([Act.TOPPED_UP, Act.GRANTED]))
    def money_comes_in(self, amount: int, act: Act) -> None:
        self.post(ledger.credit(act, amount))
        self.came_in += amount

    @rule(target=holds, amount=st.integers(0, 2_000))
    def hold(self, amount: int) -> object:
        funds = self.funds()
        spendable = funds.granted_nano + funds.topped_up_nano
        if spendable == 0 or amount > spendable:
            with pytest.raises(InsufficientBalance):
                ledger.reserve(funds, amount)
            return multiple()
        reserved = ledger.reserve(funds, amount)
        assert reserved.granted_nano + reserved.topped_up_nano == amount
        assert reserved.topped_up_nano == 0 or reserved.granted_nano == funds.granted_nano, "granted money goes first"
        self.post(ledger.hold(reserved))
        self.known.append(HeldMoney(reserved))
        return self.known[-1]

    def end(self, held: HeldMoney, event: HoldEvent, entries: tuple[Entry, ...]) -> bool:
        if held.state is not HoldState.PENDING:
            with pytest.raises(Conflict):
                ledger.end(held.state, event)
            return False
        held.state = ledger.end(held.state, event)
        held.ends += 1
        self.post(entries)
        return True

    @rule(held=holds, part=st.fractions(0, 1))
    def settle(self, held: HeldMoney, part: object) -> None:
        cost = int(held.reserved.total_nano * part)  # type: ignore[operator]
        before = self.balance("granted"), self.balance("topped_up")
        if self.end(held, HoldEvent.SETTLE, ledger.settle(held.reserved, cost)):
            self.taken += cost
            returned_granted = self.balance("granted") - before[0]
            returned_topped_up = self.balance("topped_up") - before[1]
            assert returned_granted == max(0, held.reserved.granted_nano - cost)
            assert returned_granted + returned_topped_up == held.reserved.total_nano - cost

    @rule(held=holds, beyond=amounts)
    def settle_above_the_hold(self, held: HeldMoney, beyond: int) -> None:
        with pytest.raises(InvalidRequest):
            ledger.settle(held.reserved, held.reserved.total_nano + beyond)

    @rule(held=holds, event=st.sampled_from([HoldEvent.RELEASE, HoldEvent.EXPIRE]))
    def give_back(self, held: HeldMoney, event: HoldEvent) -> None:
        before = self.funds()
        if self.end(held, event, ledger.give_back(held.reserved)):
            assert self.funds() == Funds(
                before.granted_nano + held.reserved.granted_nano, before.topped_up_nano + held.reserved.topped_up_nano
            )

    @rule(held=holds, part=st.fractions(0, 1))
    def usage_after_expiry(self, held: HeldMoney, part: object) -> None:
        if held.state is not HoldState.EXPIRED or held.late:
            return
        cost = int(held.reserved.total_nano * part)  # type: ignore[operator]
        spendable, owed = self.funds().total_nano, -self.balance("uncollected")
        self.post(ledger.late_usage(self.funds(), cost))
        held.late = True
        self.taken += cost
        assert -self.balance("uncollected") - owed == max(0, cost - spendable)

    @invariant()
    def debits_equal_credits(self) -> None:
        assert sum(self.debits.values()) == sum(self.credits.values())

    @invariant()
    def no_limited_balance_is_negative(self) -> None:
        assert all(self.balance(name) >= 0 for name in LIMITED)

    @invariant()
    def held_is_the_sum_of_the_pending_holds(self) -> None:
        pending = [held.reserved.total_nano for held in self.known if held.state is HoldState.PENDING]
        assert self.balance("held") == sum(pending)

    @invariant()
    def every_hold_ends_at_most_once(self) -> None:
        for held in self.known:
            assert held.ends == (0 if held.state is HoldState.PENDING else 1)

    @invariant()
    def what_came_in_is_there_or_taken(self) -> None:
        assert self.balance("revenue") == self.taken
        spendable = self.balance("granted") + self.balance("topped_up")
        assert spendable + self.balance("held") + self.taken + self.balance("uncollected") == self.came_in


LedgerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase
