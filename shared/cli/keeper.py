"""Keeps one service alive: starts it, waits until it is ready, restarts it with back-off when it crashes."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.cli import probe
from shared.cli.backoff import Backoff
from shared.cli.instance import ProcessState, State
from shared.cli.process import ChildProcess, describe_exit, note, size_of, spawn, tail
from shared.contracts import limits
from shared.runtime.service import EXIT_SETTINGS


@dataclass(frozen=True)
class ServiceSpec:
    """What to run. `module` is run by this interpreter; `environment` is all that the process sees.

    `port_file`: where it writes the port of its /readyz. `public_port_file`: where it writes the port that others call,
    if it answers /readyz there too. `pins`: variable → file; a port that the system chose in the first life is asked
    for again in the next, so that clients find the service where it was. The port of `port_file` alone moves when
    somebody else has it by then: whoever asks there reads the file."""

    name: str
    module: str
    environment: Mapping[str, str]
    log: Path
    port_file: Path
    public_port_file: Path | None
    pins: Mapping[str, Path]


@dataclass(frozen=True)
class Life:
    """How one process of a service ended. `ready_s`: how long it was ready. `hopeless`: another try would end the same
    way, since its settings are wrong or all its time was used up."""

    ready_s: float
    reason: str
    hopeless: bool = False


class ServiceKeeper:
    """Owns one task from its making to `stop`. `tell` gets each change of state, `say` what a person should see."""

    def __init__(self, spec: ServiceSpec, tell: Callable[[ProcessState], None], say: Callable[[str], None]) -> None:
        self.spec = spec
        self._tell = tell
        self._say = say
        self._child: ChildProcess | None = None
        self._port: int | None = None
        self._log_start = size_of(spec.log)
        self._pins: dict[str, str] = {}
        self._restarts = 0
        self._last_exit: str | None = None
        self._stopping = asyncio.Event()
        self._started: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._run())

    async def started(self) -> str | None:
        """None at the first readiness, or why it never came."""
        return await asyncio.shield(self._started)

    async def stop(self, timeout_s: float = limits.STOP_TIMEOUT_S) -> bool:
        """Ends the process and keeps it ended. Returns False when it had to be killed. Idempotent."""
        self._stopping.set()
        by_itself = await self._child.stop(timeout_s) if self._child else True
        await self.task
        return by_itself

    def kill(self) -> None:
        """Ends the process at once, and for good."""
        self._stopping.set()
        if self._child:
            self._child.kill()

    async def _run(self) -> None:
        """Until `stop`. A service that crashes too often before it was ever ready is not tried again."""
        backoff = Backoff()
        while not self._stopping.is_set():
            life = await self._one_life()
            if self._stopping.is_set():
                break
            backoff = backoff.crashed(life.ready_s)
            self._last_exit = life.reason
            if not self._started.done() and (life.hopeless or backoff.crashes >= limits.START_ATTEMPTS_MAX):
                self._started.set_result(life.reason)
                self._publish("stopped")
                return
            self._restarts += 1
            self._publish("restarting")
            note(
                self.spec.log,
                "service.crashed",
                name=self.spec.name,
                reason=life.reason,
                restart_in_s=backoff.wait_s,
                restarts=self._restarts,
            )
            self._say(f"{self.spec.name} ended: {life.reason}; starting it again in {backoff.wait_s:g} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff.wait_s):
                    await self._stopping.wait()
        self._publish("stopped")

    async def _one_life(self) -> Life:
        environment = self._pinned()
        self._port = None
        try:
            child = await spawn([sys.executable, "-m", self.spec.module], environment, self.spec.log)
        except OSError as error:
            return Life(0.0, f"could not be started: {error}")
        self._child = child
        self._publish("starting")
        exited = asyncio.create_task(child.wait())
        try:
            if self._stopping.is_set():
                await child.stop()
            ready, refusal = await self._until_ready(exited)
            if not ready and not exited.done():
                await child.stop()
                return Life(0.0, refusal, hopeless=True)
            ready_s = time.monotonic()
            code = await exited
            if code == EXIT_SETTINGS and not ready:
                return Life(0.0, "it refuses its settings", hopeless=True)
            return Life(time.monotonic() - ready_s if ready else 0.0, describe_exit(code))
        finally:
            if not exited.done():
                await child.stop()
            await exited
            self._child = None

    def _pinned(self) -> dict[str, str]:
        """The environment of the next life; the files are the next one's to write."""
        for variable, path in self.spec.pins.items():
            port = probe.read_port(path)
            if port is not None:
                self._pins[variable] = str(port)
            path.unlink(missing_ok=True)
            if path == self.spec.port_file and not probe.is_free(int(self._pins.get(variable, "0"))):
                del self._pins[variable]
        self.spec.port_file.unlink(missing_ok=True)
        return {**self.spec.environment, **self._pins}

    async def _until_ready(self, exited: asyncio.Task[int]) -> tuple[bool, str]:
        """(became ready, what it lacked last). Returns early when the process has exited."""
        deadline = time.monotonic() + limits.READY_TIMEOUT_S
        lacked = "it did not begin to listen"
        while not exited.done() and time.monotonic() < deadline:
            if self._port is None:
                self._port = probe.read_port(self.spec.port_file)
            if self._port is not None:
                answer = await probe.ask(self._port)
                if answer.ready:
                    if self.spec.public_port_file is not None:
                        self._port = probe.read_port(self.spec.public_port_file)
                    self._publish("ready")
                    if not self._started.done():
                        self._started.set_result(None)
                    return True, ""
                lacked = answer.body[:300] or f"status {answer.status}"
            await asyncio.wait({exited}, timeout=limits.READY_POLL_S)
        return False, f"not ready after {limits.READY_TIMEOUT_S:.0f} s: {lacked}"

    def _publish(self, state: State) -> None:
        child = self._child if state in ("starting", "ready") else None
        self._tell(
            ProcessState(
                name=self.spec.name,
                pid=child.pid if child else None,
                born_s=child.born_s if child else None,
                state=state,
                port=self._port if child else None,
                restarts=self._restarts,
                last_exit=self._last_exit,
            )
        )

    def tail(self) -> str:
        """The end of what its lives under this supervisor have written."""
        return tail(self.spec.log, since=self._log_start)
