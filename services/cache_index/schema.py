"""Makes the index's tables where they are missing."""

from __future__ import annotations

from services.cache_index.tables import METADATA, SCHEMA
from shared.runtime.database import Database, ensure_schema


async def make_tables(database_url: str) -> None:
    """Waits for the database, makes the schema where it is missing. Raises DeadlineExceeded, Overloaded."""
    database = Database(database_url, name="cache_index")
    try:
        await database.wait()
        await ensure_schema(database.engine, SCHEMA, METADATA)
    finally:
        await database.close()
