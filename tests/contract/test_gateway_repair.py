"""What happens when something on the way fails or leaves: the client sees no gap, the hold has one end (D, invariants 3
and 11)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import openai
import pytest

from shared.contracts import limits
from shared.contracts.block import pack_tokens
from shared.contracts.epoch import Epoch, Stage
from shared.contracts.errors import InternalError, Overloaded
from shared.contracts.ids import RequestId
from shared.contracts.messages import Acknowledge, Finalize, Resend
from tests.contract.gateway_world import MODEL, WAIT_S, Job, World, world

pytestmark = pytest.mark.servers

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
BODY: dict[str, Any] = {"model": MODEL, "messages": HELLO}
STREAM = BODY | {"stream": True}


@pytest.fixture
async def place(nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(limits, "RESEND_AFTER_S", 0.2)
    async with world(nats_url, tmp_path) as made:
        yield made


def asking(place: World, body: dict[str, Any] = BODY) -> asyncio.Task[httpx2.Response]:
    return asyncio.create_task(place.http.post("/v1/chat/completions", json=body))


async def begun(place: World, *tokens: int, hit: int = 0) -> Job:
    """A request whose first tokens were sent by prefill, and which decode has claimed."""
    job = await place.prefill.job()
    assert (await job.claim()).verdict == "go"
    await job.send(0, tokens, hit=hit)
    decoding = job.decoding(place.decode)
    assert (await decoding.claim()).verdict == "go"
    return decoding


async def ended(job: Job, tokens: list[int], task: asyncio.Task[httpx2.Response]) -> dict[str, Any]:
    """The whole answer's first choice, after the worker said its last token."""
    await job.send(len(tokens), finish="length")
    reply = await task
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


async def test_a_gap_is_asked_for_and_nothing_past_it_is_shown(place: World) -> None:
    tokens = place.ids("one two three four five")
    task = asking(place)
    job = await begun(place, tokens[0])
    await job.send(3, tokens[3:])
    resend: Resend = await job.told(Resend)
    assert (resend.first, resend.epoch) == (1, job.epoch)
    await job.send(1, tokens[1:])
    choice = await ended(job, tokens, task)
    assert choice["message"]["content"] == "one two three four five"
    final: Finalize = await job.told(Finalize)
    assert (final.count, final.reason) == (len(tokens), "length")


async def test_a_lost_word_of_the_end_is_asked_for(place: World) -> None:
    tokens = place.ids("one")
    task = asking(place)
    job = await begun(place, *tokens)
    assert (await job.told(Resend)).first == len(tokens)
    assert (await job.told(Resend)).first == len(tokens), "again, as long as nothing comes"
    choice = await ended(job, tokens, task)
    assert choice["message"]["content"] == "one"


async def test_a_lost_first_message_is_asked_for_from_the_start(place: World) -> None:
    tokens = place.ids("one two")
    task = asking(place)
    job = await place.prefill.job()
    await job.claim()
    decoding = job.decoding(place.decode)
    await decoding.claim()
    assert (await decoding.told(Resend)).first == 0
    await decoding.send(0, tokens, hit=8)
    choice = await ended(decoding, tokens, task)
    assert choice["message"]["content"] == "one two"
    assert task.result().json()["usage"]["prompt_cache_hit_tokens"] == 8


async def test_tokens_are_acknowledged_as_they_come(place: World) -> None:
    tokens = place.ids("the quick brown fox jumps over the lazy dog and the quick brown fox")
    task = asking(place)
    job = await begun(place, tokens[0])
    await job.send(1, tokens[1 : limits.ACK_EVERY_TOKENS])
    acknowledge: Acknowledge = await job.told(Acknowledge)
    assert (acknowledge.received, acknowledge.epoch) == (limits.ACK_EVERY_TOKENS, job.epoch)
    await job.send(limits.ACK_EVERY_TOKENS, tokens[limits.ACK_EVERY_TOKENS :])
    await ended(job, tokens, task)


async def test_a_fail_over_has_no_seam(place: World) -> None:
    tokens = place.ids("one two three four")
    task = asking(place)
    first = await begun(place, tokens[0], hit=8)
    await first.send(1, tokens[1:3])
    assert (await first.told(Resend)).first == 3, "the gateway has three"
    other = await place.start_worker("decode-2", "decode")
    second = Job(other, first.delivery, first.work, Epoch(1, Stage.DECODE, 2))
    reply = await second.claim()
    assert (reply.verdict, reply.delivered, reply.hit_tokens) == ("go", pack_tokens(tokens[:3]), 8)
    await first.send(3, [99], finish="length")
    await second.send(0, tokens)
    choice = await ended(second, tokens, task)
    assert choice["message"]["content"] == "one two three four"
    final: Finalize = await second.told(Finalize)
    assert (final.count, final.epoch) == (len(tokens), second.epoch)
    assert (await first.claim()).verdict == "stale"


async def test_a_client_that_leaves_a_stream_stops_the_work_and_the_count_is_what_came(place: World) -> None:
    tokens = place.ids("one two three")
    stream_task = asyncio.create_task(place.sdk().chat.completions.create(**STREAM))
    job = await begun(place, tokens[0])
    await job.send(1, tokens[1:])
    stream = await stream_task
    text = ""
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if text == "one two three":
            break
    await stream.close()
    final: Finalize = await job.told(Finalize)
    assert (final.count, final.reason) == (len(tokens), "cancelled")
    assert place.billing.released.empty(), "the worker settles"
    reply = await job.claim()
    assert (reply.verdict, reply.final, reply.delivered) == ("cancelled", len(tokens), pack_tokens(tokens))


async def test_a_client_that_leaves_a_whole_answer_does_too(place: World) -> None:
    tokens = place.ids("one two")
    task = asking(place)
    job = await begun(place, *tokens)
    await job.told(Resend)
    task.cancel()
    final: Finalize = await job.told(Finalize)
    assert (final.count, final.reason) == (len(tokens), "cancelled")


async def test_a_client_that_leaves_before_any_claim_gets_its_hold_back(place: World) -> None:
    task = asking(place)
    job = await place.prefill.job()
    task.cancel()
    async with asyncio.timeout(WAIT_S):
        release = await place.billing.released.get()
    assert release.grant == job.work.grant
    assert (await job.claim()).verdict == "cancelled"
    assert place.billing.released.empty(), "once"


async def test_a_prefill_that_died_before_its_prompt_ran_is_not_paid_for(place: World) -> None:
    task = asking(place)
    job = await place.prefill.job()
    await job.claim()
    task.cancel()
    assert (await job.told(Finalize)).count == 0
    again = Job(place.prefill, job.delivery, job.work, Epoch(1, Stage.PREFILL, 2))
    assert (await again.claim()).verdict == "cancelled"
    async with asyncio.timeout(WAIT_S):
        assert (await place.billing.released.get()).grant == job.work.grant


async def test_a_client_that_leaves_during_the_hold_leaves_none_behind(place: World) -> None:
    holding, go_on = asyncio.Event(), asyncio.Event()

    async def on_hold() -> None:
        holding.set()
        await go_on.wait()

    place.billing.on_hold = on_hold
    task = asking(place)
    async with asyncio.timeout(WAIT_S):
        await holding.wait()
        task.cancel()
        await asyncio.wait({task})
        while place.gateway.under_way()["prefilling"]:
            await place.http.get("/healthz")
        go_on.set()
        await place.billing.released.get()
    assert place.prefill.jobs.empty()


async def test_a_worker_that_missed_the_end_is_told_again(place: World) -> None:
    tokens = place.ids("one two STOP three")
    task = asking(place, BODY | {"stop": ["STOP"]})
    job = await begun(place, *tokens)
    first: Finalize = await job.told(Finalize)
    assert (await task).status_code == 200
    await job.send(len(tokens), [1, 2, 3])
    assert await job.told(Finalize) == first


async def test_an_error_of_the_engine_before_the_answer_is_an_http_error(place: World) -> None:
    task = asking(place, STREAM)
    job = await place.prefill.job()
    await job.claim()
    await job.send(0, error=Overloaded("no pages", retry_after_s=7))
    reply = await task
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "7")
    assert reply.json()["error"]["message"].startswith("The server is overloaded or unavailable.")


async def test_an_error_of_the_engine_amid_a_stream_is_never_a_success(place: World) -> None:
    tokens = place.ids("one two")
    task = asyncio.create_task(place.sdk().chat.completions.create(**STREAM))
    job = await begun(place, *tokens)
    stream = await task
    text = ""
    while text != "one two":
        chunk = await anext(stream)
        text += chunk.choices[0].delta.content or ""
        assert chunk.choices[0].finish_reason is None
    await job.send(2, error=InternalError("a secret"))
    with pytest.raises(openai.APIError):
        await anext(stream)

    task2 = asking(place, STREAM)
    job = await begun(place, *tokens)
    await job.told(Resend)
    await job.send(2, error=InternalError("a secret"))
    raw = (await task2).text
    assert "[DONE]" not in raw
    assert "secret" not in raw
    assert json.loads(raw.strip().split("data: ")[-1])["error"]["type"] == "internal_error"


async def test_an_answer_that_diverges_is_an_error(place: World) -> None:
    tokens = place.ids("one two three")
    task = asking(place)
    job = await begun(place, *tokens)
    await job.send(1, [tokens[1] + 1])
    assert (await task).status_code == 500


async def test_work_that_nobody_claims_is_published_again_and_then_given_up(
    place: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CLAIM_PATIENCE_S", 0.3)
    monkeypatch.setattr(limits, "ATTEMPTS_MAX", 2)
    task = asking(place)
    first, second = await place.prefill.job(), await place.prefill.job()
    assert (first.work.attempt, second.work.attempt) == (1, 2)
    assert (await first.claim()).verdict == "stale"
    reply = await task
    assert reply.status_code == 503
    assert reply.json()["error"]["message"].startswith("The server is overloaded or unavailable.")
    async with asyncio.timeout(WAIT_S):
        await place.billing.released.get()
    assert (await second.claim()).verdict == "cancelled"


async def test_a_second_attempt_answers_as_the_first_would(place: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CLAIM_PATIENCE_S", 0.3)
    task = asking(place)
    first, second = await place.prefill.job(), await place.prefill.job()
    assert second.work.sampling == first.work.sampling, "the same seed"
    assert second.work.tokens == first.work.tokens
    await second.claim()
    await second.send(0, [place.stop()], hit=0, finish="stop")
    assert (await task).status_code == 200
    assert len(place.billing.holds()) == 1


async def test_work_goes_to_the_worker_that_holds_the_prefix_and_returns_to_any(place: World) -> None:
    """The second turn names the first one's worker; when that one does not claim in time, anybody may."""
    other = await place.start_worker("prefill-2", "prefill")
    async with asyncio.timeout(WAIT_S):
        while place.gateway.edge.workers.count("prefill", MODEL, asyncio.get_running_loop().time()) < 2:
            await place.http.get("/healthz")

    async def serve(job: Job) -> None:
        await job.claim()
        await job.send(0, [place.stop()], hit=0, finish="stop")
        await job.delivery.ack()

    task = asking(place)
    jobs = {asyncio.create_task(worker.job()): worker for worker in (place.prefill, other)}
    done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
    taken = done.pop()
    holder = jobs.pop(taken)
    await serve(taken.result())
    await task
    for waiting in jobs:
        waiting.cancel()

    longer = BODY | {"messages": [*HELLO, {"role": "assistant", "content": "x"}, {"role": "user", "content": "more"}]}
    task = asking(place, longer)
    named = await holder.job()
    assert named.delivery.subject == f"prefill.{MODEL}.at.{holder.name}"
    waiting_jobs = [asyncio.create_task(worker.job()) for worker in (place.prefill, other)]
    done, rest = await asyncio.wait(waiting_jobs, return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_S)
    anybody = done.pop().result()
    for waiting in rest:
        waiting.cancel()
    assert anybody.delivery.subject == f"prefill.{MODEL}.any"
    assert anybody.work.attempt == 2
    assert (await named.claim()).verdict == "stale"
    await serve(anybody)
    assert (await task).status_code == 200


async def test_the_deadline_ends_an_answer_that_has_begun_and_refuses_one_that_has_not(
    nats_url: str, tmp_path: Path
) -> None:
    async with world(nats_url, tmp_path, request_deadline_s=1.0) as place:
        tokens = place.ids("one two")
        late = asking(place)
        await (await place.prefill.job()).claim()
        assert (await late).status_code == 503

        task = asking(place)
        job = await begun(place, *tokens)
        reply = (await task).json()
        final: Finalize = await job.told(Finalize)
        assert reply["choices"][0]["finish_reason"] == final.reason == "insufficient_system_resource"
        assert reply["usage"]["completion_tokens"] == final.count == len(tokens)


async def test_a_request_of_another_gateway_is_unknown(place: World) -> None:
    task = asking(place)
    job = await place.prefill.job()
    stranger = msgspec.structs.replace(job.work, request=RequestId("another"))
    assert (await Job(place.prefill, job.delivery, stranger, job.epoch).claim()).verdict == "unknown"
    await job.claim()
    await job.send(0, [place.stop()], hit=0, finish="stop")
    assert (await task).status_code == 200
