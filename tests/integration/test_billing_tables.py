"""The rules that the database itself holds, against whoever writes to it; and that reconciliation sees a tampering."""

from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import pytest

from tests.integration.billing_books import Books, Customer, open_books, usage

pytestmark = pytest.mark.servers


@pytest.fixture
async def books(fresh_database: str) -> AsyncIterator[Books]:
    async with open_books(fresh_database) as opened:
        yield opened


@pytest.fixture
async def customer(books: Books) -> Customer:
    """With one settled request, "r1", and one that is held, "r2"."""
    customer = await books.customer(credit="1", grant="0.5")
    await customer.settle(await customer.hold("r1"), usage())
    await customer.hold("r2")
    return customer


COLUMNS = {
    "journal": "account",
    "entries": "account",
    "usage": "account",
    "prices": "model",
    "ledger_accounts": "ledger",
    "idempotency": "key",
}


async def test_what_happened_is_not_changed(books: Books, customer: Customer) -> None:
    for table, column in COLUMNS.items():
        for change in (
            f"UPDATE billing.{table} SET {column} = {column}",
            f"DELETE FROM billing.{table}",
            f"TRUNCATE billing.{table} CASCADE",
        ):
            with pytest.raises(asyncpg.RestrictViolationError, match="what happened is not changed"):
                await books.rows(change)


async def test_a_hold_changes_its_state_once_and_nothing_else(books: Books, customer: Customer) -> None:
    for change in (
        "UPDATE billing.holds SET state = 'released' WHERE request = 'r1'",
        "UPDATE billing.holds SET state = 'pending' WHERE request = 'r1'",
        "UPDATE billing.holds SET amount_nano = 1, granted_nano = 1, topped_up_nano = 0 WHERE request = 'r2'",
        "UPDATE billing.holds SET state = 'settled', deadline = deadline + interval '1 s' WHERE request = 'r2'",
        "DELETE FROM billing.holds WHERE request = 'r2'",
    ):
        with pytest.raises(asyncpg.RestrictViolationError):
            await books.rows(change)


JOURNAL = """
INSERT INTO billing.journal (act, account, hold, request, amount_nano, idempotency_key, input_hash, created_at)
SELECT $1, account, id, request, 1, $2, sha256('x'), now() FROM billing.holds WHERE request = $3 RETURNING id
"""


async def test_a_second_end_or_start_is_refused(books: Books, customer: Customer) -> None:
    for act in ("settle", "release", "expire"):
        with pytest.raises(asyncpg.UniqueViolationError, match="journal_one_end"):
            await books.rows(JOURNAL, act, "another key", "r1")
    with pytest.raises(asyncpg.UniqueViolationError, match="journal_one_start"):
        await books.rows(JOURNAL, "hold", "another key", "r2")


async def test_an_idempotency_key_moves_money_once(books: Books, customer: Customer) -> None:
    with pytest.raises(asyncpg.UniqueViolationError, match="journal_idempotency_key"):
        await books.rows(JOURNAL, "release", "settle:r1", "r2")


async def post(books: Books, customer: Customer, debit: str, credit: str, amount_nano: int) -> None:
    """An entry past all code, to the journal row of the pending hold."""
    await books.rows(
        """INSERT INTO billing.entries (journal, account, debit, credit, amount_nano)
           SELECT id, account, $2, $3, $4 FROM billing.journal WHERE account = $1 AND request = 'r2'""",
        customer.account,
        debit,
        credit,
        amount_nano,
    )


async def test_entries_move_their_balances_whoever_writes_them(books: Books, customer: Customer) -> None:
    before = await customer.balances()
    await post(books, customer, "topped_up", "revenue", 5)
    after = await customer.balances()
    assert after["topped_up"] == before["topped_up"] - 5
    assert after["revenue"] == before["revenue"] + 5
    assert sum(after.values()) == 0


async def test_no_balance_passes_its_floor(books: Books, customer: Customer) -> None:
    before = await customer.balances()
    for ledger in ("granted", "topped_up", "held", "revenue"):
        other = "uncollected" if ledger == "revenue" else "revenue"
        with pytest.raises(asyncpg.CheckViolationError, match="balances_floor"):
            await post(books, customer, ledger, other, before[ledger] + 1)
    assert await customer.balances() == before


async def test_entries_that_are_none_are_refused(books: Books, customer: Customer) -> None:
    for debit, credit, amount_nano, constraint in (
        ("granted", "granted", 1, "entries_between_two"),
        ("granted", "held", 0, "entries_amount"),
        ("granted", "held", -1, "entries_amount"),
        ("granted", "elsewhere", 1, "entries_credit|entries name 2 balances, of which 1 exist"),
    ):
        with pytest.raises(asyncpg.IntegrityConstraintViolationError, match=constraint):
            await post(books, customer, debit, credit, amount_nano)


async def test_usage_keeps_to_its_hold_and_sums_to_its_prompt(books: Books, customer: Customer) -> None:
    sound = {"prompt_tokens": 1_000, "cached": 0, "uncached": 1_000, "reasoning": 0, "amount_nano": 1}
    for change, constraint in (
        ({"prompt_tokens": 999, "uncached": 999}, "usage_of_hold"),
        ({"amount_nano": 210_001}, "usage_within_hold"),
        ({"amount_nano": -1}, "usage_within_hold"),
        ({"uncached": 999}, "usage_classes"),
        ({"cached": -1, "uncached": 1_001}, "usage_counts"),
        ({"reasoning": 1}, "usage_reasoning"),
    ):
        with pytest.raises(asyncpg.IntegrityConstraintViolationError, match=constraint):
            await insert_usage(books, **(sound | change))
    await insert_usage(books, **sound)
    with pytest.raises(asyncpg.UniqueViolationError, match="usage_request"):
        await insert_usage(books, **sound)


async def insert_usage(
    books: Books, prompt_tokens: int, cached: int, uncached: int, reasoning: int, amount_nano: int
) -> None:
    """Past all code, for the pending hold."""
    await books.rows(
        """
        INSERT INTO billing.usage (request, hold, account, model, prompt_tokens, cached, uncached, not_eligible, output,
            reasoning, amount_nano, hold_nano, price_version, worker, attempt, stage, delivery, device_s, late,
            input_hash, created_at)
        SELECT request, id, account, model, $1, $2, $3, 0, 0, $4, $5, amount_nano, 1, 'w', 1, 1, 1, 0, false,
            sha256('x'), now()
        FROM billing.holds WHERE request = 'r2'
        """,
        prompt_tokens,
        cached,
        uncached,
        reasoning,
        amount_nano,
    )


ENDS = "every_hold_has_one_start_and_at_most_one_end"
ENTRIES = "balances_are_their_entries"


@pytest.mark.parametrize(
    ("tampering", "checks"),
    [
        (
            "UPDATE billing.balances SET balance_nano = 7 WHERE ledger = 'granted'",
            {ENTRIES, "debits_equal_credits"},
        ),
        ("DELETE FROM billing.entries WHERE id = (SELECT max(id) FROM billing.entries)", {ENTRIES}),
        ("DELETE FROM billing.journal WHERE act = 'settle'", {ENDS}),
        ("UPDATE billing.journal SET act = 'release' WHERE act = 'settle'", {ENDS}),
        ("DELETE FROM billing.usage", {"revenue_is_the_sum_of_the_usage", "usage_belongs_to_its_end"}),
        ("UPDATE billing.usage SET late = true", {"usage_belongs_to_its_end"}),
        (
            "UPDATE billing.holds SET state = 'released' WHERE request = 'r2'",
            {ENDS, "held_is_the_sum_of_the_pending_holds"},
        ),
        (
            "UPDATE billing.holds SET deadline = deadline - interval '2 hours' WHERE request = 'r2'",
            {"no_hold_outlives_its_time"},
        ),
    ],
)
async def test_reconciliation_names_what_was_tampered_with(
    books: Books, customer: Customer, tampering: str, checks: set[str]
) -> None:
    """A superuser without triggers and foreign keys stands for a damaged disk or a careless repair."""
    assert await books.faults() == {}
    connection = await asyncpg.connect(books.url, timeout=10)
    await connection.execute("SET session_replication_role = replica")
    await connection.execute(tampering)
    await connection.close(timeout=5)
    assert set(await books.faults()) == checks
