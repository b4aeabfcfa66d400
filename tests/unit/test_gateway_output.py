"""Tokens into chunks: stream and whole answer are one, and the count is the final count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import deepseek_recipe
import orjson
import pytest

from services.gateway.convert import convert, options_for
from services.gateway.output import Answer, Chunk, Opened, TextTools, Whole
from shared.contracts.errors import InternalError
from shared.contracts.messages import FinishReason, TokenLogprob
from shared.text.tokenizer import Tokenizer
from tests.unit.text_models import small_tokenizer_json

DOCUMENT = small_tokenizer_json()
TOKENIZER = Tokenizer(DOCUMENT)
STOP = TOKENIZER.id_of("<|im_end|>") or 0
TOOLS = TextTools(TOKENIZER, deepseek_recipe.Tokenizer.from_str(DOCUMENT), (STOP,))
OPTIONS = options_for(["small"])
TOOL = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
CALL = (
    'I look.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_time">\n'
    '<｜DSML｜parameter name="zone" string="true">U"TC</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)


class Run:
    """One answer, its stream and its whole, from the same tokens."""

    def __init__(
        self,
        tokens: Sequence[int],
        finish: FinishReason | None = "stop",
        drawn: Sequence[TokenLogprob] | None = None,
        **fields: Any,
    ) -> None:
        body = {"model": "small", "messages": [{"role": "user", "content": "hi json"}]} | fields
        request = convert(orjson.dumps(body), OPTIONS).request
        self.answer = Answer(request, "the-id", "small", TOOLS)
        whole = Whole(Opened(self.answer, "the-id", "small", 100, 64, {}))
        chunks: list[Chunk] = self.answer.ready(100, 64, "fp_1")
        for index, token in enumerate(tokens):
            if self.answer.finished:
                break
            chunks += self.answer.push(token, drawn[index] if drawn else None)
        if not self.answer.finished and finish is not None:
            chunks += self.answer.finish(finish)
        self.events = [orjson.loads(self.answer.frame(chunk).removeprefix(b"data: ")) for chunk in chunks]
        for chunk in chunks:
            whole.add(chunk)
        self.whole = orjson.loads(whole.body()) if finish is not None or self.answer.finished else {}

    @property
    def text(self) -> str:
        return "".join(event["choices"][0]["delta"].get("content") or "" for event in self.events)

    @property
    def last(self) -> dict[str, Any]:
        event: dict[str, Any] = self.events[-1]
        return event


def ids(text: str) -> list[int]:
    return TOKENIZER.encode_text(text)


def usage(count: int) -> dict[str, Any]:
    return {
        "prompt_tokens": 100,
        "completion_tokens": count,
        "total_tokens": 100 + count,
        "prompt_tokens_details": {"cached_tokens": 64},
        "prompt_cache_hit_tokens": 64,
        "prompt_cache_miss_tokens": 36,
    }


def test_stream_and_whole_are_one_answer_and_the_stop_token_counts_unseen() -> None:
    tokens = [*ids("the fox é😀!"), STOP]
    run = Run(tokens, stream=True)
    assert run.text == "the fox é😀!"
    assert run.whole["choices"][0]["message"] == {"role": "assistant", "content": "the fox é😀!"}
    assert run.last["usage"] == run.whole["usage"] == usage(len(tokens))
    assert [event["choices"][0]["finish_reason"] for event in run.events[:-1]] == [None] * (len(run.events) - 1)
    assert run.last["choices"][0]["finish_reason"] == run.whole["choices"][0]["finish_reason"] == "stop"
    assert {event["id"] for event in [*run.events, run.whole]} == {"the-id"}
    assert {event["system_fingerprint"] for event in [*run.events, run.whole]} == {"fp_1"}
    assert {event["created"] for event in [*run.events, run.whole]} == {run.events[0]["created"]}
    assert run.events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_a_stop_string_ends_the_count_at_the_token_that_completes_it() -> None:
    tokens = ids("one two STOP three")
    ends = next(n for n in range(1, len(tokens) + 1) if "STOP" in TOKENIZER.decode(tokens[:n]))
    run = Run(tokens, finish=None, stop=["STOP"])
    assert run.answer.finished
    assert run.answer.count == ends < len(tokens)
    assert (run.text, run.whole["choices"][0]["finish_reason"]) == ("one two ", "stop")
    assert run.last["usage"] == run.whole["usage"] == usage(ends)


def test_half_a_stop_string_at_the_end_is_text() -> None:
    run = Run(ids("one ST"), finish="length", stop=["STOP"])
    assert run.text == run.whole["choices"][0]["message"]["content"] == "one ST"
    assert run.whole["choices"][0]["finish_reason"] == "length"


def test_a_character_cut_by_the_length_counts_all_the_same() -> None:
    tokens = ids("ok 😀")[:-1]
    run = Run(tokens, finish="length")
    assert run.text.startswith("ok")
    assert run.last["usage"] == usage(len(tokens))


def test_no_tokens_but_a_stop() -> None:
    run = Run([STOP])
    assert (run.text, run.whole["choices"][0]["message"]["content"]) == ("", "")
    assert run.last["usage"] == usage(1)


def test_usage_is_null_before_the_last_chunk_only_where_it_was_asked_for() -> None:
    asked = Run(ids("the fox"), stream=True, stream_options={"include_usage": True})
    assert [event["usage"] for event in asked.events[:-1]] == [None] * (len(asked.events) - 1)
    silent = Run(ids("the fox"), stream=True)
    assert all("usage" not in event for event in silent.events[:-1])
    assert silent.last["usage"] == usage(len(ids("the fox")))


def test_an_exhausted_system_says_so() -> None:
    run = Run(ids("the fox"), finish="insufficient_system_resource")
    assert run.last["choices"][0]["finish_reason"] == "insufficient_system_resource"
    assert run.whole["choices"][0]["finish_reason"] == "insufficient_system_resource"


def test_markup_of_tools_becomes_tool_calls_from_any_tokens() -> None:
    run = Run([*ids(CALL), STOP], tools=[TOOL], stream=True)
    message = run.whole["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert message["content"] == run.text == "I look."
    assert (call["function"]["name"], orjson.loads(call["function"]["arguments"])) == ("get_time", {"zone": 'U"TC'})
    assert run.whole["choices"][0]["finish_reason"] == run.last["choices"][0]["finish_reason"] == "tool_calls"
    assert run.last["usage"]["completion_tokens"] == len(ids(CALL)) + 1
    streamed = [d for event in run.events for d in event["choices"][0]["delta"].get("tool_calls", ())]
    assert {delta["index"] for delta in streamed} == {0}
    assert "".join(delta["function"]["arguments"] for delta in streamed) == call["function"]["arguments"]


def test_markup_without_tools_is_text() -> None:
    assert Run(ids(CALL)).text == CALL


def test_log_probabilities_pair_with_tokens_and_the_stop_token_has_none() -> None:
    tokens = [*ids("a fox"), STOP]
    drawn = [TokenLogprob(logprob=-0.5 - n, top=((token, -0.5 - n), (65, -9.0))) for n, token in enumerate(tokens)]
    run = Run(tokens, drawn=drawn, logprobs=True, top_logprobs=2)
    content = run.whole["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == "a fox"
    assert [entry["logprob"] for entry in content] == [-0.5 - n for n in range(len(tokens) - 1)]
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * len(content)
    assert content[0]["bytes"] == list(content[0]["token"].encode())


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
@pytest.mark.parametrize("stopped", [False, True])
def test_each_token_of_a_cut_character_has_its_log_probability(cut: int, stopped: bool) -> None:
    tokens = ids("a😀")
    assert [TOKENIZER.token_bytes(token) for token in tokens] == [b"a", b"\xf0", b"\x9f", b"\x98", b"\x80"]
    tokens = tokens[: 1 + cut] + [STOP] * stopped
    drawn = [TokenLogprob(logprob=-0.5 - n, top=((token, -0.5 - n), (65, -9.0))) for n, token in enumerate(tokens)]
    run = Run(tokens, "stop" if stopped else "length", drawn=drawn, logprobs=True, top_logprobs=2)
    whole = run.whole["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in whole] == ["a", "\\xf0", "\\x9f", "\\x98", "\\x80"][: 1 + cut]
    assert [entry["bytes"] for entry in whole] == [[97], [240], [159], [152], [128]][: 1 + cut]
    assert [entry["logprob"] for entry in whole] == [-0.5 - n for n in range(1 + cut)]
    assert whole[-1]["top_logprobs"] == [
        {"token": whole[-1]["token"], "logprob": whole[-1]["logprob"], "bytes": whole[-1]["bytes"]},
        {"token": "b", "logprob": -9.0, "bytes": [98]},
    ]
    streamed = [event["choices"][0]["logprobs"] for event in run.events]
    assert [entry for logprobs in streamed if logprobs for entry in logprobs["content"]] == whole
    assert run.last["usage"]["completion_tokens"] == len(tokens)


def test_an_unfinished_answer_has_no_whole() -> None:
    body = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}
    answer = Answer(convert(orjson.dumps(body), OPTIONS).request, "the-id", "small", TOOLS)
    whole = Whole(Opened(answer, "the-id", "small", 1, 0, {}))
    for chunk in answer.ready(1, 0, None):
        whole.add(chunk)
    with pytest.raises(InternalError, match="not complete"):
        whole.body()
