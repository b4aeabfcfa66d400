"""Real NATS and Postgres from their wheels, started once for a test session, on first need.

`nats_url`: a server whose streams are wiped for each test that asks for it. `database_url`: the server's own database.
`fresh_database`: a database of a random name, dropped afterwards; tests that write use this one.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import nats
import pytest

from shared.cli.embedded_nats import start_nats
from shared.cli.embedded_postgres import start_postgres
from shared.cli.embedded_server import EmbeddedServer

STOP_S = 10.0


@pytest.fixture(scope="session")
def servers_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="deepserve-servers-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def nats_server(servers_folder: Path) -> Iterator[EmbeddedServer]:
    server = start_nats(servers_folder / "nats")
    yield server
    server.stop(STOP_S)


@pytest.fixture(scope="session")
def postgres_server(servers_folder: Path) -> Iterator[EmbeddedServer]:
    server = start_postgres(servers_folder / "postgres", password=secrets.token_urlsafe(16), durable=False)
    yield server
    server.stop(STOP_S)


@pytest.fixture
async def nats_url(nats_server: EmbeddedServer) -> AsyncIterator[str]:
    """Afterwards every stream is deleted, so that no test sees another's work."""
    yield nats_server.url
    async with asyncio.timeout(10):
        connection = await nats.connect(nats_server.url)
        manager = connection.jetstream()
        for stream in await manager.streams_info():
            await manager.delete_stream(str(stream.config.name))
        await connection.close()


@pytest.fixture(scope="session")
def database_url(postgres_server: EmbeddedServer) -> str:
    return postgres_server.url


@pytest.fixture
async def fresh_database(database_url: str) -> AsyncIterator[str]:
    """The URL of an empty database. Its name is new: tests of one session never meet in it."""
    name = f"test_{secrets.token_hex(8)}"
    await _execute(database_url, f"CREATE DATABASE {name}")
    yield f"{database_url.rpartition('/')[0]}/{name}"
    await _execute(database_url, f"DROP DATABASE {name} WITH (FORCE)")


async def _execute(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url, timeout=10)
    try:
        await connection.execute(statement, timeout=30)
    finally:
        await connection.close(timeout=5)
