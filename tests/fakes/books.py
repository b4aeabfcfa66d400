"""Billing's tables in memory, and transactions over them: what `shared.runtime.database.Database` is to billing.

A transaction happens at one instant at the server: it reads what is committed and its own writes, and its writes become
true together or not at all. The functions that stand in place of billing's SQL are in `billing_repository.py`. What
Postgres refuses by a constraint is a `ConstraintBroken` here: a bug of the code above.
"""

from __future__ import annotations

import asyncio
from collections import ChainMap
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Final, TypeVar, cast

from services.billing.accounts import Account, ApiKey
from services.billing.holds import HeldRequest
from services.billing.ledger import UNLIMITED, Ledger
from services.billing.pricing import Prices
from services.billing.repository import Movement
from shared.contracts.ids import AccountId, HoldId, KeyId, NamespaceId, RequestId
from shared.contracts.messages import Settle
from tests.fakes.database import MemoryServer

T = TypeVar("T")
WAIT_S: Final = 0.5


class ConstraintBroken(Exception):
    """Postgres would have refused this write."""


@dataclass(frozen=True, slots=True)
class Counted:
    """A row of usage."""

    id: int
    hold: HeldRequest
    settle: Settle
    amount_nano: int
    late: bool
    input_hash: bytes
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Noted:
    """A row of the journal with its entries, whose numbers begin at `first_entry`."""

    id: int
    first_entry: int
    movement: Movement


@dataclass
class Tables:
    """`requests`: the hold of each request. `priced`: (prices, valid from)."""

    accounts: MutableMapping[AccountId, Account]
    api_keys: MutableMapping[KeyId, ApiKey]
    balances: MutableMapping[tuple[AccountId, Ledger], int]
    holds: MutableMapping[HoldId, HeldRequest]
    requests: MutableMapping[RequestId, HoldId]
    journal: MutableMapping[int, Noted]
    usage: MutableMapping[RequestId, Counted]
    priced: MutableMapping[tuple[int, str, str], tuple[Prices, datetime]]
    namespaces: MutableMapping[NamespaceId, tuple[AccountId, bytes]]
    idempotency: MutableMapping[str, tuple[bytes, dict[str, Any]]]

    @classmethod
    def empty(cls) -> Tables:
        return cls(*({} for _ in fields(cls)))

    def begin(self) -> Tables:
        """A view whose writes stay in it until `commit`."""
        return Tables(*(ChainMap({}, getattr(self, field.name)) for field in fields(self)))

    def commit(self, view: Tables) -> None:
        for field in fields(self):
            getattr(self, field.name).update(getattr(view, field.name).maps[0])

    # -- writes, with the constraints that Postgres holds --------------------------------------------------------------

    def insert(self, table: MutableMapping[Any, Any], key: Any, row: Any) -> None:
        if key in table:
            raise ConstraintBroken(f"{key} is there already")
        table[key] = row

    def post(self, movement: Movement) -> int:
        """The journal row with its entries, which move balances. Returns the row's number."""
        for noted in self.journal.values():
            if noted.movement.idempotency_key == movement.idempotency_key:
                raise ConstraintBroken(f"{movement.idempotency_key} happened already")
        number = len(self.journal) + 1
        entries = sum(len(noted.movement.entries) for noted in self.journal.values())
        self.journal[number] = Noted(number, entries + 1, movement)
        for entry in movement.entries:
            self._move(movement.account, entry.debit, -entry.amount_nano)
            self._move(movement.account, entry.credit, entry.amount_nano)
        for ledger in Ledger:
            if ledger not in UNLIMITED and self.balances[movement.account, ledger] < 0:
                raise ConstraintBroken(f"{movement.account}: {ledger} below its floor")
        return number

    def _move(self, account: AccountId, ledger: Ledger, delta_nano: int) -> None:
        self.balances[account, ledger] += delta_nano


class MemoryDatabase:
    """`shared.runtime.database.Database` of one process, over the tables of all."""

    def __init__(self, tables: Tables, server: MemoryServer) -> None:
        self._tables = tables
        self._server = server

    async def transact(self, work: Callable[[Any], Awaitable[T]]) -> T:
        return await self._server.call("transact", lambda: self._run(work, write=True))

    async def read(self, work: Callable[[Any], Awaitable[T]]) -> T:
        return await self._server.call("read", lambda: self._run(work, write=False))

    async def snapshot(self, work: Callable[[Any], Awaitable[T]]) -> T:
        return await self._server.call("read", lambda: self._run(work, write=False))

    async def wait(self) -> None:
        while not self._server.up:  # noqa: ASYNC110  as the real one, which tries again and again
            await asyncio.sleep(WAIT_S)

    async def close(self) -> None:
        return None

    def _run(self, work: Callable[[Any], Awaitable[T]], *, write: bool) -> T:
        view = self._tables.begin()
        result = _at_once(work(view))
        written = any(getattr(view, field.name).maps[0] for field in fields(view))
        if written and not write:
            raise ConstraintBroken("a read-only transaction wrote")
        self._tables.commit(view)
        return result


def _at_once(work: Awaitable[T]) -> T:
    """The result of a coroutine that never waits."""
    step = work.__await__()
    try:
        next(step)
    except StopIteration as end:
        return cast(T, end.value)
    raise ConstraintBroken("a transaction waited for something else than the database")
