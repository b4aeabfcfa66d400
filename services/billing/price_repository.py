"""SQL of price lists: versions that are added and never changed."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from services.billing import price_list
from services.billing.pricing import Prices
from services.billing.tables import PRICES


async def newest(connection: AsyncConnection) -> tuple[int, dict[tuple[str, str], Prices]]:
    """(version, list) of the version added last; (0, {}) before the first."""
    last = select(func.coalesce(func.max(PRICES.c.version), 0)).scalar_subquery()
    rows = list(await connection.execute(select(PRICES).where(PRICES.c.version == last)))
    prices = {
        (row.model, row.currency): Prices(row.version, row.model, row.currency, row.hit, row.miss, row.output)
        for row in rows
    }
    return (rows[0].version if rows else 0), prices


async def adopt(connection: AsyncConnection, text: str, now: datetime) -> int:
    """Makes the price list in `text` the newest version, valid from now, unless it is that already.

    Returns its version. Raises SettingsError. The caller holds the lock that lets one process at a time do this.
    """
    version, known = await newest(connection)
    wanted = price_list.parse(text, version + 1)
    if price_list.same(known, wanted):
        return version
    rows = [
        {
            "version": line.version,
            "model": line.model,
            "currency": line.currency,
            "hit": line.hit,
            "miss": line.miss,
            "output": line.output,
            "valid_from": now,
        }
        for line in wanted.values()
    ]
    await connection.execute(insert(PRICES), rows)
    return version + 1
