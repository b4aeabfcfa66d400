"""A chat completion's body into a conversation and its options, by the official library, with its refusals."""

from __future__ import annotations

from collections.abc import Callable
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
_RENDERED_ROLES = ("system", "user", "tool")
"""Of assistant turns a template may leave out what was thought."""


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
    _check_readable(fields)
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


def too_long(context_tokens: int, at_least: int, completion: int) -> InvalidRequest:
    """The refusal of a prompt that was not counted to its end, in the words of one that was."""
    return InvalidRequest(
        f"This model's maximum context length is {context_tokens} tokens. However, you requested at least "
        f"{at_least + completion} tokens (at least {at_least} in the messages, {completion} in the completion). "
        "Please reduce the length of the messages or completion."
    )


@dataclass(frozen=True)
class Outline:
    """What can be known of a prompt before it is converted. `texts`: what every template renders."""

    messages: int
    texts: tuple[str, ...]

    def least_tokens(self, of_text: Callable[[str], int]) -> int:
        """Tokens at the very least: a role for each message, and its text, which a template may trim."""
        return self.messages + sum(of_text(text.strip()) for text in self.texts)


def outline(body: bytes) -> Outline:
    """For long bodies: conversion works on every small part with the interpreter lock held, this does not. An empty one
    of a body that cannot be read; its conversion says why. Raises InvalidRequest when there are too many parts."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return Outline(0, ())
    listed = fields.get("messages") if isinstance(fields, dict) else None
    if not isinstance(listed, list):
        return Outline(0, ())
    messages = [message for message in listed if isinstance(message, dict)]
    lists = [fields.get("tools"), *(message.get(name) for message in messages for name in ("content", "tool_calls"))]
    if sum(len(parts) for parts in lists if isinstance(parts, list)) > limits.BODY_PARTS_MAX:
        raise InvalidRequest(f"The request has more than {limits.BODY_PARTS_MAX} content parts, tools and tool calls.")
    contents = (message.get("content") for message in messages if message.get("role") in _RENDERED_ROLES)
    return Outline(len(listed), tuple(content for content in contents if isinstance(content, str)))


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


def _check_readable(fields: dict[str, Any]) -> None:
    """The library puts a placeholder where a model without eyes gets an image: an answer to it would be made up."""
    for index, message in enumerate(fields["messages"]):
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part["type"] != "text":
                raise InvalidRequest(
                    f"messages[{index}]: content of type `{part['type']}` is not supported, this model reads text only"
                )


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
