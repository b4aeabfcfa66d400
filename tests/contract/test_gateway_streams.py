"""The wire while time passes: keep-alive, clients that do not read, draining, the gateway's own heartbeat."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from services.gateway.auth import api_key
from services.gateway.edge import Call
from services.gateway.stream import ChatResponse
from shared.contracts import limits, messages, subjects
from shared.contracts.errors import Overloaded
from shared.contracts.ids import RequestId
from shared.contracts.messages import Finalize, GatewayHeartbeat
from tests.contract.gateway_world import KEY, MODEL, WAIT_S, Job, World, world

pytestmark = pytest.mark.servers

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
BODY: dict[str, Any] = {"model": MODEL, "messages": HELLO}
STREAM = BODY | {"stream": True}


@pytest.fixture
async def place(nats_url: str, tmp_path: Path) -> AsyncIterator[World]:
    async with world(nats_url, tmp_path) as made:
        yield made


def asking(place: World, body: dict[str, Any] = BODY) -> asyncio.Task[httpx2.Response]:
    return asyncio.create_task(place.http.post("/v1/chat/completions", json=body))


async def begun(place: World, *tokens: int) -> Job:
    """A request whose first tokens were sent by prefill, and which decode has claimed."""
    job = await place.prefill.job()
    assert (await job.claim()).verdict == "go"
    await job.send(0, tokens, hit=0)
    decoding = job.decoding(place.decode)
    assert (await decoding.claim()).verdict == "go"
    return decoding


async def test_a_gateway_says_that_it_lives(place: World) -> None:
    heard: asyncio.Queue[GatewayHeartbeat] = asyncio.Queue()

    async def on_beat(subject: str, payload: bytes) -> None:
        assert subject == "heartbeat.gateway.gateway-1"
        heard.put_nowait(messages.decode(GatewayHeartbeat, payload))

    stop = await place.bus.subscribe(subjects.GATEWAY_HEARTBEATS, on_beat)
    async with asyncio.timeout(limits.PEER_LEASE_S):
        first, second = await heard.get(), await heard.get()
    assert first.gateway == "gateway-1"
    assert first.sent_at_s < second.sent_at_s < first.sent_at_s + 3 * limits.HEARTBEAT_S
    await stop()


async def test_keep_alive_is_a_comment_in_a_stream_and_a_blank_line_in_a_whole(nats_url: str, tmp_path: Path) -> None:
    async with world(nats_url, tmp_path, keep_alive_s=0.05) as place:
        tokens = place.ids("one two")
        for body in (STREAM, BODY):
            async with place.http.stream("POST", "/v1/chat/completions", json=body) as reply:
                texts = reply.aiter_text()
                job = await place.prefill.job()
                assert (await anext(texts)).startswith(": keep-alive\n\n" if body is STREAM else "\n")
                await job.claim()
                await job.send(0, tokens, hit=0, finish="length")
                rest = "".join([part async for part in texts])
            assert reply.status_code == 200
            if body is BODY:
                assert json.loads("\n" + rest)["choices"][0]["message"]["content"] == "one two"
            else:
                assert rest.endswith("data: [DONE]\n\n")

        sdk_task = asyncio.create_task(place.sdk().chat.completions.create(**STREAM))
        job = await place.prefill.job()
        stream = await sdk_task
        await job.claim()
        await job.send(0, tokens, hit=0, finish="length")
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "one two"


async def test_an_error_after_a_keep_alive_is_in_the_body(nats_url: str, tmp_path: Path) -> None:
    async with world(nats_url, tmp_path, keep_alive_s=0.05) as place:
        async with place.http.stream("POST", "/v1/chat/completions", json=BODY) as reply:
            texts = reply.aiter_text()
            job = await place.prefill.job()
            await anext(texts)
            await job.claim()
            await job.send(0, error=Overloaded("no pages"))
            rest = "".join([part async for part in texts])
        assert json.loads(rest.strip())["error"]["message"].startswith("The server is overloaded or unavailable.")


async def test_a_client_that_does_not_read_is_cut_off_and_its_work_ends(
    place: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STREAM_BUFFER_TOKENS_MAX", 50)
    call = Call(
        RequestId("slow"),
        api_key(f"Bearer {KEY}"),
        json.dumps(STREAM).encode(),
        None,
        asyncio.get_running_loop().time(),
    )
    never = asyncio.Event()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await never.wait()

    async def receive() -> Any:
        await never.wait()

    answering = asyncio.create_task(ChatResponse(place.gateway.edge, call, timing=False)({}, receive, send))
    tokens = place.ids("a" * 99)
    job = await begun(place, tokens[0])
    for index in range(1, len(tokens)):
        await job.send(index, [tokens[index]])
    final: Finalize = await job.told(Finalize)
    assert final.reason == "cancelled"
    assert 50 < final.count <= len(tokens)
    async with asyncio.timeout(WAIT_S):
        await answering


async def test_draining_lets_answers_end_and_takes_no_new_ones(place: World) -> None:
    tokens = place.ids("one two")
    task = asking(place)
    job = await begun(place, *tokens)
    draining = asyncio.create_task(place.gateway.drain(WAIT_S))
    async with asyncio.timeout(WAIT_S):
        while (await place.http.get("/readyz")).status_code == 200:
            pass
    assert (await asking(place)).status_code == 503
    await job.send(len(tokens), finish="length")
    assert (await task).json()["choices"][0]["message"]["content"] == "one two"
    await draining
