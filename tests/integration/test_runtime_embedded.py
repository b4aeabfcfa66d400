"""The embedded servers: whole data after a restart, never two over one folder, no way in without a password."""

from __future__ import annotations

import os
import signal
import socket
import stat
from pathlib import Path

import asyncpg
import nats
import psutil
import pytest

from shared.cli.embedded_nats import start_nats
from shared.cli.embedded_postgres import start_postgres
from shared.contracts.errors import SettingsError

pytestmark = pytest.mark.servers
PASSWORD = "p@ss/w'd %x"


async def test_nats_keeps_streams_password_and_port(tmp_path: Path) -> None:
    first = start_nats(tmp_path / "nats")
    connection = await nats.connect(first.url)
    await connection.jetstream().add_stream(name="S", subjects=["s"])
    await connection.jetstream().publish("s", b"kept")
    assert connection.max_payload == 8 * 1024 * 1024
    await connection.close()
    first.stop(10)
    first.stop(10)
    assert not psutil.pid_exists(first.pid)

    second = start_nats(tmp_path / "nats", port=first.port)
    try:
        assert second.url == first.url
        connection = await nats.connect(second.url)
        assert (await connection.jetstream().get_msg("S", 1)).data == b"kept"
        await connection.close()
    finally:
        second.stop(10)


async def test_nats_refuses_strangers_and_hides_its_password(tmp_path: Path) -> None:
    server = start_nats(tmp_path / "nats")
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as stranger:
            stranger.sendall(b'CONNECT {"verbose":false}\r\nPING\r\n')
            assert b"Authorization Violation" in b"".join(iter(lambda: stranger.recv(4096), b""))
        for name in ("nats.conf", "password", "server.log"):
            assert stat.S_IMODE((tmp_path / "nats" / name).stat().st_mode) == 0o600
        assert "password" not in " ".join(psutil.Process(server.pid).cmdline())
    finally:
        server.stop(10)


async def test_a_second_nats_over_the_same_folder_ends_the_first(tmp_path: Path) -> None:
    first = start_nats(tmp_path / "nats")
    second = start_nats(tmp_path / "nats")
    try:
        assert first.process.wait(5) == 0
        assert second.pid != first.pid
    finally:
        second.stop(10)


async def test_postgres_keeps_its_data_over_stop_and_kill(tmp_path: Path) -> None:
    server = start_postgres(tmp_path / "postgres", password=PASSWORD)
    connection = await asyncpg.connect(server.url)
    await connection.execute("CREATE TABLE kept (x int)")
    await connection.execute("INSERT INTO kept VALUES (1)")
    assert await connection.fetchval("SHOW data_checksums") == "on"
    assert await connection.fetchval("SHOW password_encryption") == "scram-sha-256"
    await connection.close()
    os.kill(server.pid, signal.SIGKILL)
    server.process.wait(10)

    server = start_postgres(tmp_path / "postgres", port=server.port, password=PASSWORD)
    connection = await asyncpg.connect(server.url)
    await connection.execute("INSERT INTO kept VALUES (2)")
    await connection.close()
    server.stop(10)
    server.stop(10)

    server = start_postgres(tmp_path / "postgres", password=PASSWORD)
    try:
        connection = await asyncpg.connect(server.url)
        assert await connection.fetchval("SELECT sum(x) FROM kept") == 3
        await connection.close()
    finally:
        server.stop(10)


async def test_postgres_refuses_a_wrong_password_and_never_runs_as_root(tmp_path: Path) -> None:
    server = start_postgres(tmp_path / "postgres", password=PASSWORD)
    try:
        assert psutil.Process(server.pid).uids().real != 0
        wrong = f"postgresql://deepserve:wrong@127.0.0.1:{server.port}/deepserve"
        with pytest.raises(asyncpg.InvalidPasswordError):
            await asyncpg.connect(wrong)
        assert not (tmp_path / "postgres" / "password.new").exists()
    finally:
        server.stop(10)


async def test_a_postgres_left_behind_is_ended_before_the_next_one(tmp_path: Path) -> None:
    first = start_postgres(tmp_path / "postgres", password=PASSWORD)
    second = start_postgres(tmp_path / "postgres", password=PASSWORD)
    try:
        assert first.process.wait(5) == 0
        connection = await asyncpg.connect(second.url)
        assert await connection.fetchval("SELECT 1") == 1
        await connection.close()
    finally:
        second.stop(10)


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    server = start_postgres(tmp_path / "postgres", password=PASSWORD)
    server.stop(10)
    (tmp_path / "postgres" / "cluster" / "postgresql.conf").write_text("nonsense\n")
    with pytest.raises(SettingsError, match=r"postgresql.conf. line 1"):
        start_postgres(tmp_path / "postgres", password=PASSWORD)


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    first = start_nats(tmp_path / "one")
    try:
        with pytest.raises(SettingsError, match="address already in use"):
            start_nats(tmp_path / "two", port=first.port)
        with pytest.raises(SettingsError, match=r"(?i)address already in use"):
            start_postgres(tmp_path / "three", port=first.port, password=PASSWORD)
    finally:
        first.stop(10)
