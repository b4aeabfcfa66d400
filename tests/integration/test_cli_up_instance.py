"""An instance from its start to its end, with real servers and real processes, on the engine's double."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from shared.cli.embedded_nats import start_nats
from shared.cli.embedded_postgres import start_postgres
from shared.cli.instance import Instance as Layout
from shared.cli.process import alive
from tests.e2e.instance import DEEPSERVE, Instance

pytestmark = pytest.mark.servers

FIVE = {"billing", "cache_index", "prefill", "decode", "gateway"}
DEADLINE_S = 90.0
POLL_S = 0.1


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    running = Instance(tmp_path_factory.mktemp("up") / "data", "--engine", "hash")
    running.up()
    try:
        yield running
    finally:
        running.down()


def until(true: Callable[[], bool], what: str) -> None:
    """Processes tell a stranger nothing: looks again and again, within the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(POLL_S)


def failed(instance: Instance, *arguments: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """(exit code, standard error) of a command."""
    done = subprocess.run(
        [str(DEEPSERVE), *arguments, "--data", str(instance.data)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, **(environment or {})},
        check=False,
    )
    return done.returncode, done.stderr


def services(instance: Instance) -> dict[str, dict[str, Any]]:
    return {s["name"]: s for s in instance.status()["services"]}


def ask(instance: Instance) -> httpx2.Response:
    found = instance.status()
    body = {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": "Say something."}],
        "max_tokens": 4,
    }
    headers = {"Authorization": f"Bearer {found['api_key']}"}
    return httpx2.post(f"{found['gateway_url']}/v1/chat/completions", json=body, headers=headers, timeout=60)


def answers(instance: Instance) -> bool:
    try:
        return ask(instance).status_code == 200
    except httpx2.TransportError:
        return False


def test_status_tells_all_and_nothing_else(instance: Instance) -> None:
    found = instance.status()
    assert set(found) == {"gateway_url", "admin_url", "admin_token", "api_key", "data", "services"}
    assert found["data"] == str(instance.data)
    assert found["api_key"].startswith("sk-")
    assert all(set(s) == {"name", "pid", "state", "port"} for s in found["services"])
    assert {s["name"].split("-")[0] for s in found["services"]} == FIVE
    assert {s["state"] for s in found["services"]} == {"ready"}
    assert httpx2.get(f"{found['gateway_url']}/readyz").status_code == 200
    headers = {"Authorization": f"Bearer {found['admin_token']}"}
    accounts = httpx2.get(f"{found['admin_url']}/admin/v1/accounts", headers=headers).json()["accounts"]
    assert accounts[0]["name"] == "demo"


def test_no_secret_is_on_a_command_line_or_readable_for_others(instance: Instance) -> None:
    found = instance.status()
    password = (instance.data / "secrets" / "postgres.password").read_text()
    secrets = (found["admin_token"], found["api_key"], password)
    state = Layout(instance.data).read_state()
    assert state is not None
    for process in (*state.services, *state.servers):
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode()
        assert not any(secret in command for secret in secrets), process.name
    for path in (instance.data / "run").iterdir():
        assert not any(secret in path.read_text() for secret in secrets), path
    for path in (instance.data / "secrets").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600, path


def test_a_request_is_answered(instance: Instance) -> None:
    reply = ask(instance)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 4


def test_a_second_up_says_who_uses_the_directory(instance: Instance) -> None:
    holder = Layout(instance.data).holder()
    for options in (("up",), ("up", "--detach")):
        code, said = failed(instance, *options, "--port", "0")
        assert code == 1
        assert f"already in use by deepserve up, process {holder}" in said


def test_logs_are_json_lines_of_the_named_service(instance: Instance) -> None:
    lines = instance.command("logs", "gateway", "-n", "5").splitlines()
    assert lines
    assert all("event" in json.loads(line) for line in lines)
    assert any(line.startswith("billing: ") for line in instance.command("logs").splitlines())
    code, said = failed(instance, "logs", "nonsense")
    assert code == 2
    assert "there are: " in said


def test_accounts_and_keys_are_administered(instance: Instance) -> None:
    account = instance.command("admin", "account", "create", "--name", "firm", "--credit", "5").splitlines()[0]
    assert re.fullmatch(r"acct_[0-9a-f]{32}", account)
    instance.command("admin", "account", "credit", "--account", account, "--amount", "0.5")
    instance.command("admin", "account", "credit", "--account", account, "--amount", "2", "--granted")
    listed = {a["id"]: a for a in json.loads(instance.command("admin", "account", "list", "--json"))}
    assert listed[account]["topped_up_balance"] == "5.50"
    assert listed[account]["granted_balance"] == "2.00"
    key = instance.command("admin", "key", "create", "--account", account).strip()
    assert key.startswith("sk-")
    known = json.loads(instance.command("admin", "key", "list", "--account", account, "--json"))
    assert [k["revoked"] for k in known] == [False]
    instance.command("admin", "key", "revoke", known[0]["id"])
    url = instance.status()["gateway_url"] + "/user/balance"
    until(
        lambda: httpx2.get(url, headers={"Authorization": f"Bearer {key}"}).status_code == 401,
        "a revoked key is refused",
    )
    code, said = failed(instance, "admin", "key", "create", "--account", "acct_" + "0" * 32)
    assert code == 1
    assert said.startswith("deepserve admin: ")


@pytest.mark.parametrize("name", ["prefix", "memory"])
def test_a_bench_prints_a_table_and_writes_its_figures(instance: Instance, tmp_path: Path, name: str) -> None:
    file = tmp_path / "figures.json"
    table = instance.command("bench", name, "--quick", "--json", str(file), timeout_s=DEADLINE_S)
    written = json.loads(file.read_text())
    assert written["bench"] == name
    assert written["machine"] in table
    if name == "prefix":
        assert set(written["figures"]) == {"1000", "3000"}
        assert [f["hit_tokens"] for f in written["figures"].values()] == [960, 2944]
        parts = written["figures"]["3000"]["hit_parts_s"]
        assert {"queue", "tag", "hold", "lookup", "read", "compute", "delivery", "handoff"} <= set(parts)
        assert {aim["bound"] for aim in written["aims"]} == {10.0, 1.5}
    else:
        assert {n.split("-")[0] for n in written["figures"]} == {*FIVE, "nats", "postgres"}
        assert all(0 < f["rest"]["pss_mib"] <= f["rest"]["rss_mib"] for f in written["figures"].values())


@pytest.mark.parametrize("kind", sorted(FIVE))
def test_a_killed_service_is_restarted_and_its_log_says_why(instance: Instance, kind: str) -> None:
    before = instance.status()
    name, service = next((n, s) for n, s in services(instance).items() if n.startswith(kind))
    health = (instance.data / "run" / f"{name}.port").read_text()
    os.kill(service["pid"], signal.SIGKILL)

    def back() -> bool:
        now = services(instance)[name]
        return now["pid"] not in (None, service["pid"]) and now["state"] == "ready"

    until(back, f"{name} is ready again")
    after = instance.status()
    assert (after["gateway_url"], after["admin_url"]) == (before["gateway_url"], before["admin_url"])
    assert (instance.data / "run" / f"{name}.port").read_text() == health
    assert services(instance)[name]["port"] == service["port"]
    log = (instance.data / "logs" / f"{name}.log").read_text()
    assert "killed by SIGKILL" in log
    until(lambda: answers(instance), "requests are answered again")


@pytest.mark.parametrize("server", ["nats", "postgres"])
def test_a_killed_server_is_restarted_where_it_was(instance: Instance, server: str) -> None:
    def look() -> Any:
        state = Layout(instance.data).read_state()
        assert state is not None
        return next(p for p in state.servers if p.name == server)

    before = look()
    os.kill(before.pid, signal.SIGKILL)
    until(lambda: look().state == "ready" and look().pid != before.pid, f"{server} is back")
    assert look().port == before.port
    assert look().last_exit.startswith("killed by SIGKILL")
    until(lambda: "server.crashed" in instance.command("logs", server, "-n", "1000"), "its log says that it ended")
    assert "killed by SIGKILL" in instance.command("logs", server, "-n", "1000")
    assert f"{server} ended: killed by SIGKILL" in (instance.data / "logs" / "up.log").read_text()
    until(lambda: answers(instance), "requests are answered again")


def test_down_ends_all_and_up_keeps_accounts_and_key(instance: Instance) -> None:
    state = Layout(instance.data).read_state()
    assert state is not None
    key = instance.status()["api_key"]
    accounts = {a["id"] for a in json.loads(instance.command("admin", "account", "list", "--json"))}
    instance.down()
    assert not any(alive(p.pid, p.born_s) for p in (*state.services, *state.servers))
    code, said = failed(instance, "status")
    assert code == 1
    assert "no instance is running" in said
    instance.down()
    instance.up()
    assert instance.status()["api_key"] == key
    assert {a["id"] for a in json.loads(instance.command("admin", "account", "list", "--json"))} == accounts
    assert ask(instance).status_code == 200


def test_what_a_killed_supervisor_left_is_ended_by_the_next_up(instance: Instance) -> None:
    layout = Layout(instance.data)
    holder, state = layout.holder(), layout.read_state()
    assert holder is not None
    assert state is not None
    os.kill(holder, signal.SIGKILL)
    until(lambda: layout.holder() is None, "the lock is free")
    assert any(alive(p.pid, p.born_s) for p in state.services)
    code, said = failed(instance, "status")
    assert code == 1
    assert "still runs: billing (" in said
    assert "`deepserve down` ends them" in said
    shown = json.loads(instance.command("status", "--json", check=False))
    assert {s["name"].split("-")[0] for s in shown["services"]} == FIVE
    assert "left over" in {s["state"] for s in shown["services"]}
    instance.up()
    assert not any(alive(p.pid, p.born_s) for p in (*state.services, *state.servers))
    assert ask(instance).status_code == 200


def test_another_instance_lives_beside_it_on_outside_servers_and_ends_with_ctrl_c(
    instance: Instance, tmp_path: Path
) -> None:
    nats = start_nats(tmp_path / "nats")
    postgres = start_postgres(tmp_path / "postgres", password="outside")
    other = Instance(tmp_path / "data")
    environment = {
        **os.environ,
        "DEEPSERVE_NATS_URL": nats.url,
        "DEEPSERVE_DATABASE_URL": postgres.url,
        "DEEPSERVE_STORE": f"dir:{tmp_path / 'pool'}",
        "DEEPSERVE_MODEL_DIR": str(instance.data / "model"),
    }
    command = [str(DEEPSERVE), "up", "--engine", "hash", "--port", "0", "--data", str(other.data)]
    try:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as running:
            try:
                until(lambda: running.poll() is not None or is_ready(other), "the other instance is ready")
                assert running.poll() is None, running.communicate()[1]
                assert other.status()["gateway_url"] != instance.status()["gateway_url"]
                assert ask(other).status_code == 200
                assert ask(instance).status_code == 200
                state = Layout(other.data).read_state()
                assert state is not None
                assert state.servers == ()
                assert not (other.data / "model").exists()
                key = other.status()["api_key"]
            finally:
                running.send_signal(signal.SIGINT)
                out, said = running.communicate(timeout=DEADLINE_S)
        assert running.returncode == 0, said
        assert f"curl http://127.0.0.1:{state.gateway_url.rpartition(':')[2]}/v1/chat/completions" in out  # type: ignore[union-attr]
        assert key in out
        assert key not in said
        assert not any(alive(p.pid, p.born_s) for p in state.services)
    finally:
        nats.stop(10)
        postgres.stop(10)


def is_ready(instance: Instance) -> bool:
    state = Layout(instance.data).read_state() if (instance.data / "run").exists() else None
    return state is not None and state.phase == "ready"


def test_a_port_in_use_is_named_at_once(instance: Instance, tmp_path: Path) -> None:
    port = instance.status()["gateway_url"].rpartition(":")[2]
    code, said = failed(Instance(tmp_path / "data"), "up", "--port", port)
    assert code == 1
    assert f"port {port} of 127.0.0.1 is in use" in said
