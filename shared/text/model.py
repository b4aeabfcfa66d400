"""The text side of a converted model folder: names, stop tokens, tokenizer, chat template. No torch, no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from shared.contracts.errors import SettingsError
from shared.text.template import ChatTemplate
from shared.text.tokenizer import Tokenizer

CARD_FILE: Final = "model.json"
TOKENIZER_FILE: Final = "tokenizer.json"
TEMPLATE_FILE: Final = "chat_template.jinja"


class _Config(msgspec.Struct, frozen=True):
    context_tokens: int


class _Card(msgspec.Struct, frozen=True):
    """What text needs of `model.json`; the rest of it belongs to the engine."""

    config: _Config
    bos_token: int
    eos_token: int
    stop_tokens: tuple[int, ...]


@dataclass(frozen=True)
class TextModel:
    """`stop_tokens` end a turn. `tokenizer_file`: for libraries that load the tokenizer themselves."""

    context_tokens: int
    stop_tokens: tuple[int, ...]
    tokenizer: Tokenizer
    template: ChatTemplate
    tokenizer_file: Path


def load_text_model(folder: Path) -> TextModel:
    """Reads files: not for the event loop. Raises SettingsError that says what is wrong with the folder."""
    path = folder / CARD_FILE
    try:
        card = msgspec.json.decode(path.read_bytes(), type=_Card)
    except OSError as error:
        raise SettingsError(f"{folder} holds no converted model: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise SettingsError(f"{path} is not a model card: {error}") from error
    tokenizer = Tokenizer.load(folder / TOKENIZER_FILE)
    names = {"bos_token": tokenizer.decode([card.bos_token]), "eos_token": tokenizer.decode([card.eos_token])}
    return TextModel(
        context_tokens=card.config.context_tokens,
        stop_tokens=card.stop_tokens,
        tokenizer=tokenizer,
        template=ChatTemplate.load(folder / TEMPLATE_FILE, tokenizer.guard, names),
        tokenizer_file=folder / TOKENIZER_FILE,
    )
