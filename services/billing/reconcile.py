"""Reconciliation: the books checked against themselves, by queries that share no code with what wrote them.

Each check finds rows that must not exist; books are sound when every check finds none. It runs in one snapshot, so that
acts under way do not look like faults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.types import DateTime

from services.billing.holds import EXPIRES_AFTER_S
from shared.contracts import limits

SAMPLES_MAX: Final = 20
OVERDUE_S: Final = EXPIRES_AFTER_S + 4 * limits.HOLD_SWEEP_INTERVAL_S
"""From a hold's deadline to when the sweep should have expired it, with some patience."""


@dataclass(frozen=True)
class Check:
    name: str
    says: str
    query: str


@dataclass(frozen=True)
class Finding:
    """`count` rows speak against what the check says; `samples` are some of them."""

    name: str
    says: str
    count: int
    samples: Sequence[dict[str, Any]]


CHECKS: Final = (
    Check(
        "balances_are_their_entries",
        "Each balance is the credits less the debits of its ledger account.",
        """
        WITH leg AS (
            SELECT account, debit AS ledger, -amount_nano AS amount FROM billing.entries
            UNION ALL
            SELECT account, credit, amount_nano FROM billing.entries
        ), booked AS (SELECT account, ledger, sum(amount) AS amount FROM leg GROUP BY account, ledger)
        SELECT account, ledger, coalesce(balance_nano, 0) AS balance_nano, coalesce(amount, 0)::bigint AS booked_nano
        FROM billing.balances FULL JOIN booked USING (account, ledger)
        WHERE balance_nano IS DISTINCT FROM coalesce(amount, 0)
        """,
    ),
    Check(
        "debits_equal_credits",
        "The balances of an account sum to zero.",
        """
        SELECT account, sum(balance_nano)::bigint AS sum_nano FROM billing.balances
        GROUP BY account HAVING sum(balance_nano) <> 0
        """,
    ),
    Check(
        "no_balance_below_its_floor",
        "Money that a customer has, or that is held or earned, is never negative.",
        """
        SELECT account, ledger, balance_nano FROM billing.balances
        WHERE balance_nano < 0 AND ledger IN ('granted', 'topped_up', 'held', 'revenue')
        """,
    ),
    Check(
        "every_hold_has_one_start_and_at_most_one_end",
        "A pending hold has no end; a settled, released or expired one has exactly that end.",
        """
        SELECT h.id, h.account, h.state, array_agg(j.act ORDER BY j.id) AS acts
        FROM billing.holds h LEFT JOIN billing.journal j ON j.hold = h.id
        GROUP BY h.id
        HAVING coalesce(array_agg(j.act ORDER BY j.id) FILTER (WHERE j.act <> 'late_usage'), '{}') <>
            CASE h.state WHEN 'settled' THEN ARRAY['hold', 'settle'] WHEN 'released' THEN ARRAY['hold', 'release']
                         WHEN 'expired' THEN ARRAY['hold', 'expire'] ELSE ARRAY['hold'] END
        """,
    ),
    Check(
        "held_is_the_sum_of_the_pending_holds",
        "What is held is what pending holds reserved.",
        """
        SELECT b.account, b.balance_nano, coalesce(sum(h.amount_nano), 0)::bigint AS pending_nano
        FROM billing.balances b LEFT JOIN billing.holds h ON h.account = b.account AND h.state = 'pending'
        WHERE b.ledger = 'held'
        GROUP BY b.account, b.balance_nano HAVING b.balance_nano <> coalesce(sum(h.amount_nano), 0)
        """,
    ),
    Check(
        "revenue_is_the_sum_of_the_usage",
        "What was earned is what counted usage costs, once for each request.",
        """
        SELECT b.account, b.balance_nano, coalesce(sum(u.amount_nano), 0)::bigint AS usage_nano
        FROM billing.balances b LEFT JOIN billing.usage u ON u.account = b.account
        WHERE b.ledger = 'revenue'
        GROUP BY b.account, b.balance_nano HAVING b.balance_nano <> coalesce(sum(u.amount_nano), 0)
        """,
    ),
    Check(
        "usage_belongs_to_its_end",
        "A settled hold has usage, an expired one may have late usage, and no other has any.",
        """
        SELECT h.id, h.account, h.state, u.late FROM billing.holds h LEFT JOIN billing.usage u ON u.hold = h.id
        WHERE CASE h.state WHEN 'settled' THEN u.late IS DISTINCT FROM false
                           WHEN 'expired' THEN u.late IS NOT NULL AND NOT u.late
                           ELSE u.late IS NOT NULL END
        """,
    ),
    Check(
        "no_hold_outlives_its_time",
        "A hold ends at the latest when the allowance after its request's deadline is over.",
        "SELECT id, account, deadline FROM billing.holds WHERE state = 'pending' AND deadline < :overdue",
    ),
)


async def reconcile(connection: AsyncConnection, now: datetime) -> list[Finding]:
    """One finding for each check. The caller's transaction is read only and one snapshot (REPEATABLE READ)."""
    return [await _run(connection, check, now) for check in CHECKS]


async def _run(connection: AsyncConnection, check: Check, now: datetime) -> Finding:
    statement = text(f"SELECT *, count(*) OVER () AS found FROM ({check.query}) fault LIMIT {SAMPLES_MAX}")
    parameters = {}
    if ":overdue" in check.query:
        statement = statement.bindparams(bindparam("overdue", type_=DateTime(timezone=True)))
        parameters = {"overdue": now - timedelta(seconds=OVERDUE_S)}
    rows = [dict(row) for row in (await connection.execute(statement, parameters)).mappings()]
    count = int(rows[0]["found"]) if rows else 0
    samples = [{name: value for name, value in row.items() if name != "found"} for row in rows]
    return Finding(check.name, check.says, count, samples)
