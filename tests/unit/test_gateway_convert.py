"""Bodies into conversations; refusals with DeepSeek's status and words (reference, 1.5 and rows 52 to 58)."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from services.gateway.convert import answer_limit, convert, options_for, outline
from services.gateway.prepare import traffic_class
from shared.contracts import limits
from shared.contracts.errors import ClientError, InvalidRequest, UnprocessableRequest

MODEL = "small"
OPTIONS = options_for([MODEL, "other"])
HELLO = [{"role": "user", "content": "Hello, json"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def body(**fields: Any) -> bytes:
    return orjson.dumps({"model": MODEL, "messages": HELLO} | fields)


def refused(data: bytes) -> ClientError:
    with pytest.raises(ClientError) as caught:
        convert(data, OPTIONS)
    return caught.value


def test_a_plain_request() -> None:
    converted = convert(body(temperature=0.5, top_p=0.9, seed=7, max_tokens=5, user_id="u", stream=True), OPTIONS)
    options = converted.request.inference_options
    assert (options.temperature, options.seed) == (0.5, 7)
    assert options.top_p == pytest.approx(0.9)
    assert (converted.model, converted.user_id, converted.has_tools) == (MODEL, "u", False)
    assert converted.request.stream


@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        (b"{", InvalidRequest, "Failed to parse the request body as JSON: EOF while parsing"),
        (b"", InvalidRequest, "Failed to parse the request body as JSON"),
        (b'{"model":"small"}', UnprocessableRequest, "into the target type: missing field `messages`"),
        (body(temperature="hot"), UnprocessableRequest, 'invalid type: string "hot", expected f32'),
        (body(messages=[{"role": "developer", "content": "x"}]), UnprocessableRequest, "unknown variant `developer`"),
        (body(user_id=5), UnprocessableRequest, "user_id"),
        (body(user_id="é" * 257), InvalidRequest, "user_id is longer than 512 bytes"),
        (body(model="nope"), InvalidRequest, "The supported API model names are other, small, but you passed nope."),
        (body(messages=[]), InvalidRequest, "Empty input messages"),
        (body(temperature=3), InvalidRequest, "temperature"),
        (body(n=2), InvalidRequest, "n = 1"),
        (body(stop=["x"] * 17), InvalidRequest, "Stop string array too long: 17"),
        (body(stream_options={"include_usage": True}), InvalidRequest, "stream_options should be set along with"),
        (body(top_logprobs=3), InvalidRequest, "logprobs"),
        (body(response_format={"type": "regex", "regex": "a+"}), InvalidRequest, "'regex' is not available"),
        (
            body(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}),
            InvalidRequest,
            "'json_schema' is not available",
        ),
        (body(tools=[TOOL], logprobs=True), InvalidRequest, "logprobs are not available together with tools"),
    ],
)
def test_what_is_refused_and_how(data: bytes, kind: type[ClientError], words: str) -> None:
    error = refused(data)
    assert type(error) is kind
    assert words in error.message


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ({"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}, "image_url"),
        ({"type": "file", "file": {"file_data": "data:image/png;base64,AAAA"}}, "file"),
    ],
)
def test_what_the_model_cannot_see_is_refused_by_name(part: dict[str, Any], name: str) -> None:
    words = {"type": "text", "text": "What is it?"}
    assert convert(body(messages=[{"role": "user", "content": [words]}]), OPTIONS).model == MODEL
    error = refused(body(messages=[*HELLO, {"role": "user", "content": [words, part]}]))
    assert type(error) is InvalidRequest
    assert error.message == f"messages[1]: content of type `{name}` is not supported, this model reads text only"


def test_a_prompt_has_at_least_its_roles_and_what_was_written() -> None:
    asked = body(
        messages=[{"role": "user", "content": " " * 9 + "x" * 10 + "\n"}, {"role": "assistant", "content": "y"}]
    )
    assert outline(asked).least_tokens(len) == 2 + 10
    for unreadable in (b"{", b"[]", b"{}", b'{"messages": 1}'):
        assert outline(unreadable).least_tokens(len) == 0


def test_a_body_of_too_many_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_PARTS_MAX", 3)
    part = {"type": "text", "text": "a"}
    fits = body(messages=[{"role": "user", "content": [part, part]}], tools=[TOOL])
    assert outline(fits).messages == 1
    with pytest.raises(InvalidRequest, match="more than 3 content parts"):
        outline(body(messages=[{"role": "user", "content": [part, part]}] * 2))


def test_strict_tools_are_refused_since_nothing_enforces_them() -> None:
    strict = {"type": "function", "function": TOOL["function"] | {"strict": True}}  # type: ignore[operator]
    assert refused(body(tools=[strict])).message == "strict tools are not available"


def test_a_user_id_of_512_bytes_passes() -> None:
    assert convert(body(user_id="é" * 256), OPTIONS).user_id == "é" * 256


def test_thinking_has_no_effect_on_a_model_without_it() -> None:
    converted = convert(body(thinking={"type": "enabled"}, temperature=0, reasoning_effort="high"), OPTIONS)
    assert not converted.request.conversation.thinking_mode
    assert converted.request.inference_options.temperature == 0
    assert refused(body(thinking="on")).status == 422


def test_tools_are_seen() -> None:
    assert convert(body(tools=[TOOL]), OPTIONS).has_tools
    assert not convert(body(tools=[TOOL], tool_choice="none"), OPTIONS).has_tools


def test_the_answer_fits_the_context() -> None:
    asked = convert(body(max_tokens=10), OPTIONS).request
    assert answer_limit(asked, 90, 100) == 10
    with pytest.raises(InvalidRequest, match="maximum context length is 100 tokens"):
        answer_limit(asked, 91, 100)
    silent = convert(body(), OPTIONS).request
    assert answer_limit(silent, 90, 100) == 10
    assert answer_limit(silent, 90, 100_000) == 8192
    for too_many in (100, 101):
        with pytest.raises(InvalidRequest, match="maximum context length is 100 tokens"):
            answer_limit(silent, too_many, 100)


@pytest.mark.parametrize(
    ("header", "setting", "has_tools", "expected"),
    [
        (None, None, False, "chat"),
        (None, None, True, "agent"),
        (None, "chat", True, "chat"),
        (None, "agent", False, "agent"),
        ("agent", "chat", False, "agent"),
        ("chat", None, True, "chat"),
    ],
)
def test_the_traffic_class(header: str | None, setting: Any, has_tools: bool, expected: str) -> None:
    assert traffic_class(header, setting, has_tools=has_tools) == expected


def test_an_unknown_traffic_class_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="agent or chat"):
        traffic_class("bulk", None, has_tools=False)
