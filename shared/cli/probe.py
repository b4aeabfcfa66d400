"""One small question to a service over loopback HTTP: are you ready? No client library, so that it costs nothing."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shared.contracts import limits

_REPLY_BYTES_MAX: Final = 64 * 1024


@dataclass(frozen=True)
class Answer:
    """`status` 0: nobody answered in time."""

    status: int
    body: str

    @property
    def ready(self) -> bool:
        return self.status == 200


async def ask(port: int, path: str = "/readyz", timeout_s: float = limits.PROBE_TIMEOUT_S) -> Answer:
    """GET of `path` on loopback. Never raises: a service that does not answer is simply not ready."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _get(port, path)
    except (TimeoutError, OSError) as error:
        return Answer(0, str(error) or type(error).__name__)


async def _get(port: int, path: str) -> Answer:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        reply = await reader.read(_REPLY_BYTES_MAX)
        while len(reply) < _REPLY_BYTES_MAX and (more := await reader.read(_REPLY_BYTES_MAX)):
            reply += more
    finally:
        writer.close()
    head, _, body = reply.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    if not status or not status[0].isdigit():
        return Answer(0, "no HTTP answer")
    return Answer(int(status[0]), body.decode(errors="replace").strip())


def is_free(port: int) -> bool:
    """Whether a service could listen on this loopback port now; of 0, any free one, it always could."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def read_port(path: Path) -> int | None:
    """The port that a service wrote when it began to listen; None before that."""
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return None
    return int(text) if text.isdecimal() else None
