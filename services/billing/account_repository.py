"""SQL of accounts, API keys, namespaces, and what the administrator reads. Functions take the caller's transaction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Select, func, insert, literal, select, text, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.engine import Row
from sqlalchemy.ext.asyncio import AsyncConnection

from services.billing.accounts import Account, ApiKey
from services.billing.ledger import UNLIMITED, Ledger
from services.billing.tables import (
    ACCOUNTS,
    API_KEYS,
    BALANCES,
    ENTRIES,
    IDEMPOTENCY,
    JOURNAL,
    LEDGER_ACCOUNTS,
    NAMESPACES,
    USAGE,
)
from shared.contracts.ids import AccountId, KeyId, NamespaceId


@dataclass(frozen=True)
class AccountBooks:
    """An account and all its balances."""

    account: Account
    balances: Mapping[Ledger, int]


async def insert_account(connection: AsyncConnection, account: Account) -> None:
    """The account and its ledger accounts, each with a balance of nothing."""
    await connection.execute(
        insert(ACCOUNTS),
        {
            "id": account.id,
            "name": account.name,
            "currency": account.currency,
            "namespace": account.namespace,
            "concurrency": account.concurrency,
            "created_at": account.created_at,
        },
    )
    ledgers = [{"account": account.id, "ledger": ledger.value} for ledger in Ledger]
    await connection.execute(insert(LEDGER_ACCOUNTS), ledgers)
    opened = [
        {"account": account.id, "ledger": ledger.value, "balance_nano": 0, "floor_nano": _floor(ledger)}
        for ledger in Ledger
    ]
    await connection.execute(insert(BALANCES), opened)


def _floor(ledger: Ledger) -> int | None:
    return None if ledger in UNLIMITED else 0


_BOOKS: Final = (
    select(ACCOUNTS, func.json_object_agg(BALANCES.c.ledger, BALANCES.c.balance_nano).label("balances"))
    .join(BALANCES, BALANCES.c.account == ACCOUNTS.c.id)
    .group_by(ACCOUNTS.c.id)
)


async def find_account(connection: AsyncConnection, account: AccountId) -> AccountBooks | None:
    row = (await connection.execute(_BOOKS.where(ACCOUNTS.c.id == account))).one_or_none()
    return _books(row) if row else None


async def list_accounts(connection: AsyncConnection, after: AccountId | None, limit: int) -> list[AccountBooks]:
    """In order of creation."""
    statement = _BOOKS.order_by(ACCOUNTS.c.number).limit(limit)
    if after is not None:
        last = select(ACCOUNTS.c.number).where(ACCOUNTS.c.id == after).scalar_subquery()
        statement = statement.where(ACCOUNTS.c.number > last)
    return [_books(row) for row in await connection.execute(statement)]


def _books(row: Row[Any]) -> AccountBooks:
    account = Account(
        id=AccountId(row.id),
        name=row.name,
        currency=row.currency,
        namespace=NamespaceId(row.namespace),
        concurrency=row.concurrency,
        created_at=row.created_at,
    )
    return AccountBooks(account, {Ledger(name): int(amount) for name, amount in row.balances.items()})


async def insert_api_key(connection: AsyncConnection, key: ApiKey) -> None:
    await connection.execute(
        insert(API_KEYS),
        {
            "id": key.id,
            "account": key.account,
            "digest": key.digest,
            "hint": key.hint,
            "traffic_class": key.traffic_class,
            "created_at": key.created_at,
            "revoked_at": key.revoked_at,
        },
    )


async def list_api_keys(connection: AsyncConnection, account: AccountId) -> list[ApiKey]:
    statement = select(API_KEYS).where(API_KEYS.c.account == account).order_by(API_KEYS.c.created_at, API_KEYS.c.id)
    return [_api_key(row) for row in await connection.execute(statement)]


async def count_api_keys(connection: AsyncConnection, account: AccountId) -> int:
    statement = select(func.count()).select_from(API_KEYS).where(API_KEYS.c.account == account)
    return int((await connection.execute(statement)).scalar_one())


async def revoke_api_key(connection: AsyncConnection, key_id: KeyId, now: datetime) -> ApiKey | None:
    """The revoked key; one that was revoked before keeps its moment. None when there is no such key."""
    statement = (
        update(API_KEYS)
        .where(API_KEYS.c.id == key_id)
        .values(revoked_at=func.coalesce(API_KEYS.c.revoked_at, literal(now, API_KEYS.c.revoked_at.type)))
        .returning(*API_KEYS.c)
    )
    row = (await connection.execute(statement)).one_or_none()
    return _api_key(row) if row else None


def _api_key(row: Row[Any]) -> ApiKey:
    return ApiKey(
        id=KeyId(row.id),
        account=AccountId(row.account),
        digest=row.digest,
        hint=row.hint,
        traffic_class=row.traffic_class,
        created_at=row.created_at,
        revoked_at=row.revoked_at,
    )


async def usage_rows(connection: AsyncConnection, account: AccountId, after: int, limit: int) -> list[Row[Any]]:
    return await _page(connection, select(USAGE).where(USAGE.c.account == account), USAGE.c.id, after, limit)


async def entry_rows(connection: AsyncConnection, account: AccountId, after: int, limit: int) -> list[Row[Any]]:
    """Entries with the act that they belong to."""
    statement = (
        select(
            ENTRIES, JOURNAL.c.act, JOURNAL.c.hold, JOURNAL.c.request, JOURNAL.c.idempotency_key, JOURNAL.c.created_at
        )
        .join(JOURNAL, JOURNAL.c.id == ENTRIES.c.journal)
        .where(ENTRIES.c.account == account)
    )
    return await _page(connection, statement, ENTRIES.c.id, after, limit)


async def _page(
    connection: AsyncConnection, statement: Select[Any], order: Any, after: int, limit: int
) -> list[Row[Any]]:
    return list(await connection.execute(statement.where(order > after).order_by(order).limit(limit)))


async def find_namespace_key(connection: AsyncConnection, namespace: NamespaceId) -> bytes | None:
    """The wrapped key of the namespace."""
    statement = select(NAMESPACES.c.wrapped_key).where(NAMESPACES.c.namespace == namespace)
    return (await connection.execute(statement)).scalar_one_or_none()


async def make_namespace_key(
    connection: AsyncConnection, namespace: NamespaceId, account: AccountId, wrapped: bytes, now: datetime
) -> bytes:
    """The wrapped key of the namespace: `wrapped`, unless another was there first."""
    row = {"namespace": namespace, "account": account, "wrapped_key": wrapped, "created_at": now}
    await connection.execute(upsert(NAMESPACES).values(row).on_conflict_do_nothing())
    statement = select(NAMESPACES.c.wrapped_key).where(NAMESPACES.c.namespace == namespace)
    return bytes((await connection.execute(statement)).scalar_one())


async def lock_idempotency_key(connection: AsyncConnection, key: str) -> tuple[bytes, dict[str, Any]] | None:
    """(input hash, reply) that was given under this key before. Calls with one key follow one another from here on."""
    await connection.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:key, 0))"), {"key": f"billing/{key}"})
    statement = select(IDEMPOTENCY.c.input_hash, IDEMPOTENCY.c.reply).where(IDEMPOTENCY.c.key == key)
    row = (await connection.execute(statement)).one_or_none()
    return (row.input_hash, row.reply) if row else None


async def remember_reply(
    connection: AsyncConnection, key: str, input_hash: bytes, reply: dict[str, Any], now: datetime
) -> None:
    await connection.execute(
        insert(IDEMPOTENCY), {"key": key, "input_hash": input_hash, "reply": reply, "created_at": now}
    )
