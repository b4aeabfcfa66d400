"""Postgres: the engine, one transaction at a time, the making of a schema. Owns the ways a database can be away.

Waits are bounded by Postgres itself (statement and lock time-outs) and by the pool; what ends by a bound or for want of
a database is Overloaded, retryable. A transaction that Postgres ended for a deadlock or a serialisation conflict is run
again from its beginning: its function must have no other effect.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, Literal, TypeVar

import asyncpg
import structlog
from sqlalchemy import MetaData, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.schema import CreateSchema

from shared.contracts import limits
from shared.contracts.errors import DeadlineExceeded, Overloaded, SettingsError

_log = structlog.get_logger()
T = TypeVar("T")
Work = Callable[[AsyncConnection], Awaitable[T]]
Isolation = Literal["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]

_AGAIN: Final = ("40001", "40P01")
"""Serialisation conflict, deadlock."""
_AWAY: Final = ("08", "53", "57")
"""Classes of SQLSTATE: connection, resources, an operator's or a time-out's intervention."""
_LOCK_TIMEOUT: Final = "55P03"


def make_engine(url: str, *, name: str, durable: bool = True) -> AsyncEngine:
    """An engine on asyncpg over a bounded pool. `name` is seen in pg_stat_activity.

    `durable=False`: commits do not wait for the disk. For what can be rebuilt, never for money.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in ("postgresql", "postgres"):
        raise SettingsError("the database URL must begin with postgresql://")
    return create_async_engine(
        f"postgresql+asyncpg://{rest}",
        pool_size=limits.DATABASE_POOL_CONNECTIONS,
        max_overflow=limits.DATABASE_POOL_EXTRA_CONNECTIONS,
        pool_timeout=limits.DATABASE_POOL_WAIT_S,
        pool_pre_ping=True,
        connect_args={
            "timeout": limits.DATABASE_POOL_WAIT_S,
            "command_timeout": 2 * limits.DATABASE_STATEMENT_S,
            "server_settings": _session(name, durable),
        },
    )


async def make_pool(url: str, *, name: str, durable: bool = True) -> asyncpg.Pool[Any]:
    """A bounded pool of raw asyncpg connections, for queries on the way of every request. The caller closes it.

    Raises Overloaded when the database is not there.
    """
    making = asyncpg.create_pool(
        url,
        min_size=1,
        max_size=limits.DATABASE_POOL_CONNECTIONS,
        timeout=limits.DATABASE_POOL_WAIT_S,
        command_timeout=limits.DATABASE_STATEMENT_S,
        server_settings=_session(name, durable),
    )
    try:
        return await making
    except (OSError, TimeoutError, asyncpg.PostgresError) as error:
        raise Overloaded(f"the database does not answer: {error}") from error


def _session(name: str, durable: bool) -> dict[str, str]:
    milliseconds = str(int(1000 * limits.DATABASE_STATEMENT_S))
    return {
        "application_name": f"deepserve-{name}",
        "statement_timeout": milliseconds,
        "lock_timeout": milliseconds,
        "idle_in_transaction_session_timeout": milliseconds,
        "synchronous_commit": "on" if durable else "off",
    }


class Database:
    """Transactions over one engine. Made from the URL, ended by `close`."""

    def __init__(self, url: str, *, name: str = "service") -> None:
        self.engine = make_engine(url, name=name)

    async def transact(self, work: Work[T]) -> T:
        """Runs `work` in a transaction and commits it; repeats it whole after a conflict, a bounded number of times.

        Raises Overloaded when the database is away, slow or in conflict all the time; what `work` raises otherwise.
        """
        return await self._run(work, "READ COMMITTED", read_only=False)

    async def read(self, work: Work[T]) -> T:
        """As `transact`; the database refuses writes."""
        return await self._run(work, "READ COMMITTED", read_only=True)

    async def snapshot(self, work: Work[T]) -> T:
        """As `read`; all statements see one moment."""
        return await self._run(work, "REPEATABLE READ", read_only=True)

    async def wait(self) -> None:
        """Until the database answers. Raises DeadlineExceeded after limits.CONNECT_TIMEOUT_S."""
        try:
            async with asyncio.timeout(limits.CONNECT_TIMEOUT_S):
                while True:
                    if await self._answers():
                        return
                    await asyncio.sleep(limits.DATABASE_WAIT_S)
        except TimeoutError as error:
            raise DeadlineExceeded("the database does not answer") from error

    async def close(self) -> None:
        await self.engine.dispose()

    async def _answers(self) -> bool:
        async def ask(connection: AsyncConnection) -> None:
            await connection.execute(text("SELECT 1"))

        try:
            await self.read(ask)
        except Overloaded as error:
            _log.info("database.waiting", error=error.message)
            return False
        return True

    async def _run(self, work: Work[T], isolation: Isolation, *, read_only: bool) -> T:
        for attempt in range(1, limits.DATABASE_ATTEMPTS_MAX + 1):
            try:
                async with transaction(self.engine, isolation, read_only=read_only) as connection:
                    return await work(connection)
            except Conflicted as error:
                if attempt == limits.DATABASE_ATTEMPTS_MAX:
                    raise
                _log.info("transaction.repeated", attempt=attempt, reason=error.message)
                # Both sides of a conflict must not come back in step.
                await asyncio.sleep(limits.DATABASE_RETRY_S * attempt * random.uniform(0.5, 1.5))
        raise Conflicted("no attempt was allowed")


class Conflicted(Overloaded):
    """Postgres ended the transaction in favour of another one."""


@asynccontextmanager
async def transaction(
    engine: AsyncEngine, isolation: Isolation = "READ COMMITTED", *, read_only: bool = False
) -> AsyncIterator[AsyncConnection]:
    """One transaction: committed at the end of the block, rolled back by an exception.

    Raises Conflicted, Overloaded in place of the library's errors where the database is at fault and not the statement.
    """
    try:
        async with engine.connect() as raw:
            connection = await raw.execution_options(isolation_level=isolation, postgresql_readonly=read_only)
            async with connection.begin():
                yield connection
    except PoolTimeout as error:
        raise Overloaded("all database connections are in use") from error
    except DBAPIError as error:
        translated = _translate(error)
        if translated is None:
            raise
        raise translated from error
    except (OSError, TimeoutError, asyncpg.InterfaceError) as error:
        raise Overloaded(f"the database does not answer: {type(error).__name__}") from error


def _translate(error: DBAPIError) -> Overloaded | None:
    """None: the statement is at fault (a constraint, a syntax error), which is its caller's matter."""
    state = str(getattr(error.orig, "sqlstate", None) or "")
    if state in _AGAIN:
        return Conflicted(f"transaction conflict {state}")
    if state.startswith(_AWAY) or state == _LOCK_TIMEOUT or error.connection_invalidated:
        return Overloaded(f"the database does not answer: {state or type(error.orig).__name__}")
    return None


async def ensure_schema(engine: AsyncEngine, schema: str, metadata: MetaData) -> None:
    """Makes the schema and its missing tables. Any number of processes may do it at once: they follow one another.

    Raises Overloaded when the database is away.
    """
    async with transaction(engine) as connection:
        await lock_schema(connection, schema)
        await connection.execute(CreateSchema(schema, if_not_exists=True))
        await connection.run_sync(metadata.create_all)


async def lock_schema(connection: AsyncConnection, schema: str) -> None:
    """Until the end of the transaction no other process makes or changes this schema."""
    wait_ms = int(1000 * limits.DATABASE_SCHEMA_S)
    await connection.execute(text(f"SET LOCAL lock_timeout = {wait_ms}"))
    await connection.execute(text(f"SET LOCAL statement_timeout = {wait_ms}"))
    await connection.execute(
        text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))"), {"name": f"deepserve/schema/{schema}"}
    )
