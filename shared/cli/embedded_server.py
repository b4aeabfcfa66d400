"""What the embedded NATS and Postgres have in common: one process over one data folder, its record, its end.

Everything here blocks and belongs in a thread. A server runs in a session of its own, so that Ctrl-C in a terminal
reaches the supervisor alone, which ends its servers in order.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from shared.contracts import limits
from shared.contracts.errors import SettingsError

_LOG_TAIL_BYTES: Final = 4_096
_BORN_SLACK_S: Final = 0.1
"""Two readings of a process's creation time may differ by a clock tick."""
ENVIRONMENT: Final[Mapping[str, str]] = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}
"""All that a server inherits: none of our variables, since they may hold credentials."""


@dataclass(frozen=True)
class EmbeddedServer:
    """A server that is ready. `url` holds its credentials; `signals` end it, the gentle one first."""

    url: str
    pid: int
    port: int
    process: subprocess.Popen[bytes] = field(repr=False)
    signals: tuple[signal.Signals, ...] = field(repr=False)

    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number when a signal ended it."""
        return self.process.poll()

    def stop(self, timeout_s: float) -> None:
        """Blocks until the server has ended. Idempotent. Its data stay."""
        for number in self.signals:
            if self.process.poll() is None:
                self.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_s)
                return


class PortTaken(SettingsError):
    """Somebody else was faster; another free port may be tried."""


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def spawn(command: Sequence[str | Path], folder: Path, **options: Any) -> subprocess.Popen[bytes]:
    """Starts a server of `folder` with its output in `server.log` there; the log of the run before is kept.

    `options` go to subprocess.Popen. Raises SettingsError when the system cannot start it.
    """
    log = folder / "server.log"
    if log.exists():
        log.replace(folder / "server.log.1")
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            env=dict(ENVIRONMENT),
            cwd="/",
            start_new_session=True,
            **options,
        )
    except OSError as error:
        raise SettingsError(f"cannot start {command[0]}: {error.strerror or error}") from error
    finally:
        os.close(descriptor)
    _record(folder, process.pid)
    return process


def wait_ready(
    process: subprocess.Popen[bytes], folder: Path, ready: Callable[[], bool], timeout_s: float = limits.SERVER_READY_S
) -> None:
    """Blocks until `ready()`. Raises SettingsError, with the end of the log, when the server ended or was too slow:
    it does not run any more then."""
    deadline_s = time.monotonic() + timeout_s
    while not ready():
        if process.poll() is not None:
            said = log_tail(folder)
            kind = PortTaken if "address already in use" in said.lower() else SettingsError
            raise kind(f"it ended at once, with code {process.returncode}:\n{said}")
        if time.monotonic() > deadline_s:
            process.kill()
            process.wait()
            raise SettingsError(f"it was not ready within {timeout_s:g} s:\n{log_tail(folder)}")
        time.sleep(limits.READY_POLL_S)


def with_port(port: int, start: Callable[[int], EmbeddedServer]) -> EmbeddedServer:
    """`start(port)`; for port 0 on a free one, and another one where somebody took it meanwhile."""
    for attempt in range(1, limits.START_ATTEMPTS_MAX + 1):
        try:
            return start(port or free_port())
        except PortTaken:
            if port or attempt == limits.START_ATTEMPTS_MAX:
                raise
    raise SettingsError("no attempt to start was allowed")


def end_predecessor(folder: Path, signals: Sequence[signal.Signals]) -> None:
    """Ends the server that a killed supervisor left behind over this folder: two of them would destroy the data."""
    try:
        record = json.loads((folder / "server.json").read_text())
        process = psutil.Process(int(record["pid"]))
        same = abs(process.create_time() - float(record["born_s"])) < _BORN_SLACK_S
    except (OSError, ValueError, KeyError, psutil.NoSuchProcess):
        return
    if not same:
        return
    for number in signals:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            process.send_signal(number)
            process.wait(limits.SERVER_STOP_TIMEOUT_S)
            return
    if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        raise SettingsError(f"process {process.pid} still runs over {folder} and does not end")


def log_tail(folder: Path) -> str:
    """The last lines that the server wrote."""
    try:
        with (folder / "server.log").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").strip()
    except FileNotFoundError:
        return ""


def write_private(path: Path, content: bytes) -> None:
    """A file of mode 0600 with the old or the new content at every moment."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def _record(folder: Path, pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        record = {"pid": pid, "born_s": psutil.Process(pid).create_time()}
        write_private(folder / "server.json", json.dumps(record).encode())
