"""A chat completion's body into a conversation and its options, by the official library, with its refusals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
from deepseek_recipe import (
    ChatCompletionRequest,
    ConversationRequest,
    ConversionError,
    ConversionOptions,
    ModelVersion,
)

from shared.contracts import limits
from shared.contracts.errors import InvalidRequest, UnprocessableRequest

_SYNTAX = "invalid JSON request: "
_TYPING = "invalid request body: "


@dataclass(frozen=True)
class Converted:
    """`user_id` is the server's own field: it splits the account's namespace."""

    request: ConversationRequest
    model: str
    user_id: str | None
    has_tools: bool


def options_for(models: list[str]) -> ConversionOptions:
    """For models that are not DeepSeek's: thinking is off, and temperature and top_p count as given."""
    names = dict.fromkeys(models, ModelVersion.DeepseekV4Pro)
    return ConversionOptions(default_thinking_mode=False).with_model_versions_by_name(names)


def convert(body: bytes, options: ConversionOptions) -> Converted:
    """Not for the event loop with large bodies.

    A request for thinking is accepted and has no effect, as DeepSeek treats what a model does not have.
    Raises InvalidRequest (syntax, values), UnprocessableRequest (types).
    """
    native, model = _convert(body, options)
    fields = _fields(body)
    if native.conversation.thinking_mode:
        native, model = _convert(orjson.dumps({**fields, "thinking": {"type": "disabled"}}), options)
    _check_supported(native)
    return Converted(request=native, model=model, user_id=_user_id(fields), has_tools=bool(native.conversation.tools))


def answer_limit(request: ConversationRequest, prompt_tokens: int, context_tokens: int) -> int:
    """The most answer tokens. Raises InvalidRequest when prompt and answer do not fit the context."""
    try:
        allowed = request.resolve_max_tokens(prompt_tokens, context_tokens)
    except ConversionError as error:
        raise InvalidRequest(str(error)) from error
    if prompt_tokens >= context_tokens:
        raise InvalidRequest(
            f"This model's maximum context length is {context_tokens} tokens. However, your messages have "
            f"{prompt_tokens} tokens, which leaves no room for an answer. Please reduce the length of the messages."
        )
    return allowed


def _convert(body: bytes, options: ConversionOptions) -> tuple[ConversationRequest, str]:
    try:
        request = ChatCompletionRequest(body)
        model = request.model
        return request.convert(options), model
    except ConversionError as error:
        raise InvalidRequest(str(error)) from error
    except ValueError as error:
        text = str(error)
        if text.startswith(_TYPING):
            detail = text.removeprefix(_TYPING)
            raise UnprocessableRequest(f"Failed to deserialize the JSON body into the target type: {detail}") from error
        raise InvalidRequest(f"Failed to parse the request body as JSON: {text.removeprefix(_SYNTAX)}") from error


def _fields(body: bytes) -> dict[str, Any]:
    """What the library ignores; it has read the body already, so that this is an object."""
    try:
        fields: dict[str, Any] = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"Failed to parse the request body as JSON: {error}") from error
    return fields


def _check_supported(request: ConversationRequest) -> None:
    """What would need constrained decoding is refused: an answer that merely may have the right form is not that."""
    conversation = request.conversation
    if conversation.response_format in ("json_schema", "regex"):
        raise InvalidRequest(f"response_format of type '{conversation.response_format}' is not available")
    if any(tool.strict for tool in conversation.tools):
        raise InvalidRequest("strict tools are not available")
    if conversation.tools and request.inference_options.logprobs:
        raise InvalidRequest("logprobs are not available together with tools")


def _user_id(fields: dict[str, Any]) -> str | None:
    user_id = fields.get("user_id")
    if user_id is None:
        return None
    if not isinstance(user_id, str):
        raise UnprocessableRequest(
            "Failed to deserialize the JSON body into the target type: user_id: expected a string"
        )
    if len(user_id.encode()) > limits.USER_ID_BYTES_MAX:
        raise InvalidRequest(f"user_id is longer than {limits.USER_ID_BYTES_MAX} bytes")
    return user_id
