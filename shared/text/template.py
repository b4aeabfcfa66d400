"""The model's own chat template (Jinja, sandboxed): a conversation becomes pieces of prompt text.

The template comes with the model's files and is run in a sandbox without access to anything; what clients write is
data to it and can neither run nor become a special token (`guard`). The same conversation always gives the same
prompt: a template that asks for the date finds no such function, since a prompt that changes daily has no prefix.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from deepseek_recipe import Conversation
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.contracts.errors import InvalidRequest, SettingsError
from shared.text.guard import Guard, Piece, free_seals
from shared.text.turns import Turn, turns


class ChatTemplate:
    """Renders conversations. Pure apart from time: long conversations go to a thread."""

    def __init__(self, source: str, guard: Guard, names: Mapping[str, str]) -> None:
        """`names`: what the template calls its special tokens (`bos_token`, `eos_token`, …). Raises SettingsError."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise SettingsError(f"the chat template does not compile: {error}") from error
        self._guard = guard
        self._names = dict(names)

    @classmethod
    def load(cls, path: Path, guard: Guard, names: Mapping[str, str]) -> ChatTemplate:
        """Raises SettingsError."""
        try:
            return cls(path.read_text(encoding="utf-8"), guard, names)
        except OSError as error:
            raise SettingsError(f"{path}: no chat template: {error}") from error

    def render(self, conversation: Conversation) -> list[Piece]:
        """The prompt up to where the model goes on: a new assistant turn, or the open last one.

        Raises InvalidRequest when the template refuses the conversation, or cannot continue its last turn.
        """
        parts = turns(conversation)
        seal, cut = free_seals([turn.content for turn in parts], 2)
        going_on = bool(parts) and parts[-1].open
        messages = [self._message(turn, seal, cut) for turn in parts]
        try:
            rendered = self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=not going_on,
                enable_thinking=False,
                **self._names,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidRequest(f"The chat template of this model refused the messages: {error}") from error
        if going_on:
            rendered, found, _ = rendered.rpartition(cut)
            if not found:
                raise InvalidRequest("The chat template of this model cannot continue the last message.")
        return self._guard.split(rendered, seal)

    def _message(self, turn: Turn, seal: str, cut: str) -> dict[str, str]:
        content = self._guard.protect(turn.content, seal)
        return {"role": turn.role, "content": content + cut if turn.open else content}


def _to_json(value: Any, indent: int | None = None) -> str:
    """As chat templates expect it: no escaping for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
