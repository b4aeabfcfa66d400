"""Expires holds whose request is long over (invariant 11). Several billing processes may sweep at once."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from services.billing import repository
from services.billing.accounts import moment
from services.billing.holds import EXPIRES_AFTER_S
from services.billing.money import Money
from shared.contracts import limits
from shared.contracts.errors import DeepServeError
from shared.contracts.ids import AccountId, HoldId
from shared.contracts.ports import Clock
from shared.runtime.database import Database

log = structlog.get_logger()


async def sweep(database: Database, money: Money, clock: Clock) -> int:
    """Ends the holds that are due now, at most `limits.HOLD_SWEEP_BATCH`; returns how many.

    Each is its own transaction: one that cannot be ended keeps no other from it.
    """
    before = moment(clock.now_s()) - timedelta(seconds=EXPIRES_AFTER_S)

    async def read(connection: AsyncConnection) -> list[tuple[HoldId, AccountId]]:
        return await repository.due_holds(connection, before, limits.HOLD_SWEEP_BATCH)

    expired = 0
    for hold, account in await database.read(read):
        try:
            expired += await money.expire(hold, account)
        except DeepServeError as error:
            log.error("hold.stuck", hold=hold, account=account, reason=error.message)
    return expired


async def keep_sweeping(database: Database, money: Money, clock: Clock) -> None:
    """Until cancelled. A database that is away is tried again at the next turn."""
    while True:
        try:
            await sweep(database, money, clock)
        except DeepServeError as error:
            log.warning("sweep.failed", reason=error.message)
        await asyncio.sleep(limits.HOLD_SWEEP_INTERVAL_S)
