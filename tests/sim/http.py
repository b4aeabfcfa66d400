"""HTTP of the simulations: the gateway's application is called in its own process, without a socket.

`SimHttpServer` takes the place of the services' server and says who answers; `call` is a client's one call, which sees
status, headers and body as they come, and a cut connection when the process dies. Owns no retries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from shared.contracts import limits
from tests.sim import process

App = Callable[[dict[str, Any], Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]


class ConnectionLost(Exception):
    """Refused, or cut in the middle."""


class SimHttpServer:
    """In place of `HttpServer`. `listening`: the server of each process that serves now, by its name."""

    listening: dict[str, SimHttpServer]

    def __init__(self, app: App, host: str, port: int) -> None:
        self.port = 1
        self.app = app
        self.calls: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._up = asyncio.Event()
        self.member = process.current()

    async def run(self) -> None:
        assert self.member is not None
        name = self.member.name
        self.listening[name] = self
        self.member.at_death(lambda: self._forget(name))
        self._up.set()
        try:
            await self._stopping.wait()
            self._forget(name)
            if self.calls:
                await asyncio.wait(self.calls, timeout=limits.DRAIN_TIMEOUT_S)
        finally:
            self._forget(name)
            for call in self.calls:
                call.cancel()
            if self.calls:
                await asyncio.wait(self.calls)

    def _forget(self, name: str) -> None:
        if self.listening.get(name) is self:
            del self.listening[name]

    async def up(self) -> None:
        await self._up.wait()

    def stop(self) -> None:
        self._stopping.set()


@dataclass
class Reply:
    """As far as it came. `headers` are decoded; `body` grows."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    whole: bool = False


class Call:
    """One call. `changed` wakes whoever follows it; `leave` closes the connection from this side."""

    def __init__(self, server: SimHttpServer, path: str, headers: dict[str, str], body: bytes) -> None:
        self.reply = Reply()
        self.news = asyncio.Event()
        self.lost = False
        self._left = asyncio.Event()
        self._sent = False
        self._body = body
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST" if body else "GET",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "scheme": "http",
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            "client": ("client", 1),
            "server": ("gateway", 80),
            "root_path": "",
        }
        member = server.member
        assert member is not None
        member.at_death(self._cut)
        task = member.start(self._serve(server.app, scope), f"http {path}")
        server.calls.add(task)
        task.add_done_callback(server.calls.discard)

    async def _serve(self, app: App, scope: dict[str, Any]) -> None:
        try:
            await app(scope, self._receive, self._send)
        finally:
            if not self.reply.whole:
                self._cut()

    async def _receive(self) -> dict[str, Any]:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.reply.status = message["status"]
            self.reply.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        elif not self._left.is_set():
            self.reply.body += message.get("body", b"")
            self.reply.whole = not message.get("more_body", False)
        self.news.set()

    def _cut(self) -> None:
        if not self.reply.whole:
            self.lost = True
            self.news.set()

    def leave(self) -> None:
        """The client is gone: it reads nothing more."""
        self._left.set()

    async def next(self) -> bool:
        """Waits for more; False when the reply is whole. Raises ConnectionLost."""
        await self.news.wait()
        self.news.clear()
        if self.lost:
            raise ConnectionLost
        return not self.reply.whole


def connect(servers: dict[str, SimHttpServer], path: str, headers: dict[str, str], body: bytes) -> Call:
    """A call to whichever gateway listens. Raises ConnectionLost when none does."""
    gateways = [server for name, server in sorted(servers.items()) if name.startswith("gateway")]
    if not gateways:
        raise ConnectionLost
    return Call(gateways[0], path, headers, body)
