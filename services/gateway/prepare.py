"""From a request's body to what workers need: converted, rendered, encoded, checked against the context."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import deepseek_recipe
from deepseek_recipe import ConversionOptions

from services.gateway.convert import Converted, answer_limit, convert, options_for, outline, too_long
from services.gateway.output import TextTools
from shared.contracts import limits
from shared.contracts.errors import InvalidRequest
from shared.contracts.messages import Sampling
from shared.contracts.tag import TrafficClass
from shared.text.model import TextModel, load_text_model
from shared.text.tokenizer import TooManyTokens


@dataclass(frozen=True)
class ServedModel:
    """A model that this gateway speaks for."""

    name: str
    text: TextModel
    tools: TextTools


@dataclass(frozen=True)
class Prepared:
    """`tokens`: the prompt. `max_output_tokens`: at least 1, within the context."""

    converted: Converted
    model: ServedModel
    tokens: list[int]
    max_output_tokens: int


class Models:
    """All models of this gateway, by name. Long bodies have few threads of their own: ordinary ones are not stuck
    behind them, and a client that leaves does not make room for one more before its thread is done."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = {model.name: model for model in models}
        self._options: ConversionOptions = options_for(list(self._models))
        self._long = ThreadPoolExecutor(limits.LONG_BODIES_AT_ONCE, thread_name_prefix="long-body")

    def close(self) -> None:
        """What waits for a thread is dropped; what runs in one is bounded and ends by itself."""
        self._long.shutdown(wait=False, cancel_futures=True)

    @property
    def names(self) -> list[str]:
        return list(self._models)

    async def prepare(self, body: bytes) -> Prepared:
        """Raises InvalidRequest, UnprocessableRequest. Long bodies are worked on beside the event loop."""
        if len(body) <= limits.ENCODE_INLINE_CHARS:
            return self._prepare(body)
        if len(body) <= limits.LONG_BODY_BYTES:
            return await asyncio.to_thread(self._prepare, body)
        return await asyncio.get_running_loop().run_in_executor(self._long, self._prepare_long, body)

    def _prepare_long(self, body: bytes) -> Prepared:
        """What cannot fit any model of this gateway is refused before the costly steps."""
        seen = outline(body)
        texts = [model.text for model in self._models.values()]
        bounds = [(text.context_tokens, seen.least_tokens(text.tokenizer.least_tokens)) for text in texts]
        if all(least > context for context, least in bounds):
            raise too_long(*max(bounds), completion=0)
        return self._prepare(body)

    def _prepare(self, body: bytes) -> Prepared:
        converted = convert(body, self._options)
        model = self._models[converted.model]
        pieces = model.text.template.render(converted.request.conversation)
        context_tokens = model.text.context_tokens
        try:
            tokens = model.text.tokenizer.encode_within(pieces, context_tokens)
        except TooManyTokens as error:
            completion = converted.request.inference_options.max_tokens or 0
            raise too_long(context_tokens, error.at_least, completion) from error
        if not tokens:
            raise InvalidRequest("The messages give an empty prompt.")
        allowed = answer_limit(converted.request, len(tokens), context_tokens)
        return Prepared(converted=converted, model=model, tokens=tokens, max_output_tokens=allowed)


def load_model(name: str, folder: Path) -> ServedModel:
    """Reads files: not for the event loop. Raises SettingsError."""
    text = load_text_model(folder)
    native = deepseek_recipe.Tokenizer.from_file(str(text.tokenizer_file))
    return ServedModel(name=name, text=text, tools=TextTools(text.tokenizer, native, text.stop_tokens))


def sampling(prepared: Prepared, seed: int) -> Sampling:
    """`seed`: for a request that names none."""
    options = prepared.converted.request.inference_options
    temperature, top_p = options.temperature, options.top_p
    return Sampling(
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        seed=seed if options.seed is None else options.seed,
        stop_tokens=prepared.model.text.stop_tokens,
        top_logprobs=(options.top_logprobs or 0) if options.logprobs else None,
    )


def traffic_class(header: str | None, setting: TrafficClass | None, *, has_tools: bool) -> TrafficClass:
    """The request's header goes before the key's setting, that before what the request looks like.

    Raises InvalidRequest for a header that is neither `agent` nor `chat`.
    """
    match header:
        case "agent" | "chat":
            return header
        case None:
            return setting or ("agent" if has_tools else "chat")
        case _:
            raise InvalidRequest("X-DeepServe-Traffic-Class must be agent or chat")
