"""The life of a process: readiness, draining, failure, exit code. Whole processes are started where it matters."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from shared.contracts.errors import ClaimRefused, InternalError, SettingsError
from shared.runtime.health import HealthServer, write_port
from shared.runtime.metrics import Metrics
from shared.runtime.service import Service, as_internal_error

DEADLINE_S = 10.0


async def nothing() -> None:
    return None


async def forever() -> None:
    await asyncio.Event().wait()


async def test_ready_is_what_start_says_and_every_condition_confirms() -> None:
    service = Service("test", 1.0)
    assert service.missing() == "starting"
    service.waiting_for("weights")
    assert service.missing() == "waiting for weights"
    service.ready()
    assert service.missing() is None
    connected = False
    service.require(lambda: None if connected else "no connection to NATS")
    assert service.missing() == "no connection to NATS"
    connected = True
    assert service.missing() is None
    service.stop("test")
    assert service.missing() == "draining"


async def test_draining_tasks_finish_then_others_are_cancelled_then_adapters_close_backwards() -> None:
    service = Service("test", DEADLINE_S)
    order: list[str] = []
    started = asyncio.Event()

    async def worker() -> None:
        await service.draining.wait()
        order.append("worker finished")

    async def background() -> None:
        try:
            await forever()
        finally:
            order.append("background cancelled")

    async def close(name: str) -> None:
        order.append(f"{name} closed")

    async def start() -> None:
        service.on_stop("database", lambda: close("database"))
        service.on_stop("bus", lambda: close("bus"))
        service.spawn(background(), "background")
        service.spawn(worker(), "worker", drains=True)
        service.spawn(nothing(), "short")
        started.set()

    async with asyncio.timeout(DEADLINE_S):
        living = asyncio.create_task(service.live(start()))
        await started.wait()
        service.stop("SIGTERM")
        await living
    assert order == ["worker finished", "background cancelled", "bus closed", "database closed"]


async def test_a_failed_task_drains_the_process_and_is_its_failure() -> None:
    service = Service("test", DEADLINE_S)
    closed: list[str] = []

    async def fail() -> None:
        raise LookupError("broken engine")

    async def close() -> None:
        closed.append("bus")

    async def worker() -> None:
        await service.draining.wait()
        closed.append("worker")

    async def start() -> None:
        service.on_stop("bus", close)
        service.spawn(worker(), "worker", drains=True)
        service.spawn(fail(), "engine")

    with pytest.raises(LookupError, match="broken engine"):
        async with asyncio.timeout(DEADLINE_S):
            await service.live(start())
    assert closed == ["worker", "bus"]


async def test_a_start_that_fails_closes_what_it_had_opened() -> None:
    service = Service("test", DEADLINE_S)
    closed: list[str] = []

    async def close() -> None:
        closed.append("database")

    async def close_badly() -> None:
        raise LookupError("already gone")

    async def start() -> None:
        service.on_stop("database", close)
        service.on_stop("bus", close_badly)
        raise SettingsError("no key")

    with pytest.raises(SettingsError):
        async with asyncio.timeout(DEADLINE_S):
            await service.live(start())
    assert closed == ["database"]


async def test_a_start_that_takes_long_can_be_stopped() -> None:
    service = Service("test", DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S):
        living = asyncio.create_task(service.live(forever()))
        await asyncio.sleep(0)
        service.stop("SIGINT")
        await living


async def test_work_that_does_not_drain_is_cancelled_after_its_time_or_a_second_signal() -> None:
    for drain_timeout_s, signals in ((0.01, 1), (1_000.0, 2)):
        service = Service("test", drain_timeout_s)

        started = asyncio.Event()

        async def start(service: Service = service, started: asyncio.Event = started) -> None:
            service.spawn(forever(), "stubborn", drains=True)
            started.set()

        async with asyncio.timeout(DEADLINE_S):
            living = asyncio.create_task(service.live(start()))
            await started.wait()
            for _ in range(signals):
                service.stop("SIGTERM")
            await living


async def test_only_errors_of_the_tree_leave_a_handler() -> None:
    async def refuse() -> None:
        raise ClaimRefused("old epoch")

    async def break_down() -> None:
        raise KeyError("secret detail")

    with pytest.raises(ClaimRefused):
        await as_internal_error(refuse())
    with pytest.raises(InternalError) as hidden:
        await as_internal_error(break_down())
    assert "secret" not in hidden.value.message


async def test_health_answers_over_http() -> None:
    metrics = Metrics("prefill")
    metrics.counter("requests_total", "Requests.", "outcome").labels("ok").inc(3)
    metrics.watch_counts("misses_total", "Misses.", "reason", lambda: {"absent": 2.0})
    missing: str | None = "waiting for weights"
    server = HealthServer(lambda: missing, metrics.render)
    port = await server.start(0)

    def ask(path: str, method: str = "GET") -> tuple[int, str]:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    async def answer(path: str, method: str = "GET") -> tuple[int, str]:
        return await asyncio.to_thread(ask, path, method)

    try:
        assert await answer("/healthz") == (200, "ok\n")
        assert await answer("/readyz") == (503, "waiting for weights\n")
        missing = None
        assert await answer("/readyz?x=1") == (200, "ready\n")
        assert (await answer("/other"))[0] == 404
        assert (await answer("/healthz", "POST"))[0] == 405
        status, text = await answer("/metrics")
        assert status == 200
        assert 'deepserve_requests_total{outcome="ok"} 3.0' in text
        assert 'deepserve_misses_total{reason="absent"} 2.0' in text
        peak = next(line for line in text.splitlines() if line.startswith("deepserve_peak_resident_memory_bytes"))
        assert float(peak.split()[1]) > 2**20
        assert "process_cpu_seconds_total" in text
    finally:
        await server.close()


async def test_what_is_no_http_gets_nothing_and_harms_nobody() -> None:
    server = HealthServer(lambda: None, lambda: b"")
    port = await server.start(0)
    try:
        for rubbish in (b"\x00" * 20_000 + b"\r\n\r\n", b"GET /healthz"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(rubbish)
            writer.write_eof()
            async with asyncio.timeout(DEADLINE_S):
                try:
                    assert b"200" not in await reader.read()
                except ConnectionError:
                    pass
            writer.close()
        with pytest.raises(SettingsError, match="health port"):
            await HealthServer(lambda: None, lambda: b"").start(port)
    finally:
        await server.close()


def test_a_port_file_that_cannot_be_written_is_a_settings_error(tmp_path: Path) -> None:
    write_port(tmp_path / "port", 4711)
    assert (tmp_path / "port").read_text() == "4711\n"
    with pytest.raises(SettingsError, match="nowhere"):
        write_port(tmp_path / "nowhere" / "port", 1)


PROGRAM = textwrap.dedent("""
    import asyncio, sys
    from shared.runtime.config import GatewaySettings
    from shared.runtime.service import Service, run

    async def work(service):
        await service.draining.wait()
        print("drained", flush=True)

    async def start(service, settings):
        if settings.model == "broken":
            raise LookupError("no such model")
        service.spawn(work(service), "work", drains=True)
        service.ready()

    sys.exit(run(GatewaySettings, start))
""")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith("DEEPSERVE_")},
        "DEEPSERVE_NATS_URL": "nats://deepserve:hunter2@127.0.0.1:4222",
        "DEEPSERVE_CLUSTER_KEY_FILE": "/none",
        "DEEPSERVE_VERIFY_KEY_FILE": "/none",
        "DEEPSERVE_MODEL_DIR": "/none",
        "DEEPSERVE_HEALTH_PORT_FILE": str(tmp_path / "port"),
    }


def process(environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def events(standard_error: str) -> list[str]:
    return [json.loads(line)["event"] for line in standard_error.splitlines()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_the_exit_code_is_zero(
    environment: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    with process(environment) as running:
        assert running.stderr is not None
        seen = ""
        while "service.ready" not in seen:
            line = running.stderr.readline()
            assert line, seen
            seen += line
        port = int((tmp_path / "port").read_text())
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=DEADLINE_S) as reply:
            assert reply.status == 200
        running.send_signal(number)
        output, errors = running.communicate(timeout=DEADLINE_S)
    assert running.returncode == 0
    assert output == "drained\n"
    said = events(seen + errors)
    assert said[0] == "service.starting"
    assert said[-2:] == ["service.draining", "service.stopped"]
    assert "hunter2" not in seen + errors


@pytest.mark.parametrize(
    ("name", "value", "code", "event"),
    [
        ("DEEPSERVE_MODEL", "broken", 1, "service.failed"),
        ("DEEPSERVE_PORT", "many", 2, "service.refused"),
        ("DEEPSERVE_PROT", "1", 2, "service.refused"),
    ],
)
def test_what_went_wrong_is_in_the_exit_code_and_the_log(
    environment: dict[str, str], name: str, value: str, code: int, event: str
) -> None:
    with process({**environment, name: value}) as running:
        _, errors = running.communicate(timeout=DEADLINE_S)
    assert running.returncode == code
    assert events(errors)[-1] == event
