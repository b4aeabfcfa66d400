"""The billing process itself, started as in production: settings, readiness, both of its sides, drain, restart."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from nacl.signing import SigningKey

from services.billing.accounts import key_digest
from shared.contracts import subjects
from shared.contracts.errors import AuthenticationFailed
from shared.contracts.ids import RequestId
from shared.contracts.messages import Authorize, AuthorizeReply, Hold, HoldReply, Revoked, Settled
from shared.runtime import rpc
from shared.runtime.bus import NatsBus
from tests.integration.billing_books import MODEL, settlement, usage

pytestmark = pytest.mark.servers

START_S = 30
TOKEN = "the-operators-token"
CLUSTER_KEY = bytes(32)


@pytest.fixture
def environment(tmp_path: Path, nats_url: str, fresh_database: str) -> dict[str, str]:
    """What the process is started with; its files in `tmp_path`."""
    seed = bytes(range(32))
    secrets = {
        "signing_key": seed,
        "verify_key": bytes(SigningKey(seed).verify_key),
        "master_key": bytes(range(32, 64)),
        "cluster_key": CLUSTER_KEY,
        "admin_token": TOKEN.encode(),
    }
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DEEPSERVE_")}
    for name, secret in secrets.items():
        path = tmp_path / name
        path.touch(mode=0o600)
        path.write_bytes(secret)
        environment[f"DEEPSERVE_{name.upper()}_FILE"] = str(path)
    return environment | {"DEEPSERVE_NATS_URL": nats_url, "DEEPSERVE_DATABASE_URL": fresh_database}


class Process:
    """Its log is read to its end, and shown; `ready` waits for the line that says so."""

    def __init__(self, child: asyncio.subprocess.Process, admin_port_file: Path, health_port_file: Path) -> None:
        self.child = child
        self._admin_port_file = admin_port_file
        self._health_port_file = health_port_file
        self._said_ready = asyncio.Event()
        self._reading = asyncio.create_task(self._read_log())

    async def _read_log(self) -> None:
        assert self.child.stderr is not None
        async for line in self.child.stderr:
            sys.stderr.write(line.decode())
            if b'"service.ready"' in line:
                self._said_ready.set()

    async def ready(self) -> None:
        waiting = asyncio.create_task(self._said_ready.wait())
        await asyncio.wait({waiting, self._reading}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        assert self._said_ready.is_set(), "the process ended, or its time, before it was ready"
        async with httpx2.AsyncClient() as client:
            health = f"http://127.0.0.1:{self._health_port_file.read_text().strip()}"
            assert (await client.get(f"{health}/readyz")).status_code == 200

    async def ended(self) -> int:
        async with asyncio.timeout(START_S):
            await self._reading
            return await self.child.wait()

    def admin(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{self._admin_port_file.read_text().strip()}/admin/v1",
            headers={"Authorization": f"Bearer {TOKEN}"},
            timeout=10,
        )

    async def stop(self) -> int:
        self.child.send_signal(signal.SIGTERM)
        return await self.ended()


async def launch(environment: dict[str, str], tmp_path: Path, name: str) -> Process:
    admin_port_file, health_port_file = tmp_path / f"{name}.admin", tmp_path / f"{name}.health"
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.billing.main",
        env=environment
        | {
            "DEEPSERVE_ADMIN_PORT_FILE": str(admin_port_file),
            "DEEPSERVE_HEALTH_PORT_FILE": str(health_port_file),
        },
        stderr=asyncio.subprocess.PIPE,
    )
    return Process(child, admin_port_file, health_port_file)


@asynccontextmanager
async def billing(environment: dict[str, str], tmp_path: Path, name: str = "one") -> AsyncIterator[Process]:
    process = await launch(environment, tmp_path, name)
    try:
        await process.ready()
        yield process
        assert await process.stop() == 0
    finally:
        if process.child.returncode is None:
            process.child.kill()
            await process.ended()


async def create(process: Process) -> tuple[dict[str, Any], dict[str, Any]]:
    """(account, key)"""
    async with process.admin() as client:
        body = {"name": "Acme", "credit": "1"}
        account = (await client.post("/accounts", json=body, headers={"Idempotency-Key": "k"})).json()
        key = (await client.post(f"/accounts/{account['id']}/keys", json={})).json()
    return account, key


async def authorize(bus: NatsBus, key: str) -> str:
    message = Authorize(key_digest=key_digest(key), key_hint=key[-4:])
    return (await rpc.call(bus, subjects.BILLING_AUTHORIZE, message, AuthorizeReply)).tag


async def test_two_processes_serve_one_set_of_books_and_a_restart_keeps_them(
    environment: dict[str, str], tmp_path: Path, nats_url: str
) -> None:
    bus = await NatsBus.connect(nats_url, CLUSTER_KEY, "test")
    heard: asyncio.Queue[Revoked] = asyncio.Queue()

    async def hear(subject: str, payload: bytes) -> None:
        heard.put_nowait(msgspec.msgpack.decode(payload, type=Revoked))

    await bus.subscribe(subjects.REVOKED, hear)
    async with billing(environment, tmp_path) as one, billing(environment, tmp_path, "two") as two:
        account, key = await create(one)
        tag = await authorize(bus, key["key"])
        hold = Hold(
            tag=tag,
            request=RequestId("r1"),
            model=MODEL,
            user_id=None,
            traffic_class="chat",
            prompt_tokens=1_000,
            max_output_tokens=100,
            deadline_s=time.time() + 60,
        )
        replies = [await rpc.call(bus, subjects.BILLING_HOLD, hold, HoldReply) for _ in range(8)]
        assert {reply.hold_nano for reply in replies} == {210_000}
        assert len({reply.grant for reply in replies}) == 1
        async with two.admin() as client:
            assert (await client.get(f"/accounts/{account['id']}")).json()["held"] == "0.00021"

    async with billing(environment, tmp_path) as again:
        report = settlement(replies[0].grant, usage())
        settled = await rpc.call(bus, subjects.BILLING_SETTLE, report, Settled)
        assert settled.amount_nano == 174_000
        async with again.admin() as client:
            found = (await client.get(f"/accounts/{account['id']}")).json()
            assert (found["held"], found["total_balance"]) == ("0.00", "0.999826")
            assert (await client.get("/reconciliation")).json()["sound"] is True
            assert (await client.delete(f"/keys/{key['id']}")).status_code == 204
        async with asyncio.timeout(5):
            revoked = await heard.get()
        assert (revoked.account, revoked.key_id) == (account["id"], key["id"])
        with pytest.raises(AuthenticationFailed):
            await authorize(bus, key["key"])
    await bus.close()


@pytest.mark.parametrize(
    ("name", "content"),
    [("verify_key", bytes(32)), ("admin_token", b""), ("prices", b"[[price]]\n"), ("master_key", b"short")],
)
async def test_wrong_secrets_and_prices_stop_the_start(
    environment: dict[str, str], tmp_path: Path, name: str, content: bytes
) -> None:
    path = tmp_path / name
    path.touch(mode=0o600)
    path.write_bytes(content)
    process = await launch(environment | {f"DEEPSERVE_{name.upper()}_FILE": str(path)}, tmp_path, "wrong")
    assert await process.ended() == 2
