"""The pool of connections to Postgres, and the index's schema, made where it is missing."""

from __future__ import annotations

from typing import Any, Final

import asyncpg
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable

from services.cache_index.tables import BLOCKS, SCHEMA
from shared.contracts import limits
from shared.contracts.errors import DeadlineExceeded

_SESSION: Final = {"synchronous_commit": "off", "application_name": "deepserve cache_index"}
"""The index can be rebuilt: a lost row is a miss, and waiting for the disk would bound commits to its syncs."""
_SCHEMA_LOCK: Final = 7_303_014_117
"""One process makes the schema at a time: `IF NOT EXISTS` alone races."""


async def open_pool(database_url: str) -> asyncpg.Pool[Any]:
    """Raises DeadlineExceeded when the database lets nobody in within limits.CONNECT_TIMEOUT_S."""
    try:
        return await asyncpg.create_pool(
            database_url,
            min_size=1,
            max_size=limits.INDEX_CONNECTIONS_MAX,
            timeout=limits.CONNECT_TIMEOUT_S,
            command_timeout=limits.INDEX_STATEMENT_TIMEOUT_S,
            server_settings=_SESSION,
        )
    except (OSError, TimeoutError, asyncpg.PostgresError) as error:
        raise DeadlineExceeded(f"cannot connect to Postgres: {error}") from error


async def make_schema(pool: asyncpg.Pool[Any]) -> None:
    """Idempotent."""
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    statements = [
        f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}",
        str(CreateTable(BLOCKS, if_not_exists=True).compile(dialect=dialect)),
        *(str(CreateIndex(i, if_not_exists=True).compile(dialect=dialect)) for i in BLOCKS.indexes),
    ]
    async with pool.acquire() as connection, connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", _SCHEMA_LOCK)
        for statement in statements:
            await connection.execute(statement)
