"""Keeps an embedded server (NATS, Postgres) alive on its port. Its start and stop block, so they run in a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from shared.cli.backoff import Backoff
from shared.cli.failure import CommandFailed
from shared.cli.instance import ProcessState, State
from shared.cli.process import born, describe_exit, gone, note
from shared.contracts import limits
from shared.contracts.errors import DeepServeError


class EmbeddedServer(Protocol):
    """A started server. `url` names it with its credentials."""

    @property
    def url(self) -> str: ...

    @property
    def pid(self) -> int: ...

    @property
    def port(self) -> int: ...

    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number when a signal ended it."""
        ...

    def stop(self, timeout_s: float) -> None:
        """Blocks until it ended, within `timeout_s`."""
        ...


class ServerKeeper:
    """`start(port)` starts the server, blocking, on that port (0: any free one). `log`: what it writes; each start
    begins a new one."""

    def __init__(
        self,
        name: str,
        start: Callable[[int], EmbeddedServer],
        log: Path,
        tell: Callable[[ProcessState], None],
        say: Callable[[str], None],
    ) -> None:
        self.name = name
        self._start = start
        self._log = log
        self._tell = tell
        self._say = say
        self._port = 0
        self._restarts = 0
        self._last_exit: str | None = None
        self._starting: asyncio.Task[EmbeddedServer] | None = None
        self._stopped = False

    async def start(self) -> EmbeddedServer:
        """Raises CommandFailed with the reason. A caller that is cancelled leaves the start to `stop`."""
        begun_s = time.monotonic()
        self._starting = asyncio.create_task(asyncio.to_thread(self._start, self._port))
        try:
            server = await asyncio.shield(self._starting)
        except (DeepServeError, OSError) as error:
            raise CommandFailed(f"{self.name} could not be started: {error}") from error
        self._port = server.port
        self._publish("ready", server)
        self._say(f"{self.name} is up on port {server.port} ({time.monotonic() - begun_s:.1f} s)")
        return server

    async def watch(self, server: EmbeddedServer) -> None:
        """Starts the server again, on its port, whenever it is gone. Runs until cancelled."""
        backoff = Backoff()
        while True:
            up_s = time.monotonic()
            await gone(server.pid, born(server.pid), poll_s=limits.SERVER_WATCH_S)
            code = server.exit_code()
            self._last_exit = "it is gone" if code is None else describe_exit(code)
            again: EmbeddedServer | None = None
            uptime_s = time.monotonic() - up_s
            while again is None:
                backoff = backoff.crashed(uptime_s)
                uptime_s = 0.0
                self._restarts += 1
                self._publish("restarting", None)
                self._say(f"{self.name} ended: {self._last_exit}; starting it again in {backoff.wait_s:g} s")
                await self._note()
                await asyncio.sleep(backoff.wait_s)
                try:
                    again = await self.start()
                except CommandFailed as failure:
                    self._last_exit = failure.message
                    self._say(failure.message)
            # Again, since the start put the log with the first line aside.
            await self._note()
            server = again

    async def _note(self) -> None:
        reason, restarts = self._last_exit, self._restarts
        await asyncio.to_thread(note, self._log, "server.crashed", name=self.name, reason=reason, restarts=restarts)

    async def stop(self) -> None:
        """Idempotent. Waits for a start that is under way, so that no server outlives its supervisor."""
        if self._starting is None or self._stopped:
            return
        self._stopped = True
        await asyncio.wait({self._starting})
        if self._starting.exception() is None:
            await asyncio.to_thread(self._starting.result().stop, limits.SERVER_STOP_TIMEOUT_S)
        self._publish("stopped", None)

    def _publish(self, state: State, server: EmbeddedServer | None) -> None:
        self._tell(
            ProcessState(
                name=self.name,
                pid=server.pid if server else None,
                born_s=born(server.pid) if server else None,
                state=state,
                port=server.port if server else None,
                restarts=self._restarts,
                last_exit=self._last_exit,
            )
        )
