"""Conversations with tools or an answer format as plain turns of text, in DeepSeek's own wording.

Models other than DeepSeek's have chat templates without tools, or with calls in a markup of their own, which the
official output processor does not parse. So tools, calls, results and format instructions are rendered by the official
V4 prompt encoding, cut at its turn markers, and given to the model's template as ordinary turns; what the model
answers in that markup becomes `tool_calls` again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from deepseek_recipe import Conversation, DeepseekV4Encoding, SpecialToken


class Turn(NamedTuple):
    """One message for a chat template; `open`: the last turn, which the model continues."""

    role: str
    content: str
    open: bool = False


_ROLES: Final = {
    SpecialToken.Bos.default_str(): "system",
    SpecialToken.LatestReminder.default_str(): "system",
    SpecialToken.User.default_str(): "user",
    SpecialToken.Assistant.default_str(): "assistant",
}
_END: Final = SpecialToken.Eos.default_str()
_THINKING_END: Final = SpecialToken.ThinkingEnd.default_str()
_PLAIN_ROLES: Final = {"system": "system", "user": "user", "assistant": "assistant", "latest_reminder": "system"}


def turns(conversation: Conversation) -> list[Turn]:
    """The turns of `conversation` (thinking off), system text first."""
    messages = conversation.messages
    plain = all(message.role in _PLAIN_ROLES and not message.tool_calls for message in messages)
    if plain and not conversation.tools and conversation.response_format == "text":
        return [Turn(_PLAIN_ROLES[message.role], message.content, message.prefix) for message in messages]
    return list(_rendered(conversation))


def _rendered(conversation: Conversation) -> Iterator[Turn]:
    rendered = DeepseekV4Encoding().render_conversation(conversation)
    prompt, role, content, last = rendered.prompt, "system", "", 0
    for start, end in rendered.special_ranges:
        content += prompt[last:start]
        spelling, last = prompt[start:end], end
        if spelling in _ROLES or spelling == _END:
            if content.strip() or spelling == _END:
                yield _turn(role, content)
            role, content = _ROLES.get(spelling, role), ""
        elif not (spelling == _THINKING_END and role == "assistant" and not content):
            content += spelling
    content += prompt[last:]
    if content:
        yield _turn(role, content)._replace(open=role == "assistant")


def _turn(role: str, content: str) -> Turn:
    return Turn(role, content.strip("\n") if role == "system" else content)
