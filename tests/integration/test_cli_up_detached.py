"""`up --detach` and an instance of a bench's own, when whoever started them leaves or is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from shared.cli.instance import Instance as Layout
from tests.e2e.instance import DEEPSERVE, Instance

pytestmark = pytest.mark.servers

DEADLINE_S = 120.0
POLL_S = 0.1


def until(true: Callable[[], bool], what: str) -> None:
    """Processes tell a stranger nothing: looks again and again, within the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(POLL_S)


def environment(tmp_path: Path) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DEEPSERVE_")}
    return {**clean, "TMPDIR": str(tmp_path)}


def processes_of(folder: Path) -> list[psutil.Process]:
    """Everything that was started for a data directory below `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), *process.environ().values()]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if any(str(folder) in word for word in words) and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def test_an_instance_whose_starter_is_not_read_any_more_gets_ready(tmp_path: Path) -> None:
    instance = Instance(tmp_path / "data")
    line = (
        f"{DEEPSERVE} up --detach --engine hash --port 0 --data {instance.data} 2>&1 | head -1; exit ${{PIPESTATUS[0]}}"
    )
    try:
        done = subprocess.run(
            ["bash", "-c", line],
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        assert len(done.stdout.splitlines()) == 1
        assert {s["state"] for s in instance.status()["services"]} == {"ready"}
    finally:
        instance.down()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_bench_that_is_ended_takes_its_own_instance_down(tmp_path: Path, number: signal.Signals) -> None:
    command = [str(DEEPSERVE), "bench", "memory", "--quick", "--data", str(tmp_path / "none")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(tmp_path)
    ) as bench:

        def started() -> bool:
            return any(Layout(folder / "data").holder() for folder in tmp_path.glob("deepserve-bench-*"))

        until(lambda: bench.poll() is not None or started(), "the bench has an instance of its own")
        assert bench.poll() is None, bench.communicate()[0]
        bench.send_signal(number)
        said, _ = bench.communicate(timeout=DEADLINE_S)
    assert bench.returncode == 128 + number, said
    until(lambda: not processes_of(tmp_path), "nothing is left of it")
    assert list(tmp_path.glob("deepserve-bench-*")) == []
