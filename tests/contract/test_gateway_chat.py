"""Chat completions by the official SDK: stream and whole, usage, stop strings, log probabilities, tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Reference

from shared.contracts.block import unpack_tokens
from shared.contracts.messages import Finalize, Sampling, TokenLogprob
from tests.contract.gateway_world import CONTEXT, MODEL, World, world
from tests.unit.text_models import small_tokenizer_json

pytestmark = pytest.mark.servers

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
PROMPT = "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
async def place(nats_url: str, tmp_path: Path) -> AsyncIterator[World]:
    async with world(nats_url, tmp_path) as made:
        yield made


def prompt_ids() -> list[int]:
    return list(Reference.from_str(small_tokenizer_json()).encode(PROMPT, add_special_tokens=False).ids)


async def ask(
    place: World, tokens: list[int], served: dict[str, Any] | None = None, **fields: Any
) -> tuple[Any, Finalize]:
    """(what the SDK returned, the final count that the worker was told)."""
    serving = asyncio.create_task(place.answer(tokens, **(served or {})))
    fields = {"model": MODEL, "messages": HELLO} | fields
    answer: Any = await place.sdk().chat.completions.create(**fields)
    if fields.get("stream"):
        answer = [chunk async for chunk in answer]
    return answer, await serving


async def test_stream_and_whole_are_the_same_message_with_the_same_usage(place: World) -> None:
    tokens = [*place.ids("the quick fox é😀!"), place.stop()]
    whole, final = await ask(place, tokens, {"hit": 16})
    chunks, final_of_stream = await ask(place, tokens, {"hit": 16, "step": 3}, stream=True)

    assert whole.choices[0].message.content == "the quick fox é😀!"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"
    prompt_tokens = len(prompt_ids())
    for usage in (whole.usage, chunks[-1].usage):
        assert (usage.prompt_tokens, usage.completion_tokens) == (prompt_tokens, len(tokens))
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert usage.prompt_cache_hit_tokens == usage.prompt_tokens_details.cached_tokens == 16
        assert usage.prompt_cache_hit_tokens + usage.prompt_cache_miss_tokens == usage.prompt_tokens
    assert (final.count, final.reason) == (final_of_stream.count, final_of_stream.reason) == (len(tokens), "stop")
    assert whole.id == final.request
    assert {chunk.id for chunk in chunks} == {final_of_stream.request}
    assert whole.model == MODEL
    assert whole.system_fingerprint == chunks[0].system_fingerprint == "fp_0001020304"


async def test_the_frames_of_a_stream(place: World) -> None:
    tokens = place.ids("the fox")
    serving = asyncio.create_task(place.answer(tokens, finish="length"))
    body = {"model": MODEL, "messages": HELLO, "stream": True}
    reply = await place.http.post("/v1/chat/completions", json=body)
    final = await serving
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["x-request-id"] == final.request
    lines = reply.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line.startswith("data: {") for line in lines[:-2])
    assert "id:" not in {line.split(" ")[0] for line in reply.text.splitlines()}


async def test_the_hold_says_what_was_asked_for(place: World) -> None:
    _, final = await ask(place, [*place.ids("x"), place.stop()], max_tokens=5)
    (hold,) = place.billing.holds()
    assert (hold.request, hold.model, hold.max_output_tokens) == (final.request, MODEL, 5)
    assert (hold.prompt_tokens, hold.user_id, hold.traffic_class) == (len(prompt_ids()), None, "chat")


async def test_the_work_says_what_was_asked_for(place: World) -> None:
    asking = asyncio.create_task(
        place.http.post("/chat/completions", json={"model": MODEL, "messages": HELLO, "seed": 3, "top_p": 0.25})
    )
    job = await place.prefill.job()
    assert unpack_tokens(job.work.tokens) == prompt_ids()
    assert job.work.sampling == Sampling(temperature=1.0, top_p=0.25, seed=3, stop_tokens=(place.stop(),))
    assert job.delivery.subject == f"prefill.{MODEL}.any"
    await job.claim()
    await job.send(0, [place.stop()], hit=0, finish="stop")
    assert (await asking).json()["choices"][0]["message"]["content"] == ""


async def test_without_a_seed_each_request_draws_its_own(place: World) -> None:
    seeds = set()
    for _ in range(3):
        asking = asyncio.create_task(ask_raw(place, {"model": MODEL, "messages": HELLO}))
        job = await place.prefill.job()
        seeds.add(job.work.sampling.seed)
        await job.claim()
        await job.send(0, [place.stop()], hit=0, finish="stop")
        await asking
    assert len(seeds) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)


async def ask_raw(place: World, body: dict[str, Any], **headers: str) -> Any:
    return await place.http.post("/v1/chat/completions", json=body, headers=headers)


async def test_a_stop_string_names_the_count_at_the_token_that_completes_it(place: World) -> None:
    tokens = place.ids("one two STOP three and more")
    count = next(n for n in range(1, len(tokens)) if "STOP" in place.tokenizer.decode(tokens[:n]))
    answer, final = await ask(place, tokens, stop=["STOP"])
    assert answer.choices[0].message.content == "one two "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == final.count == count < len(tokens)


async def test_log_probabilities_of_prefill_and_decode(place: World) -> None:
    tokens = place.ids("a fox")
    logprobs = [TokenLogprob(logprob=-float(n), top=((token, -float(n)),)) for n, token in enumerate(tokens)]
    asking = asyncio.create_task(ask_raw(place, {"model": MODEL, "messages": HELLO, "logprobs": True}))
    job = await place.prefill.job()
    assert job.work.sampling.top_logprobs == 0
    await job.claim()
    await job.send(0, tokens[:1], hit=0, logprobs=logprobs[:1])
    decoding = job.decoding(place.decode)
    await decoding.claim()
    await decoding.send(1, tokens[1:], logprobs=logprobs[1:], finish="length")
    content = (await asking).json()["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == "a fox"
    assert [entry["logprob"] for entry in content] == [entry.logprob for entry in logprobs]


async def test_log_probabilities_of_a_character_that_the_limit_cuts(place: World) -> None:
    tokens = place.ids("😀")[:2]
    logprobs = [TokenLogprob(logprob=-float(n), top=()) for n in range(2)]
    body = {"model": MODEL, "messages": [{"role": "user", "content": "😀"}], "logprobs": True, "max_tokens": 2}
    asking = asyncio.create_task(ask_raw(place, body))
    job = await place.prefill.job()
    await job.claim()
    await job.send(0, tokens, hit=0, logprobs=logprobs, finish="length")
    answer = (await asking).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["bytes"]) for entry in content] == [("\\xf0", [240]), ("\\x9f", [159])]
    assert [entry["logprob"] for entry in content] == [0.0, -1.0]
    assert answer["usage"]["completion_tokens"] == len(content)


async def test_a_tool_call_comes_back_as_one(place: World) -> None:
    markup = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    answer, _ = await ask(place, [*place.ids(markup), place.stop()], tools=[TOOL])
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("f", "{}")
    (hold,) = place.billing.holds()
    assert hold.traffic_class == "agent"


async def test_the_traffic_class_by_header_and_user_id(place: World) -> None:
    serving = asyncio.create_task(place.answer([place.stop()]))
    body = {"model": MODEL, "messages": HELLO, "user_id": "u-1"}
    reply = await ask_raw(place, body, **{"X-DeepServe-Traffic-Class": "agent"})
    await serving
    assert reply.status_code == 200
    (hold,) = place.billing.holds()
    assert (hold.traffic_class, hold.user_id) == ("agent", "u-1")
    assert (await ask_raw(place, body, **{"X-DeepServe-Traffic-Class": "bulk"})).status_code == 400


async def test_the_longest_prompt(place: World) -> None:
    reply = await ask_raw(place, {"model": MODEL, "messages": [{"role": "user", "content": "é" * CONTEXT}]})
    assert reply.status_code == 400
    assert f"maximum context length is {CONTEXT} tokens" in reply.json()["error"]["message"]
    assert place.billing.holds() == []


async def test_timing_is_told_to_who_asks(place: World) -> None:
    tokens = place.ids("the fox")
    serving = asyncio.create_task(place.answer(tokens, finish="length"))
    body = {"model": MODEL, "messages": HELLO, "stream": True}
    lines = (await ask_raw(place, body, **{"X-DeepServe-Timing": "1"})).text.split("\n\n")
    await serving
    assert lines[0].startswith(": timing {")
    timing = json.loads(lines[0].removeprefix(": timing "))
    assert (timing["lookup_s"], timing["read_s"], timing["compute_s"]) == (0.002, 0.003, 0.004)
    assert {"tag_s", "prepare_s", "queue_s", "hold_s", "worker_queue_s", "delivery_s"} < timing.keys()
    second = [line for line in lines[1:] if line.startswith(": timing ")]
    assert [list(json.loads(line.removeprefix(": timing "))) for line in second] == [["handoff_s"]]

    serving = asyncio.create_task(place.answer(tokens, finish="length"))
    reply = await ask_raw(place, {"model": MODEL, "messages": HELLO}, **{"X-DeepServe-Timing": "1"})
    await serving
    assert json.loads(reply.headers["x-deepserve-timing"]).keys() >= timing.keys() | {"handoff_s"}
    assert "timing" not in reply.text
