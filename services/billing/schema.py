"""Creates the books' schema, and the triggers that hold its rules against every client of the database.

Entries move balances by a trigger, so that no code can write the one without the other; the balance's CHECK then
refuses what would pass a floor, and the whole transaction with it (invariant 2).
"""

from __future__ import annotations

from dataclasses import dataclass
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


_EXISTING: Final = text("""
SELECT c.relname AS table_name, t.tgname AS trigger_name
FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
WHERE c.relnamespace = CAST(:schema AS regnamespace) AND NOT t.tgisinternal
""")


@dataclass(frozen=True)
class Trigger:
    """`when`, `rows` and `each` as in CREATE TRIGGER; `function` takes no arguments."""

    name: str
    table: str
    when: str
    each: str
    function: str
    rows: str = ""

    def create(self) -> str:
        return (
            f"CREATE TRIGGER {self.name} {self.when} ON {SCHEMA}.{self.table} {self.rows} "
            f"FOR EACH {self.each} EXECUTE FUNCTION {SCHEMA}.{self.function}()"
        )


def triggers() -> list[Trigger]:
    immutable = [table.name for table in _IMMUTABLE]
    return [
        *(Trigger("no_change", name, "BEFORE UPDATE OR DELETE", "ROW", "refuse_change") for name in immutable),
        *(
            Trigger("no_truncate", name, "BEFORE TRUNCATE", "STATEMENT", "refuse_change")
            for name in (*immutable, "holds", "balances", "accounts")
        ),
        Trigger("no_delete", "holds", "BEFORE DELETE", "ROW", "refuse_change"),
        Trigger("guard", "holds", "BEFORE UPDATE", "ROW", "guard_hold"),
        Trigger("post", "entries", "AFTER INSERT", "STATEMENT", "post_entries", "REFERENCING NEW TABLE AS posted"),
    ]


async def create(connection: AsyncConnection) -> None:
    """Everything that is missing. Idempotent; the caller holds the lock that lets one process at a time do this.

    What exists is not made again: a new trigger locks its table, and other processes may be moving money meanwhile.
    """
    await connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
    await connection.run_sync(METADATA.create_all)
    for function in _FUNCTIONS:
        await connection.execute(text(function))
    rows = await connection.execute(_EXISTING, {"schema": SCHEMA})
    existing = {(row.table_name, row.trigger_name) for row in rows}
    for trigger in triggers():
        if (trigger.table, trigger.name) not in existing:
            await connection.execute(text(trigger.create()))
