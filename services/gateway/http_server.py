"""The HTTP server: uvicorn with httptools, as a part of a process that has its own supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from shared.contracts import limits
from shared.contracts.errors import SettingsError


class _Server(uvicorn.Server):
    """Signals belong to the service, not to the server."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """`run` until `stop`."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        """Binds at once, so that the port is known. Raises SettingsError when it cannot be had."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=limits.LISTEN_BACKLOG,
            timeout_keep_alive=int(limits.HTTP_IDLE_S),
            timeout_graceful_shutdown=int(limits.DRAIN_TIMEOUT_S),
        )
        self._server = _Server(config)

    async def run(self) -> None:
        """Serves until `stop`; open answers then have limits.DRAIN_TIMEOUT_S to end."""
        await self._server.serve([self._socket])

    async def up(self) -> None:
        """Returns when connections are accepted."""
        await self._server.up.wait()

    def stop(self) -> None:
        self._server.should_exit = True
