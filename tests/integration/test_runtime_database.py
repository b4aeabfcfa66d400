"""Transactions on a real Postgres: all or nothing, repeated after a conflict, refused when the database is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy import BigInteger, Column, MetaData, Table, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from shared.cli.embedded_postgres import start_postgres
from shared.contracts import limits
from shared.contracts.errors import DeadlineExceeded, Overloaded, SettingsError
from shared.runtime.database import Database, ensure_schema, make_engine, make_pool

pytestmark = pytest.mark.servers

METADATA = MetaData(schema="books")
Table(
    "balances",
    METADATA,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("amount", BigInteger, nullable=False),
)


@pytest.fixture
async def database(fresh_database: str) -> AsyncIterator[Database]:
    database = Database(fresh_database, name="test")
    await ensure_schema(database.engine, "books", METADATA)
    yield database
    await database.close()


async def amount(connection: AsyncConnection, key: int) -> int:
    found = await connection.execute(text("SELECT amount FROM books.balances WHERE id = :id"), {"id": key})
    return int(found.scalar_one())


def put(key: int, value: int) -> str:
    return f"INSERT INTO books.balances VALUES ({key}, {value}) ON CONFLICT (id) DO UPDATE SET amount = {value}"


async def test_a_transaction_is_whole_or_nothing(database: Database) -> None:
    async def fail(connection: AsyncConnection) -> None:
        await connection.execute(text(put(1, 5)))
        raise LookupError("in the middle")

    async def succeed(connection: AsyncConnection) -> int:
        await connection.execute(text(put(2, 7)))
        return await amount(connection, 2)

    with pytest.raises(LookupError):
        await database.transact(fail)
    assert await database.transact(succeed) == 7
    rows = await database.read(lambda c: c.execute(text("SELECT id FROM books.balances")))
    assert [row[0] for row in rows] == [2]


async def test_reading_cannot_write_and_a_snapshot_sees_one_moment(database: Database) -> None:
    await database.transact(lambda c: c.execute(text(put(1, 1))))
    with pytest.raises(DBAPIError, match="read-only"):
        await database.read(lambda c: c.execute(text(put(1, 2))))

    async def look_twice(connection: AsyncConnection) -> tuple[int, int]:
        before = await amount(connection, 1)
        await database.transact(lambda c: c.execute(text(put(1, 9))))
        return before, await amount(connection, 1)

    assert await database.snapshot(look_twice) == (1, 1)
    assert await database.read(look_twice) == (9, 9)


async def test_a_statements_own_fault_is_its_callers(database: Database) -> None:
    with pytest.raises(IntegrityError):
        await database.transact(lambda c: c.execute(text("INSERT INTO books.balances VALUES (1, NULL)")))


async def test_deadlocked_transactions_are_repeated_until_both_are_through(database: Database) -> None:
    await database.transact(lambda c: c.execute(text("INSERT INTO books.balances VALUES (1, 0), (2, 0)")))
    both_hold_one = asyncio.Barrier(2)
    tries = {1: 0, 2: 0}

    async def move(connection: AsyncConnection, first: int, second: int) -> None:
        tries[first] += 1
        await connection.execute(text(f"UPDATE books.balances SET amount = amount + 1 WHERE id = {first}"))
        if tries[first] == 1:
            await both_hold_one.wait()
        await connection.execute(text(f"UPDATE books.balances SET amount = amount + 1 WHERE id = {second}"))

    async with asyncio.timeout(20):
        await asyncio.gather(
            database.transact(lambda c: move(c, 1, 2)),
            database.transact(lambda c: move(c, 2, 1)),
        )
    assert sorted(tries.values()) == [1, 2]
    assert await database.read(lambda c: amount(c, 1)) == 2
    assert await database.read(lambda c: amount(c, 2)) == 2


async def test_a_lock_that_is_not_given_up_ends_by_the_bound(
    fresh_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "DATABASE_STATEMENT_S", 0.2)
    database = Database(fresh_database)
    await ensure_schema(database.engine, "books", METADATA)
    await database.transact(lambda c: c.execute(text(put(1, 1))))
    holder = await asyncpg.connect(fresh_database)
    try:
        async with holder.transaction():
            await holder.execute(put(1, 2))
            with pytest.raises(Overloaded):
                await database.transact(lambda c: c.execute(text(put(1, 3))))
    finally:
        await holder.close()
        await database.close()


async def test_many_processes_make_the_schema_at_once(fresh_database: str) -> None:
    engines = [make_engine(fresh_database, name=f"p{i}") for i in range(6)]
    await asyncio.gather(*(ensure_schema(engine, "books", METADATA) for engine in engines))
    await ensure_schema(engines[0], "books", METADATA)
    connection = await asyncpg.connect(fresh_database)
    assert await connection.fetchval("SELECT count(*) FROM books.balances") == 0
    await connection.close()
    for engine in engines:
        await engine.dispose()


async def test_a_database_that_went_away_is_overload_and_comes_back(tmp_path: Path) -> None:
    server = start_postgres(tmp_path / "postgres", password="p")
    database = Database(server.url)
    try:
        await database.wait()
        await asyncio.to_thread(server.stop, 10)
        with pytest.raises(Overloaded):
            await database.read(lambda c: c.execute(text("SELECT 1")))
        with pytest.raises(Overloaded):
            await make_pool(server.url, name="test")
        server = await asyncio.to_thread(start_postgres, tmp_path / "postgres", port=server.port, password="p")
        await database.wait()
        assert await database.read(lambda c: c.scalar(text("SELECT 41 + 1"))) == 42
    finally:
        await database.close()
        server.stop(10)


async def test_waiting_for_a_database_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONNECT_TIMEOUT_S", 0.2)
    database = Database("postgresql://nobody@127.0.0.1:1/none")
    with pytest.raises(DeadlineExceeded):
        await database.wait()
    await database.close()


async def test_sessions_carry_their_name_and_say_whether_commits_wait_for_the_disk(fresh_database: str) -> None:
    for durable, setting in ((True, "on"), (False, "off")):
        pool = await make_pool(fresh_database, name="index", durable=durable)
        assert await pool.fetchval("SHOW synchronous_commit") == setting
        assert await pool.fetchval("SHOW application_name") == "deepserve-index"
        assert await pool.fetchval("SHOW statement_timeout") == "10s"
        await pool.close()
    database = Database(fresh_database)
    assert await database.read(lambda c: c.scalar(text("SHOW synchronous_commit"))) == "on"
    await database.close()


def test_a_url_of_another_database_is_refused() -> None:
    with pytest.raises(SettingsError):
        make_engine("mysql://x/y", name="test")
