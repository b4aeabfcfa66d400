"""The small HTTP side of every process, on loopback: `/healthz`, `/readyz`, `/metrics`.

It answers from the first moment of a start, so that whoever waits can read what is still missing. No framework: three
answers of a few bytes, bounded in time, size and number of connections.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shared.contracts import limits
from shared.contracts.errors import SettingsError
from shared.runtime.metrics import CONTENT_TYPE

_TEXT: Final = "text/plain; charset=utf-8"
_REASONS: Final = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    content_type: str = _TEXT


class HealthServer:
    """`missing()`: why the process is not ready, None when it is. `metrics()`: the text for Prometheus."""

    def __init__(self, missing: Callable[[], str | None], metrics: Callable[[], bytes]) -> None:
        self._missing = missing
        self._metrics = metrics
        self._server: asyncio.Server | None = None
        self._open = 0

    async def start(self, port: int) -> int:
        """Listens on loopback; returns the port. Raises SettingsError when it is taken."""
        try:
            self._server = await asyncio.start_server(
                self._serve, "127.0.0.1", port, limit=limits.HEALTH_REQUEST_BYTES_MAX
            )
        except OSError as error:
            raise SettingsError(f"cannot listen on health port {port}: {error.strerror or error}") from error
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= limits.HEALTH_CONNECTIONS_MAX:
                async with asyncio.timeout(limits.HEALTH_REQUEST_TIMEOUT_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(_encode(self.answer(head)))
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # A caller that went away, or that is no HTTP client, gets nothing.
        finally:
            self._open -= 1
            writer.close()

    def answer(self, head: bytes) -> Answer:
        """What a request's head is answered."""
        method, _, rest = head.partition(b" ")
        path = rest.split(b" ", 1)[0].split(b"?", 1)[0]
        if method not in (b"GET", b"HEAD"):
            return Answer(405, b"only GET\n")
        if path == b"/healthz":
            return Answer(200, b"ok\n")
        if path == b"/readyz":
            missing = self._missing()
            return Answer(200, b"ready\n") if missing is None else Answer(503, f"{missing}\n".encode())
        if path == b"/metrics":
            return Answer(200, self._metrics(), CONTENT_TYPE)
        return Answer(404, b"not found\n")


def _encode(answer: Answer) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}\r\n"
        f"Content-Type: {answer.content_type}\r\nContent-Length: {len(answer.body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + answer.body


def write_port(path: Path, port: int) -> None:
    """Tells whoever started the process where it listens. Whole or not at all. Raises SettingsError."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(f"{port}\n")
        fresh.replace(path)
    except OSError as error:
        raise SettingsError(f"cannot write {path}: {error.strerror or error}") from error
