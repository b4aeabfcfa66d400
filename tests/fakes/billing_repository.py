"""Billing's SQL in memory: each public function of its repositories, over `books.Tables`.

`installed()` puts them in place of the real ones; a test holds that none is missing. Both answer to one suite
(tests/contract/books_suite.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime
from types import ModuleType, SimpleNamespace
from typing import Any, Final
from unittest import mock

from services.billing import account_repository, price_list, price_repository, repository
from services.billing.account_repository import AccountBooks
from services.billing.accounts import Account, ApiKey, Standing
from services.billing.holds import HeldRequest
from services.billing.ledger import Funds, Ledger
from services.billing.pricing import Prices
from services.billing.repository import HoldContext, Movement
from shared.contracts.ids import AccountId, HoldId, KeyId, NamespaceId, RequestId
from shared.contracts.lifecycle import HoldState
from shared.contracts.messages import Settle
from tests.fakes.books import ConstraintBroken, Counted, Tables

# -- money ------------------------------------------------------------------------------------------------------------


async def lock_balances(tables: Tables, account: AccountId) -> dict[Ledger, int]:
    return {ledger: tables.balances[account, ledger] for ledger in Ledger if (account, ledger) in tables.balances}


async def standing_by_digest(tables: Tables, digest: bytes, now: datetime) -> tuple[Standing, int] | None:
    found = [key for key in tables.api_keys.values() if key.digest == digest]
    return _standing(tables, found[0], now) if found else None


async def standing_by_key(tables: Tables, key_id: KeyId, now: datetime) -> tuple[Standing, int] | None:
    key = tables.api_keys.get(key_id)
    return _standing(tables, key, now) if key else None


def _standing(tables: Tables, key: ApiKey, now: datetime) -> tuple[Standing, int]:
    account = tables.accounts[key.account]
    balance = {ledger: tables.balances[account.id, ledger] for ledger in Ledger}
    versions = [prices.version for prices, valid_from in tables.priced.values() if valid_from <= now]
    standing = Standing(
        account=account.id,
        key_id=key.id,
        key_hint=key.hint,
        currency=account.currency,
        namespace=account.namespace,
        concurrency=account.concurrency,
        traffic_class=key.traffic_class,
        revoked=key.revoked_at is not None,
        funds=Funds(balance[Ledger.GRANTED], balance[Ledger.TOPPED_UP]),
        topped_up_ever=balance[Ledger.FUNDING] < 0,
    )
    first = min((prices.version for prices, _ in tables.priced.values()), default=0)
    return standing, max(versions, default=first)


async def hold_context(
    tables: Tables, account: AccountId, key_id: KeyId, model: str, request: RequestId, now: datetime
) -> HoldContext | None:
    key = tables.api_keys.get(key_id)
    if key is None or key.account != account:
        return None
    standing, version = _standing(tables, key, now)
    found = tables.priced.get((version, model, standing.currency))
    return HoldContext(standing, found[0] if found else None, request in tables.requests)


async def held(tables: Tables, hold: HoldId, account: AccountId) -> HeldRequest | None:
    found = tables.holds.get(hold)
    return found if found is not None and found.account == account else None


async def held_by_request(tables: Tables, request: RequestId) -> HeldRequest | None:
    hold = tables.requests.get(request)
    return tables.holds[hold] if hold is not None else None


async def usage_of(tables: Tables, request: RequestId) -> tuple[bytes, int] | None:
    found = tables.usage.get(request)
    return (found.input_hash, found.amount_nano) if found else None


async def due_holds(tables: Tables, before: datetime, limit: int) -> list[tuple[HoldId, AccountId]]:
    due = sorted(
        (hold.claims.deadline_s, hold.id, hold.account)
        for hold in tables.holds.values()
        if hold.state is HoldState.PENDING and hold.claims.deadline_s < before.timestamp()
    )
    return [(hold, account) for _, hold, account in due[:limit]]


async def insert_hold(tables: Tables, hold: HeldRequest, movement: Movement) -> bool:
    if hold.request in tables.requests:
        return False
    tables.insert(tables.holds, hold.id, hold)
    tables.requests[hold.request] = hold.id
    tables.post(movement)
    return True


async def settle(tables: Tables, hold: HeldRequest, settlement: Settle, movement: Movement) -> None:
    _end(tables, movement, HoldState.SETTLED)
    _count(tables, hold, settlement, movement, late=False)


async def late_usage(tables: Tables, hold: HeldRequest, settlement: Settle, movement: Movement) -> None:
    tables.post(movement)
    _count(tables, hold, settlement, movement, late=True)


async def give_back(tables: Tables, movement: Movement, state: HoldState) -> None:
    _end(tables, movement, state)


async def credit(tables: Tables, movement: Movement) -> int:
    return tables.post(movement)


def _end(tables: Tables, movement: Movement, state: HoldState) -> None:
    hold = tables.holds[movement.hold] if movement.hold else None
    if hold is None or hold.state is not HoldState.PENDING:
        raise ConstraintBroken("a money act wrote nothing, though its account is locked")
    tables.holds[hold.id] = replace(hold, state=state)
    tables.post(movement)


def _count(tables: Tables, hold: HeldRequest, settlement: Settle, movement: Movement, *, late: bool) -> None:
    if settlement.usage.prompt_tokens != hold.prompt_tokens or movement.amount_nano > hold.reserved.total_nano:
        raise ConstraintBroken("a usage that its hold does not cover")
    row = Counted(
        id=len(tables.usage) + 1,
        hold=hold,
        settle=settlement,
        amount_nano=movement.amount_nano,
        late=late,
        input_hash=movement.input_hash,
        created_at=movement.now,
    )
    tables.insert(tables.usage, hold.request, row)


# -- accounts ---------------------------------------------------------------------------------------------------------


async def insert_account(tables: Tables, account: Account) -> None:
    tables.insert(tables.accounts, account.id, account)
    for ledger in Ledger:
        tables.balances[account.id, ledger] = 0


async def find_account(tables: Tables, account: AccountId) -> AccountBooks | None:
    found = tables.accounts.get(account)
    return _books(tables, found) if found else None


async def list_accounts(tables: Tables, after: AccountId | None, limit: int) -> list[AccountBooks]:
    known = list(tables.accounts)
    start = known.index(after) + 1 if after is not None else 0
    return [_books(tables, tables.accounts[account]) for account in known[start : start + limit]]


def _books(tables: Tables, account: Account) -> AccountBooks:
    return AccountBooks(account, {ledger: tables.balances[account.id, ledger] for ledger in Ledger})


async def insert_api_key(tables: Tables, key: ApiKey) -> None:
    tables.insert(tables.api_keys, key.id, key)


async def list_api_keys(tables: Tables, account: AccountId) -> list[ApiKey]:
    found = [key for key in tables.api_keys.values() if key.account == account]
    return sorted(found, key=lambda key: (key.created_at, key.id))


async def count_api_keys(tables: Tables, account: AccountId) -> int:
    return len(await list_api_keys(tables, account))


async def revoke_api_key(tables: Tables, key_id: KeyId, now: datetime) -> ApiKey | None:
    key = tables.api_keys.get(key_id)
    if key is None:
        return None
    tables.api_keys[key_id] = replace(key, revoked_at=key.revoked_at or now)
    return tables.api_keys[key_id]


async def usage_rows(tables: Tables, account: AccountId, after: int, limit: int) -> list[Any]:
    found = [row for row in tables.usage.values() if row.hold.account == account and row.id > after]
    return [_usage_row(row) for row in sorted(found, key=lambda row: row.id)[:limit]]


def _usage_row(row: Counted) -> SimpleNamespace:
    usage, epoch = row.settle.usage, row.settle.epoch
    return SimpleNamespace(
        id=row.id,
        request=row.hold.request,
        hold=row.hold.id,
        account=row.hold.account,
        model=row.hold.prices.model,
        prompt_tokens=usage.prompt_tokens,
        cached=usage.cached,
        uncached=usage.uncached,
        not_eligible=usage.not_eligible,
        output=usage.output,
        reasoning=usage.reasoning,
        amount_nano=row.amount_nano,
        hold_nano=row.hold.reserved.total_nano,
        price_version=row.hold.prices.version,
        worker=row.settle.worker,
        attempt=epoch.attempt,
        stage=int(epoch.stage),
        delivery=epoch.delivery,
        device_s=row.settle.device_s,
        late=row.late,
        input_hash=row.input_hash,
        created_at=row.created_at,
    )


async def entry_rows(tables: Tables, account: AccountId, after: int, limit: int) -> list[Any]:
    rows = []
    for noted in tables.journal.values():
        for number, entry in enumerate(noted.movement.entries, start=noted.first_entry):
            if noted.movement.account == account and number > after:
                rows.append(
                    SimpleNamespace(
                        id=number,
                        journal=noted.id,
                        account=account,
                        debit=entry.debit.value,
                        credit=entry.credit.value,
                        amount_nano=entry.amount_nano,
                        act=noted.movement.act.value,
                        hold=noted.movement.hold,
                        request=noted.movement.request,
                        idempotency_key=noted.movement.idempotency_key,
                        created_at=noted.movement.now,
                    )
                )
    return rows[:limit]


async def find_namespace_key(tables: Tables, namespace: NamespaceId) -> bytes | None:
    found = tables.namespaces.get(namespace)
    return found[1] if found else None


async def make_namespace_key(
    tables: Tables, namespace: NamespaceId, account: AccountId, wrapped: bytes, now: datetime
) -> bytes:
    if namespace not in tables.namespaces:
        tables.namespaces[namespace] = (account, wrapped)
    return tables.namespaces[namespace][1]


async def lock_idempotency_key(tables: Tables, key: str) -> tuple[bytes, dict[str, Any]] | None:
    return tables.idempotency.get(key)


async def remember_reply(tables: Tables, key: str, input_hash: bytes, reply: dict[str, Any], now: datetime) -> None:
    tables.insert(tables.idempotency, key, (input_hash, reply))


# -- prices -----------------------------------------------------------------------------------------------------------


async def newest(tables: Tables) -> tuple[int, dict[tuple[str, str], Prices]]:
    version = max((version for version, _, _ in tables.priced), default=0)
    lines = [line for line, _ in tables.priced.values() if line.version == version]
    return version, {(line.model, line.currency): line for line in lines}


async def adopt(tables: Tables, text: str, now: datetime) -> int:
    version, known = await newest(tables)
    wanted = price_list.parse(text, version + 1)
    if price_list.same(known, wanted):
        return version
    for line in wanted.values():
        tables.insert(tables.priced, (line.version, line.model, line.currency), (line, now))
    return version + 1


# -- in place of the real ones ----------------------------------------------------------------------------------------

MODULES: Final = (repository, account_repository, price_repository)


def statements(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """The module's own public functions that talk to the database."""
    return {
        name: call
        for name, call in vars(module).items()
        if inspect.iscoroutinefunction(call) and call.__module__ == module.__name__ and not name.startswith("_")
    }


@contextmanager
def installed() -> Iterator[None]:
    """Billing's code talks to the tables in memory for the length of the block."""
    with ExitStack() as patches:
        for module in MODULES:
            for name in statements(module):
                patches.enter_context(mock.patch.object(module, name, globals()[name]))
        yield
