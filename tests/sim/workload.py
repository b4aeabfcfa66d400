"""The clients of a simulation: they ask what the plan says, read what comes, hang up, come again.

Everything that a client asked and saw goes to the auditor as an `Exchange`; nothing else does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from tests.sim import model, oracle
from tests.sim.http import Call, ConnectionLost, connect
from tests.sim.plan import Client, Turn
from tests.sim.timeline import Timeline
from tests.sim.world import World

PATIENCE_S: Final = 400.0
"""No answer, nor its end, may take longer than this: far beyond the request's deadline."""
RETRY_S: Final = 1.5


@dataclass
class Exchange:
    """One request and what its client saw of the answer. `ended`: whole, error, left, lost or stuck."""

    number: int
    account: int
    user: str | None
    messages: list[dict[str, str]]
    turn: Turn
    asked_at_s: float
    prompt: list[int]
    ended_at_s: float = 0.0
    ended: str = "open"
    request: str | None = None
    status: int | None = None
    text: str = ""
    finish: str | None = None
    usage: dict[str, Any] | None = None
    done: bool = False
    error: dict[str, Any] | None = None
    faults: list[str] = field(default_factory=list)
    read: int = 0
    """Bytes of the body that were looked at."""


class Clients:
    """`secrets`: the API key of each account."""

    def __init__(self, world: World, timeline: Timeline, secrets: list[str]) -> None:
        self.exchanges: list[Exchange] = []
        self._world = world
        self._timeline = timeline
        self._secrets = secrets

    async def run(self, clients: tuple[Client, ...]) -> None:
        async with asyncio.TaskGroup() as group:
            for number, client in enumerate(clients):
                group.create_task(self._converse(client), name=f"client {number}")

    async def _converse(self, client: Client) -> None:
        await asyncio.sleep(client.begins_s)
        messages = [{"role": "system", "content": client.system}]
        for turn in client.turns:
            await asyncio.sleep(turn.pause_s)
            messages.append({"role": "user", "content": turn.text})
            exchange = await self._ask(client, list(messages), turn)
            for _ in range(turn.retries):
                if exchange.ended != "lost" and exchange.status not in (429, 503):
                    break
                await asyncio.sleep(RETRY_S)
                exchange = await self._ask(client, list(messages), turn)
            if client.keeps and exchange.ended == "whole":
                messages.append({"role": "assistant", "content": exchange.text})
            else:
                messages.pop()

    async def _ask(self, client: Client, messages: list[dict[str, str]], turn: Turn) -> Exchange:
        loop = asyncio.get_running_loop()
        prompt = oracle.prompt_tokens(messages)
        exchange = Exchange(len(self.exchanges), client.account, client.user, messages, turn, loop.time(), prompt)
        self.exchanges.append(exchange)
        who = f"client {client.account}"
        self._timeline.note(who, "asks", n=exchange.number, prompt=len(prompt), max=turn.max_tokens, stream=turn.stream)
        headers = {"authorization": f"Bearer {self._secrets[client.account]}", "content-type": "application/json"}
        if client.agent:
            headers["x-deepserve-traffic-class"] = "agent"
        try:
            call = connect(self._world.http, "/v1/chat/completions", headers, _body(client, messages, turn))
            await self._follow(call, exchange)
        except ConnectionLost:
            exchange.ended = "lost"
        exchange.ended_at_s = loop.time()
        self._timeline.note(
            who,
            exchange.ended,
            n=exchange.number,
            request=exchange.request,
            status=exchange.status,
            characters=len(exchange.text),
            finish=exchange.finish,
            error=exchange.error["message"] if exchange.error else None,
        )
        return exchange

    async def _follow(self, call: Call, exchange: Exchange) -> None:
        turn, loop = exchange.turn, asyncio.get_running_loop()
        leave_at_s = loop.time() + turn.leave_after_s if turn.leave_after_s is not None else None
        patience_at_s = loop.time() + PATIENCE_S
        more = True
        while more:
            until_s = patience_at_s if leave_at_s is None else min(leave_at_s, patience_at_s)
            try:
                async with asyncio.timeout_at(until_s):
                    more = await call.next()
            except TimeoutError:
                exchange.ended = "stuck" if loop.time() >= patience_at_s else "left"
                call.leave()
                return
            finally:
                _read(call, exchange)
            if turn.leave_after_chars is not None and len(exchange.text) >= turn.leave_after_chars and more:
                exchange.ended = "left"
                call.leave()
                return
        exchange.ended = "error" if exchange.error is not None else "whole"


def _body(client: Client, messages: list[dict[str, str]], turn: Turn) -> bytes:
    body: dict[str, Any] = {
        "model": model.NAME,
        "messages": messages,
        "max_tokens": turn.max_tokens,
        "temperature": turn.temperature,
        "stream": turn.stream,
    }
    if turn.stream:
        body["stream_options"] = {"include_usage": True}
    if turn.seed is not None:
        body["seed"] = turn.seed
    if turn.stop is not None:
        body["stop"] = [turn.stop]
    if client.user is not None:
        body["user_id"] = client.user
    return json.dumps(body).encode()


def _read(call: Call, exchange: Exchange) -> None:
    """What came since the last look."""
    reply = call.reply
    exchange.status = reply.status
    exchange.request = reply.headers.get("x-request-id", exchange.request)
    read: Callable[[bytes, Exchange], None] = _read_stream if exchange.turn.stream else _read_whole
    if reply.status is not None and reply.status != 200:
        read = _read_whole
    read(reply.body if reply.whole or read is _read_stream else b"", exchange)


def _read_stream(body: bytes, exchange: Exchange) -> None:
    end = body.rfind(b"\n\n") + 2
    frames = body[exchange.read : end].decode().split("\n\n")[:-1] if end > 1 else []
    exchange.read = max(end, 0) if end > 1 else 0
    for frame in frames:
        if exchange.done:
            exchange.faults.append(f"a frame after [DONE]: {frame[:80]}")
        if frame.startswith(":"):
            continue
        content = frame.removeprefix("data: ")
        if content == "[DONE]":
            exchange.done = True
        else:
            _take(json.loads(content), "delta", exchange)


def _read_whole(body: bytes, exchange: Exchange) -> None:
    if body.strip():
        exchange.text = ""
        _take(json.loads(body), "message", exchange)
        exchange.done = exchange.error is None


def _take(document: dict[str, Any], part: str, exchange: Exchange) -> None:
    if "error" in document:
        exchange.error = document["error"]
        return
    for choice in document["choices"]:
        exchange.text += choice[part].get("content") or ""
        exchange.finish = choice["finish_reason"] or exchange.finish
    exchange.usage = document.get("usage") or exchange.usage
