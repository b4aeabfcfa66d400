"""Creates the books' schema, and the triggers that hold its rules against every client of the database.

Entries move balances by a trigger, so that no code can write the one without the other; the balance's CHECK then
refuses what would pass a floor, and the whole transaction with it (invariant 2).
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from services.billing.tables import ENTRIES, IDEMPOTENCY, JOURNAL, LEDGER_ACCOUNTS, METADATA, PRICES, SCHEMA, USAGE

_IMMUTABLE: Final = (JOURNAL, ENTRIES, USAGE, PRICES, LEDGER_ACCOUNTS, IDEMPOTENCY)

_FUNCTIONS: Final = (
    """
CREATE OR REPLACE FUNCTION billing.refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% of billing.% refused: what happened is not changed, a correction is a new row',
        TG_OP, TG_TABLE_NAME USING ERRCODE = 'restrict_violation';
END $$
""",
    """
CREATE OR REPLACE FUNCTION billing.post_entries() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    expected bigint;
    moved bigint;
BEGIN
    WITH leg AS (
        SELECT account, debit AS ledger, -amount_nano AS delta FROM posted
        UNION ALL
        SELECT account, credit, amount_nano FROM posted
    ), change AS (
        SELECT account, ledger, sum(delta) AS delta FROM leg GROUP BY account, ledger
    ), update_balances AS (
        UPDATE billing.balances SET balance_nano = balances.balance_nano + change.delta
        FROM change WHERE balances.account = change.account AND balances.ledger = change.ledger
        RETURNING 1
    )
    SELECT (SELECT count(*) FROM change), (SELECT count(*) FROM update_balances) INTO expected, moved;
    IF moved <> expected THEN
        RAISE EXCEPTION 'entries name % balances, of which % exist', expected, moved
            USING ERRCODE = 'foreign_key_violation';
    END IF;
    RETURN NULL;
END $$
""",
    """
CREATE OR REPLACE FUNCTION billing.guard_hold() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    expected billing.holds := OLD;
BEGIN
    expected.state := NEW.state;
    IF OLD.state <> 'pending' OR NEW IS DISTINCT FROM expected THEN
        RAISE EXCEPTION 'hold %: only its state changes, once, from pending', OLD.id
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$
""",
)


def _triggers() -> list[str]:
    statements = []
    for table in _IMMUTABLE:
        statements.append(_trigger("no_change", table.name, "BEFORE UPDATE OR DELETE", "ROW", "refuse_change"))
    for name in [table.name for table in _IMMUTABLE] + ["holds", "balances", "accounts"]:
        statements.append(_trigger("no_truncate", name, "BEFORE TRUNCATE", "STATEMENT", "refuse_change"))
    statements.append(_trigger("no_delete", "holds", "BEFORE DELETE", "ROW", "refuse_change"))
    statements.append(_trigger("guard", "holds", "BEFORE UPDATE", "ROW", "guard_hold"))
    statements.append(
        "CREATE OR REPLACE TRIGGER post AFTER INSERT ON billing.entries REFERENCING NEW TABLE AS posted "
        "FOR EACH STATEMENT EXECUTE FUNCTION billing.post_entries()"
    )
    return statements


def _trigger(name: str, table: str, when: str, each: str, function: str) -> str:
    return (
        f"CREATE OR REPLACE TRIGGER {name} {when} ON {SCHEMA}.{table} "
        f"FOR EACH {each} EXECUTE FUNCTION {SCHEMA}.{function}()"
    )


async def create(connection: AsyncConnection) -> None:
    """Everything that is missing. Idempotent; the caller holds the lock that lets one process at a time do this."""
    await connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
    await connection.run_sync(METADATA.create_all)
    for statement in (*_FUNCTIONS, *_triggers()):
        await connection.execute(text(statement))
