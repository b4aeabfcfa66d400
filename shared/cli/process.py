"""One child process: start, wait, stop by its own handle, and say why it ended. Knows nothing of what it runs."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import psutil

from shared.contracts import limits


class ChildProcess:
    """A running child in a session of its own, so that Ctrl-C in a terminal reaches the supervisor alone."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid
        self.born_s = born(process.pid)
        self.started_s = time.monotonic()

    async def wait(self) -> int:
        """The exit code; minus the signal's number when a signal ended it."""
        return await self._process.wait()

    async def stop(self, timeout_s: float = limits.STOP_TIMEOUT_S) -> bool:
        """SIGTERM, then SIGKILL after `timeout_s`. Returns whether it ended by itself. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()
            return False
        return True

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


async def spawn(command: Sequence[str], environment: Mapping[str, str], log: Path) -> ChildProcess:
    """Both outputs are appended to `log`. Raises OSError when the system cannot start it."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            env=dict(environment),
            start_new_session=True,
        )
    finally:
        os.close(descriptor)
    return ChildProcess(process)


def describe_exit(code: int) -> str:
    """For a person: what an exit code means."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (kill -9, or the system was out of memory)" if -code == signal.SIGKILL else ""
    return f"killed by {name}{hint}"


def born(pid: int) -> float | None:
    """When the process with this pid was created, by the system's clock; None when there is none (or a zombie)."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return float(process.create_time())
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return 0.0


def alive(pid: int | None, born_s: float | None) -> bool:
    """Whether this very process still runs: a pid that was given to another process since does not count."""
    if pid is None or born_s is None:
        return False
    now = born(pid)
    # The two readings of a creation time may differ by a clock tick.
    return now is not None and abs(now - born_s) < 0.1


async def end_orphan(pid: int, born_s: float, first: signal.Signals, timeout_s: float) -> None:
    """Ends a process that a killed supervisor left behind: `first`, then SIGKILL, each only to that very process.

    `first` is SIGINT for Postgres: on SIGTERM it waits for its clients.
    """
    for number in (first, signal.SIGKILL):
        if not alive(pid, born_s):
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        await gone(pid, born_s, poll_s=limits.READY_POLL_S, timeout_s=timeout_s)


async def gone(pid: int, born_s: float | None, *, poll_s: float, timeout_s: float = math.inf) -> bool:
    """Waits for the end of a process that is not our child, or that somebody else waits for."""
    deadline = time.monotonic() + timeout_s
    while alive(pid, born_s):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(poll_s)
    return True


def note(log: Path, event: str, **fields: object) -> None:
    """Adds the supervisor's own line to a service's log, in the form of the service's lines."""
    line = {"service": "supervisor", **fields, "event": event, "level": "warning", "timestamp": datetime.now(UTC)}
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, msgspec.json.encode(line) + b"\n")
    finally:
        os.close(descriptor)


def rotate(log: Path) -> bool:
    """Moves a log that is too large aside. Writers append, so truncating under them loses a few lines at most."""
    try:
        if log.stat().st_size <= limits.LOG_BYTES_MAX:
            return False
    except FileNotFoundError:
        return False
    shutil.copyfile(log, log.with_suffix(".log.1"))
    os.chmod(log.with_suffix(".log.1"), 0o600)
    os.truncate(log, 0)
    return True


def size_of(log: Path) -> int:
    """In bytes; 0 when there is none."""
    try:
        return log.stat().st_size
    except FileNotFoundError:
        return 0


def tail(log: Path, lines: int = limits.LOG_TAIL_LINES, *, since: int = 0) -> str:
    """The last lines of a log after its first `since` bytes, "" when there is none. Reads the file's end only."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, min(since, size), size - lines * 4096))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
