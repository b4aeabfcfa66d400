"""The data directory of one instance: its layout, its lock, and the state that the running supervisor writes.

    DATA/
      secrets/          0700, every file 0600: keys, the administrator's token, the demo account
      nats/ postgres/   the embedded servers' files
      store/            the directory block store
      model/            the converted model
      logs/             one file for each process; 0700
      run/lock          held by the supervisor as long as it lives; its text is the supervisor's pid
      run/state.json    who runs, where, in what state; holds no secret
      run/NAME.port     where a service serves /readyz

The lock and not the state says whether an instance runs: a killed supervisor leaves its state behind, never its lock.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

import msgspec

from shared.cli.failure import CommandFailed
from shared.cli.process import alive

_LOCK_ATTEMPTS: Final = 10
_LOCK_RETRY_S: Final = 0.02

Phase = Literal["starting", "ready", "draining"]
State = Literal["waiting", "starting", "ready", "restarting", "stopped"]


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """One process. `born_s`: its creation time as the system tells it; with the pid it names the process for ever."""

    name: str
    pid: int | None = None
    born_s: float | None = None
    state: State = "waiting"
    port: int | None = None
    restarts: int = 0
    last_exit: str | None = None


class InstanceState(msgspec.Struct, frozen=True, kw_only=True):
    """`services`: the five kinds, one entry a process; `servers`: the embedded NATS and Postgres."""

    phase: Phase
    pid: int
    engine: str
    gateway_url: str | None = None
    admin_url: str | None = None
    services: tuple[ProcessState, ...] = ()
    servers: tuple[ProcessState, ...] = ()


class Instance:
    """Paths of one data directory. Making one touches nothing; `prepare` creates the folders."""

    def __init__(self, data: Path) -> None:
        self.data = data.absolute()
        self.secrets = self.data / "secrets"
        self.nats = self.data / "nats"
        self.postgres = self.data / "postgres"
        self.store = self.data / "store"
        self.model = self.data / "model"
        self.logs = self.data / "logs"
        self.run = self.data / "run"
        self.lock = self.run / "lock"
        self.state = self.run / "state.json"

    def prepare(self) -> None:
        """Creates what is missing. Raises CommandFailed when the directory cannot be ours."""
        try:
            private = (self.secrets, self.store, self.nats, self.logs)
            taken = [f.name for f in (*private, self.postgres) if f.exists() and not self.run.exists()]
            if taken:
                what = f"{self.data} is no DeepServe data directory, but has {', '.join(taken)}"
                raise CommandFailed(f"{what}; name another with --data")
            self.run.mkdir(mode=0o755, parents=True, exist_ok=True)
            for folder in private:
                folder.mkdir(exist_ok=True)
                folder.chmod(0o700)
        except OSError as error:
            raise CommandFailed(f"cannot use {self.data} as data directory: {error.strerror or error}") from error

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def all_logs(self) -> dict[str, Path]:
        """Name of the process → its log; the embedded servers keep theirs beside their data."""
        found = {path.stem: path for path in sorted(self.logs.glob("*.log"))}
        servers = {name: folder / "server.log" for name, folder in (("nats", self.nats), ("postgres", self.postgres))}
        return found | {name: path for name, path in servers.items() if path.exists()}

    def port_file(self, name: str) -> Path:
        return self.run / f"{name}.port"

    def holder(self) -> int | None:
        """The pid of the supervisor that holds the lock, None when no instance runs here."""
        try:
            descriptor = os.open(self.lock, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CommandFailed(f"cannot read {self.lock}: {error.strerror or error}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.read(descriptor, 32).decode(errors="replace").strip()
            return int(text) if text.isdecimal() else 0
        finally:
            os.close(descriptor)
        return None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock. Raises CommandFailed that names the holder when another supervisor has it."""
        descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not _try_lock(descriptor):
                pid = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
                raise CommandFailed(
                    f"{self.data} is already in use by deepserve up, process {pid}; "
                    f"stop it with `deepserve down --data {self.data}` or choose another --data"
                )
            os.truncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
            yield
            os.truncate(descriptor, 0)
        finally:
            os.close(descriptor)

    def read_state(self) -> InstanceState | None:
        """What the last supervisor wrote; None before the first. Raises CommandFailed on a file nobody can read."""
        try:
            return msgspec.json.decode(self.state.read_bytes(), type=InstanceState)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise CommandFailed(f"cannot read {self.state}: {error}") from error

    def write_state(self, state: InstanceState) -> None:
        """Whole or not at all: readers never see half a state."""
        write_atomic(self.state, msgspec.json.format(msgspec.json.encode(state)), 0o644, durable=False)


def _try_lock(descriptor: int) -> bool:
    """A few tries: `holder` of another command holds the lock, shared, for microseconds."""
    for _ in range(_LOCK_ATTEMPTS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_RETRY_S)
        else:
            return True
    return False


def write_atomic(path: Path, content: bytes, mode: int, *, durable: bool = True) -> None:
    """`path` holds the old or the new content at every moment, and never has a wider mode than `mode`. `durable`:
    also after a power loss, at the price of a disk sync."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        os.fchmod(descriptor, mode)
        os.write(descriptor, content)
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    fresh.replace(path)


def left_over(state: InstanceState | None) -> list[ProcessState]:
    """Processes of this state that still run: services first, then servers."""
    if state is None:
        return []
    return [p for p in (*state.services, *state.servers) if alive(p.pid, p.born_s)]


def without_supervisor(instance: Instance, left: list[ProcessState]) -> str:
    """One line for a person."""
    names = ", ".join(f"{p.name} ({p.pid})" for p in left)
    return (
        f"the supervisor of {instance.data} was killed, and what it kept still runs: {names}; "
        "`deepserve up` starts anew, `deepserve down` ends them"
    )


def running(instance: Instance) -> InstanceState:
    """The state of the instance that runs over this data directory. Raises CommandFailed when none does, with what a
    killed supervisor left behind."""
    if instance.holder() is None:
        if left := left_over(instance.read_state()):
            raise CommandFailed(without_supervisor(instance, left))
        raise CommandFailed(f"no instance is running in {instance.data}; start one with `deepserve up`")
    state = instance.read_state()
    if state is None:
        raise CommandFailed(f"the instance in {instance.data} has only just begun to start; try again in a moment")
    return state
