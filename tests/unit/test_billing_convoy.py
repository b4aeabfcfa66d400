"""Acts of an account in line: what goes together, and that nobody answers or fails for another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from services.billing.convoy import Convoy
from shared.contracts import limits
from shared.contracts.errors import Conflict, DeadlineExceeded, Overloaded
from shared.contracts.ids import AccountId

T = TypeVar("T")
ACCOUNT, OTHER = AccountId("acct_1"), AccountId("acct_2")


class Transactions:
    """Commits what ran to its end; `gate` holds each commit back. `committed`: what each transaction wrote."""

    def __init__(self) -> None:
        self.committed: list[list[str]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.begun = asyncio.Event()
        self.away: list[Exception] = []

    async def transact(self, work: Callable[[Any], Awaitable[T]]) -> T:
        self.begun.set()
        written: list[str] = []
        result = await work(written)
        await self.gate.wait()
        if self.away:
            raise self.away.pop(0)
        self.committed.append(written)
        return result


def act(name: str, error: Exception | None = None) -> Callable[[Any], Awaitable[str]]:
    async def work(written: Any) -> str:
        await asyncio.sleep(0)
        if error is not None:
            raise error
        written.append(name)
        return name

    return work


async def behind(convoy: Convoy, database: Transactions, works: list[Callable[[Any], Awaitable[str]]]) -> list[Any]:
    """The outcomes of acts that came while a first one was under way."""
    database.gate.clear()
    database.begun.clear()
    first = asyncio.create_task(convoy.act(ACCOUNT, act("first")))
    await database.begun.wait()
    rest = [asyncio.create_task(convoy.act(ACCOUNT, work)) for work in works]
    await asyncio.sleep(0)
    database.gate.set()
    assert await first == "first"
    return list(await asyncio.gather(*rest, return_exceptions=True))


async def test_those_who_wait_go_together_in_their_order() -> None:
    database = Transactions()
    names = [str(number) for number in range(limits.ACTS_TOGETHER_MAX + 3)]
    assert await behind(Convoy(database), database, [act(name) for name in names]) == names
    most = limits.ACTS_TOGETHER_MAX
    assert database.committed == [["first"], names[:most], names[most:]]


async def test_another_account_does_not_wait() -> None:
    database = Transactions()
    convoy = Convoy(database)
    database.gate.clear()
    held = asyncio.create_task(convoy.act(ACCOUNT, act("held")))
    await database.begun.wait()
    database.begun.clear()
    other = asyncio.create_task(convoy.act(OTHER, act("other")))
    await asyncio.wait_for(database.begun.wait(), 5)
    database.gate.set()
    assert await asyncio.gather(held, other) == ["held", "other"]


async def test_a_refusal_is_only_its_own() -> None:
    database = Transactions()
    refused = Conflict("other content")
    outcomes = await behind(Convoy(database), database, [act("a"), act("b", refused), act("c")])
    assert outcomes == ["a", refused, "c"]
    assert database.committed[1:] == [["a", "c"]]


async def test_what_breaks_a_transaction_fails_alone() -> None:
    database = Transactions()
    broken = KeyError("a bug")
    outcomes = await behind(Convoy(database), database, [act("a"), act("b", broken), act("c")])
    assert outcomes == ["a", broken, "c"]
    assert sorted(name for written in database.committed for name in written) == ["a", "c", "first"]


async def test_nobody_is_answered_when_the_commit_fails_and_each_tries_for_itself() -> None:
    database = Transactions()
    convoy = Convoy(database)
    away = Overloaded("away")
    database.gate.clear()
    first = asyncio.create_task(convoy.act(ACCOUNT, act("first")))
    await database.begun.wait()
    rest = [asyncio.create_task(convoy.act(ACCOUNT, act(name))) for name in ("a", "b", "c")]
    await asyncio.sleep(0)
    database.away = [away, away]
    database.gate.set()
    assert await asyncio.gather(first, *rest, return_exceptions=True) == [away, away, "b", "c"]
    assert database.committed == [["b", "c"]]


async def test_a_caller_that_leaves_takes_nobody_along() -> None:
    database = Transactions()
    convoy = Convoy(database)
    database.gate.clear()
    first = asyncio.create_task(convoy.act(ACCOUNT, act("first")))
    await database.begun.wait()
    driver, waiter, leaver = (asyncio.create_task(convoy.act(ACCOUNT, act(name))) for name in ("a", "b", "c"))
    await asyncio.sleep(0)
    leaver.cancel()
    first.cancel()
    await asyncio.wait({first, leaver})
    database.gate.set()
    assert await asyncio.gather(driver, waiter) == ["a", "b"]
    assert database.committed == [["a", "b"]]


async def test_a_line_that_does_not_move_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ACT_WAIT_S", 0.01)
    database = Transactions()
    convoy = Convoy(database)
    database.gate.clear()
    first = asyncio.create_task(convoy.act(ACCOUNT, act("first")))
    await database.begun.wait()
    with pytest.raises(Overloaded):
        await convoy.act(ACCOUNT, act("late"))
    database.gate.set()
    assert await first == "first"
    assert database.committed == [["first"]]


async def test_an_act_under_way_at_its_deadline_may_still_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    database = Transactions()
    convoy = Convoy(database)
    database.gate.clear()
    first = asyncio.create_task(convoy.act(ACCOUNT, act("first")))
    await database.begun.wait()
    driver = asyncio.create_task(convoy.act(ACCOUNT, act("a")))
    await asyncio.sleep(0)
    monkeypatch.setattr(limits, "ACT_WAIT_S", 0.05)
    taken = asyncio.create_task(convoy.act(ACCOUNT, act("b")))
    await asyncio.sleep(0)
    database.gate.set()
    await first
    database.gate.clear()
    with pytest.raises(DeadlineExceeded):
        await taken
    database.gate.set()
    assert await driver == "a"
    assert database.committed == [["first"], ["a", "b"]]
