"""SQL of the money acts: each is one short transaction of lock, read, write. Functions take the caller's transaction.

Every act first locks the balances of its one account, always in the same order: acts of an account follow one another
and none deadlocks. What is read afterwards is read by a new statement, and so sees whatever was committed while it
waited for the lock. Writes are one statement each; the balances follow from the entries (`schema.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final

import msgspec
from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    DateTime,
    Double,
    Integer,
    LargeBinary,
    Numeric,
    Text,
    bindparam,
    text,
)
from sqlalchemy.engine import Row
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql.elements import TextClause
from sqlalchemy.types import TypeEngine

from services.billing.accounts import Standing
from services.billing.holds import HeldRequest
from services.billing.ledger import Act, Entry, Funds, Ledger
from services.billing.pricing import Prices
from shared.contracts.errors import InternalError
from shared.contracts.ids import AccountId, HoldId, KeyId, NamespaceId, RequestId
from shared.contracts.lifecycle import HoldState
from shared.contracts.messages import Settle
from shared.contracts.tag import GrantClaims

_TYPES: Final[Mapping[str, TypeEngine[Any]]] = {
    **dict.fromkeys(("digest", "input_hash"), LargeBinary()),
    **dict.fromkeys(("now", "before", "deadline"), DateTime(timezone=True)),
    **dict.fromkeys(("amount_nano", "granted_nano", "topped_up_nano", "hold_nano"), BigInteger()),
    **dict.fromkeys(("price_hit", "price_miss", "price_output"), Numeric(20, 9)),
    **dict.fromkeys(("prompt_tokens", "max_output_tokens", "price_version", "limit"), Integer()),
    **dict.fromkeys(("cached", "uncached", "not_eligible", "output", "reasoning"), Integer()),
    **dict.fromkeys(("attempt", "stage", "delivery"), Integer()),
    **dict.fromkeys(("debits", "credits"), ARRAY(Text())),
    "amounts": ARRAY(BigInteger()),
    "device_s": Double(),
    "late": Boolean(),
}
"""Of parameters that are no text: Postgres cannot guess them inside INSERT … SELECT."""


def sql(statement: str) -> TextClause:
    names = set(re.findall(r"(?<!:):([a-z_]+)", statement))
    return text(statement).bindparams(*(bindparam(name, type_=_TYPES.get(name, Text())) for name in sorted(names)))


_LOCK: Final = sql("""
SELECT ledger, balance_nano FROM billing.balances WHERE account = :account ORDER BY ledger FOR NO KEY UPDATE
""")

_STANDING: Final = """
SELECT k.account, k.id AS key_id, k.hint, k.traffic_class, k.revoked_at IS NOT NULL AS revoked,
       a.currency, a.namespace, a.concurrency,
       granted.balance_nano AS granted_nano, topped_up.balance_nano AS topped_up_nano,
       funding.balance_nano < 0 AS topped_up_ever,
       list.version AS price_version{more}
FROM billing.api_keys k
JOIN billing.accounts a ON a.id = k.account
JOIN billing.balances granted ON granted.account = a.id AND granted.ledger = 'granted'
JOIN billing.balances topped_up ON topped_up.account = a.id AND topped_up.ledger = 'topped_up'
JOIN billing.balances funding ON funding.account = a.id AND funding.ledger = 'funding'
CROSS JOIN (
    SELECT coalesce(max(version) FILTER (WHERE valid_from <= :now), min(version), 0) AS version FROM billing.prices
) list
"""
"""The list in force; the first one has no beginning, so that a clock that was set back still finds a price."""
_STANDING_BY_DIGEST: Final = sql(_STANDING.format(more="") + "WHERE k.digest = :digest")
_STANDING_BY_KEY: Final = sql(_STANDING.format(more="") + "WHERE k.id = :key_id")
_HOLD_CONTEXT: Final = sql(
    _STANDING.format(
        more=""",
       p.hit, p.miss, p.output,
       EXISTS (SELECT 1 FROM billing.holds WHERE holds.request = :request) AS held_before"""
    )
    + """
LEFT JOIN billing.prices p ON p.version = list.version AND p.model = :model AND p.currency = a.currency
WHERE k.id = :key_id AND k.account = :account
"""
)

_HELD_COLUMNS: Final = """
SELECT h.id, h.request, h.account, h.key_id, h.model, a.currency, h.prompt_tokens, h.max_output_tokens, h.granted_nano,
       h.topped_up_nano, h.price_version, h.price_hit, h.price_miss, h.price_output, h.claims::text AS claims,
       h.input_hash, h.state, h.created_at
FROM billing.holds h JOIN billing.accounts a ON a.id = h.account
"""
_HELD: Final = sql(_HELD_COLUMNS + "WHERE h.id = :hold AND h.account = :account")
_HELD_BY_REQUEST: Final = sql(_HELD_COLUMNS + "WHERE h.request = :request")
_USAGE: Final = sql("SELECT input_hash, amount_nano FROM billing.usage WHERE request = :request")
_DUE: Final = sql("""
SELECT id, account FROM billing.holds WHERE state = 'pending' AND deadline < :before ORDER BY deadline LIMIT :limit
""")

_NOTED: Final = """
noted AS (
    INSERT INTO billing.journal (act, account, hold, request, amount_nano, idempotency_key, input_hash, created_at)
    SELECT :act, :account, :hold, :request, :amount_nano, :idempotency_key, :input_hash, :now FROM {source}
    RETURNING id
), posted AS (
    INSERT INTO billing.entries (journal, account, debit, credit, amount_nano)
    SELECT noted.id, :account, leg.debit, leg.credit, leg.amount
    FROM noted, unnest(:debits, :credits, :amounts) WITH ORDINALITY AS leg(debit, credit, amount, number)
    ORDER BY leg.number
)
"""
_COUNTED: Final = """
, counted AS (
    INSERT INTO billing.usage (request, hold, account, model, prompt_tokens, cached, uncached, not_eligible, output,
        reasoning, amount_nano, hold_nano, price_version, worker, attempt, stage, delivery, device_s, late, input_hash,
        created_at)
    SELECT :request, :hold, :account, :model, :prompt_tokens, :cached, :uncached, :not_eligible, :output, :reasoning,
        :amount_nano, :hold_nano, :price_version, :worker, :attempt, :stage, :delivery, :device_s, :late, :input_hash,
        :now
    FROM noted
)
"""
_ENDED: Final = """
ended AS (
    UPDATE billing.holds SET state = :state WHERE id = :hold AND account = :account AND state = 'pending' RETURNING id
), """
_INSERT_HOLD: Final = sql(
    """
WITH held AS (
    INSERT INTO billing.holds (id, request, account, key_id, model, prompt_tokens, max_output_tokens, amount_nano,
        granted_nano, topped_up_nano, price_version, price_hit, price_miss, price_output, claims, input_hash, deadline,
        created_at)
    VALUES (:hold, :request, :account, :key_id, :model, :prompt_tokens, :max_output_tokens, :amount_nano,
        :granted_nano, :topped_up_nano, :price_version, :price_hit, :price_miss, :price_output,
        CAST(:claims AS jsonb), :input_hash, :deadline, :now)
    ON CONFLICT (request) DO NOTHING
    RETURNING id
), """
    + _NOTED.format(source="held")
    + "SELECT id FROM noted"
)
_SETTLE: Final = sql("WITH" + _ENDED + _NOTED.format(source="ended") + _COUNTED + "SELECT id FROM noted")
_GIVE_BACK: Final = sql("WITH" + _ENDED + _NOTED.format(source="ended") + "SELECT id FROM noted")
_LATE_USAGE: Final = sql("WITH" + _NOTED.format(source="(SELECT 1) one") + _COUNTED + "SELECT id FROM noted")
_CREDIT: Final = sql("WITH" + _NOTED.format(source="(SELECT 1) one") + "SELECT id FROM noted")


@dataclass(frozen=True)
class Movement:
    """One act as it is written: a journal row and its entries."""

    act: Act
    account: AccountId
    amount_nano: int
    entries: Sequence[Entry]
    idempotency_key: str
    input_hash: bytes
    now: datetime
    hold: HoldId | None = None
    request: RequestId | None = None

    def parameters(self) -> dict[str, Any]:
        return {
            "act": self.act.value,
            "account": self.account,
            "hold": self.hold,
            "request": self.request,
            "amount_nano": self.amount_nano,
            "idempotency_key": self.idempotency_key,
            "input_hash": self.input_hash,
            "now": self.now,
            "debits": [entry.debit.value for entry in self.entries],
            "credits": [entry.credit.value for entry in self.entries],
            "amounts": [entry.amount_nano for entry in self.entries],
        }


@dataclass(frozen=True)
class HoldContext:
    """What decides a hold. `prices`: of its model now, None without any. `held_before`: the request has a hold."""

    standing: Standing
    prices: Prices | None
    held_before: bool


async def lock_balances(connection: AsyncConnection, account: AccountId) -> dict[Ledger, int]:
    """All balances of the account, locked until the transaction ends; empty for an account that is not there."""
    rows = await connection.execute(_LOCK, {"account": account})
    return {Ledger(row.ledger): row.balance_nano for row in rows}


def funds(balances: Mapping[Ledger, int]) -> Funds:
    return Funds(granted_nano=balances[Ledger.GRANTED], topped_up_nano=balances[Ledger.TOPPED_UP])


async def standing_by_digest(connection: AsyncConnection, digest: bytes, now: datetime) -> tuple[Standing, int] | None:
    """(standing, version of the price list now) of the key with this digest."""
    row = (await connection.execute(_STANDING_BY_DIGEST, {"digest": digest, "now": now})).one_or_none()
    return _standing(row) if row else None


async def standing_by_key(connection: AsyncConnection, key_id: KeyId, now: datetime) -> tuple[Standing, int] | None:
    row = (await connection.execute(_STANDING_BY_KEY, {"key_id": key_id, "now": now})).one_or_none()
    return _standing(row) if row else None


async def hold_context(
    connection: AsyncConnection, account: AccountId, key_id: KeyId, model: str, request: RequestId, now: datetime
) -> HoldContext | None:
    """None when the account has no such key."""
    parameters = {"account": account, "key_id": key_id, "model": model, "request": request, "now": now}
    row = (await connection.execute(_HOLD_CONTEXT, parameters)).one_or_none()
    if row is None:
        return None
    standing, version = _standing(row)
    prices = None if row.hit is None else Prices(version, model, standing.currency, row.hit, row.miss, row.output)
    return HoldContext(standing, prices, row.held_before)


async def held(connection: AsyncConnection, hold: HoldId, account: AccountId) -> HeldRequest | None:
    row = (await connection.execute(_HELD, {"hold": hold, "account": account})).one_or_none()
    return _held(row) if row else None


async def held_by_request(connection: AsyncConnection, request: RequestId) -> HeldRequest | None:
    row = (await connection.execute(_HELD_BY_REQUEST, {"request": request})).one_or_none()
    return _held(row) if row else None


async def usage_of(connection: AsyncConnection, request: RequestId) -> tuple[bytes, int] | None:
    """(input hash, amount in nano-units) of the usage that was counted for the request."""
    row = (await connection.execute(_USAGE, {"request": request})).one_or_none()
    return (row.input_hash, row.amount_nano) if row else None


async def due_holds(connection: AsyncConnection, before: datetime, limit: int) -> list[tuple[HoldId, AccountId]]:
    """Pending holds whose deadline is earlier than `before`, the longest due first."""
    rows = await connection.execute(_DUE, {"before": before, "limit": limit})
    return [(HoldId(row.id), AccountId(row.account)) for row in rows]


async def insert_hold(connection: AsyncConnection, hold: HeldRequest, movement: Movement) -> bool:
    """The hold, its journal row and entries. False, with nothing written, when the request has a hold already."""
    claims = hold.claims
    parameters = movement.parameters() | {
        "key_id": hold.key_id,
        "model": hold.prices.model,
        "prompt_tokens": hold.prompt_tokens,
        "max_output_tokens": hold.max_output_tokens,
        "granted_nano": hold.reserved.granted_nano,
        "topped_up_nano": hold.reserved.topped_up_nano,
        "price_version": hold.prices.version,
        "price_hit": hold.prices.hit,
        "price_miss": hold.prices.miss,
        "price_output": hold.prices.output,
        "claims": msgspec.json.encode(claims).decode(),
        "deadline": datetime.fromtimestamp(claims.deadline_s, UTC),
    }
    return (await connection.execute(_INSERT_HOLD, parameters)).one_or_none() is not None


async def settle(connection: AsyncConnection, hold: HeldRequest, settlement: Settle, movement: Movement) -> None:
    """The end of a pending hold, with its usage."""
    parameters = _usage_parameters(hold, settlement, movement) | {"state": HoldState.SETTLED.value, "late": False}
    await _write(connection, _SETTLE, parameters)


async def late_usage(connection: AsyncConnection, hold: HeldRequest, settlement: Settle, movement: Movement) -> None:
    """Usage of an expired hold: an adjustment of its own, since the hold's end is not changed any more."""
    await _write(connection, _LATE_USAGE, _usage_parameters(hold, settlement, movement) | {"late": True})


async def give_back(connection: AsyncConnection, movement: Movement, state: HoldState) -> None:
    """The end of a pending hold without usage: released or expired."""
    await _write(connection, _GIVE_BACK, movement.parameters() | {"state": state.value})


async def credit(connection: AsyncConnection, movement: Movement) -> int:
    """The journal id of money that came in."""
    return await _write(connection, _CREDIT, movement.parameters())


async def _write(connection: AsyncConnection, statement: TextClause, parameters: dict[str, Any]) -> int:
    row = (await connection.execute(statement, parameters)).one_or_none()
    if row is None:
        raise InternalError("a money act wrote nothing, though its account is locked")
    return int(row.id)


def _usage_parameters(hold: HeldRequest, settlement: Settle, movement: Movement) -> dict[str, Any]:
    usage, epoch = settlement.usage, settlement.epoch
    return movement.parameters() | {
        "model": hold.prices.model,
        "prompt_tokens": usage.prompt_tokens,
        "cached": usage.cached,
        "uncached": usage.uncached,
        "not_eligible": usage.not_eligible,
        "output": usage.output,
        "reasoning": usage.reasoning,
        "hold_nano": hold.reserved.total_nano,
        "price_version": hold.prices.version,
        "worker": settlement.worker,
        "attempt": epoch.attempt,
        "stage": int(epoch.stage),
        "delivery": epoch.delivery,
        "device_s": settlement.device_s,
    }


def _standing(row: Row[Any]) -> tuple[Standing, int]:
    standing = Standing(
        account=AccountId(row.account),
        key_id=KeyId(row.key_id),
        key_hint=row.hint,
        currency=row.currency,
        namespace=NamespaceId(row.namespace),
        concurrency=row.concurrency,
        traffic_class=row.traffic_class,
        revoked=row.revoked,
        funds=Funds(granted_nano=row.granted_nano, topped_up_nano=row.topped_up_nano),
        topped_up_ever=row.topped_up_ever,
    )
    return standing, int(row.price_version)


def _held(row: Row[Any]) -> HeldRequest:
    return HeldRequest(
        id=HoldId(row.id),
        request=RequestId(row.request),
        account=AccountId(row.account),
        key_id=KeyId(row.key_id),
        prompt_tokens=row.prompt_tokens,
        max_output_tokens=row.max_output_tokens,
        reserved=Funds(granted_nano=row.granted_nano, topped_up_nano=row.topped_up_nano),
        prices=Prices(
            version=row.price_version,
            model=row.model,
            currency=row.currency,
            hit=Decimal(row.price_hit),
            miss=Decimal(row.price_miss),
            output=Decimal(row.price_output),
        ),
        claims=msgspec.json.decode(row.claims, type=GrantClaims),
        input_hash=row.input_hash,
        state=HoldState(row.state),
        created_at=row.created_at,
    )
