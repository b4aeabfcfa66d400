"""The supervisor's hold on one process: readiness, restart with back-off, reasons, the end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

from shared.cli import probe
from shared.cli.instance import ProcessState
from shared.cli.keeper import ServiceKeeper, ServiceSpec
from shared.cli.process import alive, born, end_orphan, rotate, spawn, tail
from shared.contracts import limits

DEADLINE_S = 20.0


class Watcher:
    """What a keeper told, and a way to wait for it."""

    def __init__(self) -> None:
        self.states: list[ProcessState] = []
        self.said: list[str] = []
        self._news = asyncio.Event()

    def tell(self, state: ProcessState) -> None:
        self.states.append(state)
        self._news.set()

    async def until(self, wanted: Callable[[ProcessState], bool]) -> ProcessState:
        async with asyncio.timeout(DEADLINE_S):
            while not (self.states and wanted(self.states[-1])):
                self._news.clear()
                await self._news.wait()
        return self.states[-1]


def spec(folder: Path, **environment: str) -> ServiceSpec:
    port_file = folder / "tiny.port"
    variables = {**os.environ, **environment, "DEEPSERVE_PORT_FILE": str(port_file)}
    return ServiceSpec(
        name="tiny-1",
        module="tests.integration.tiny_service",
        environment=variables,
        log=folder / "tiny.log",
        port_file=port_file,
        public_port_file=None,
        pins={"DEEPSERVE_PORT": port_file},
    )


async def test_a_killed_service_comes_back_on_its_port_and_its_log_says_why(tmp_path: Path) -> None:
    seen = Watcher()
    keeper = ServiceKeeper(spec(tmp_path), seen.tell, seen.said.append)
    try:
        async with asyncio.timeout(DEADLINE_S):
            assert await keeper.started() is None
        first = seen.states[-1]
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        again = await seen.until(lambda s: s.state == "ready" and s.pid != first.pid)
        assert again.port == first.port
        assert again.restarts == 1
        assert again.last_exit is not None
        assert again.last_exit.startswith("killed by SIGKILL")
        line = json.loads(tail(tmp_path / "tiny.log").splitlines()[-1])
        assert (line["event"], line["reason"]) == ("service.crashed", again.last_exit)
        assert any("tiny-1 ended: killed by SIGKILL" in said for said in seen.said)
        assert again.port is not None
        assert (await probe.ask(again.port)).body == "ready"
    finally:
        assert await keeper.stop() is True
    assert seen.states[-1].state == "stopped"
    assert not alive(again.pid, again.born_s)


async def test_a_port_that_somebody_took_meanwhile_is_left_to_him(tmp_path: Path) -> None:
    seen = Watcher()
    keeper = ServiceKeeper(spec(tmp_path), seen.tell, seen.said.append)
    try:
        async with asyncio.timeout(DEADLINE_S):
            assert await keeper.started() is None
        first = seen.states[-1]
        assert first.pid is not None
        assert first.port is not None
        os.kill(first.pid, signal.SIGKILL)
        await seen.until(lambda s: s.state == "restarting")
        async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", first.port):
            again = await seen.until(lambda s: s.state == "ready")
        assert again.port != first.port
    finally:
        await keeper.stop()


async def test_a_service_that_never_starts_is_given_up_with_its_reason(tmp_path: Path) -> None:
    seen = Watcher()
    keeper = ServiceKeeper(spec(tmp_path, TINY_CRASH="1"), seen.tell, seen.said.append)
    async with asyncio.timeout(DEADLINE_S):
        assert await keeper.started() == "exit code 3"
    await keeper.stop()
    assert [s.state for s in seen.states].count("starting") == limits.START_ATTEMPTS_MAX
    assert "no reason to live" in keeper.tail()


async def test_who_does_not_end_is_killed_and_named(tmp_path: Path) -> None:
    seen = Watcher()
    keeper = ServiceKeeper(spec(tmp_path, TINY_STUBBORN="1"), seen.tell, seen.said.append)
    async with asyncio.timeout(DEADLINE_S):
        assert await keeper.started() is None
    pid, born_s = seen.states[-1].pid, seen.states[-1].born_s
    assert await keeper.stop(timeout_s=0.2) is False
    assert not alive(pid, born_s)


async def test_stop_during_the_start_leaves_nothing(tmp_path: Path) -> None:
    seen = Watcher()
    keeper = ServiceKeeper(spec(tmp_path), seen.tell, seen.said.append)
    await asyncio.sleep(0)
    async with asyncio.timeout(DEADLINE_S):
        await keeper.stop()
    assert all(not alive(s.pid, s.born_s) for s in seen.states)


async def test_an_orphan_is_ended_only_if_it_is_the_very_process(tmp_path: Path) -> None:
    child = await spawn(["sleep", "60"], os.environ, tmp_path / "sleep.log")
    assert child.born_s is not None
    await end_orphan(child.pid, child.born_s - 100, signal.SIGTERM, DEADLINE_S)
    assert born(child.pid) == child.born_s
    waiting = asyncio.create_task(child.wait())
    await end_orphan(child.pid, child.born_s, signal.SIGTERM, DEADLINE_S)
    assert await waiting == -signal.SIGTERM


async def test_a_log_that_grew_too_large_is_moved_aside_under_its_writer(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    with log.open("ab") as writer:
        writer.write(b"old\n")
        writer.truncate(limits.LOG_BYTES_MAX + 1)
        writer.flush()
        assert rotate(log) is True
        writer.write(b"new\n")
    assert log.read_bytes() == b"new\n"
    assert (tmp_path / "x.log.1").read_bytes().startswith(b"old\n")
    assert rotate(log) is False
