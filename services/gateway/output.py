"""Answer tokens into the client's chunks, by the official processor; the whole answer is folded from the same chunks.

The one final count: each token the worker produced counts, a stop token too (it ends the sequence; it is counted and
not shown), up to the one that completes a stop string. The processor sees only tokens with text, so the usage on its
last chunk is rewritten to that count.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import deepseek_recipe
import orjson
from deepseek_recipe import (
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ConversationRequest,
    InferenceChunk,
    InferenceFinishReason,
    PromptUsage,
    StreamProcessor,
)

from shared.contracts.errors import InternalError
from shared.contracts.messages import FinishReason, TokenLogprob
from shared.text.token_bytes import shown
from shared.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


class Chunk(NamedTuple):
    """`last`: carries the finish reason and the usage."""

    native: ChatCompletionChunk
    last: bool


class TextTools:
    """What all answers of a model share. `hidden`: ids without text for the client."""

    def __init__(self, tokenizer: Tokenizer, native: deepseek_recipe.Tokenizer, stop_tokens: tuple[int, ...]) -> None:
        self.tokenizer = tokenizer
        self.native = native
        self.hidden = tokenizer.special_ids | set(stop_tokens)


class Answer:
    """One request's output: `ready`, then `push` per token until `finished`, else `finish`.

    `finished`: a stop string was completed, or `finish` was called; no token counts any more.

    With tools the tokens go in as text, since their markup is text to models other than DeepSeek's; else as ids, which
    log probabilities need.
    """

    def __init__(self, request: ConversationRequest, request_id: str, model: str, tools: TextTools) -> None:
        parsing = request.parsing_options
        generator = ChatCompletionRequest.chunk_generator(request, request_id, model)
        self._processor = StreamProcessor(generator, parsing, tools.native)
        self._logprobs = request.inference_options.logprobs
        self._text = tools.tokenizer.stream() if parsing.parse_tool_calls else None
        self._hidden = tools.hidden
        self._token_bytes = tools.tokenizer.token_bytes
        self._reason: FinishReason = "stop"
        self._held: deque[tuple[int, TokenLogprob]] = deque()
        self._cut: list[dict[str, Any]] = []
        self.count = 0
        self.finished = False

    def ready(self, prompt_tokens: int, hit_tokens: int, fingerprint: str | None) -> list[Chunk]:
        """The first chunk: the role."""
        prompt = PromptUsage(prompt_tokens=prompt_tokens, prompt_cache_hit_tokens=hit_tokens)
        return self._process(InferenceChunk.ready(prompt_usage=prompt, system_fingerprint=fingerprint))

    def push(self, token: int, logprob: TokenLogprob | None) -> list[Chunk]:
        """One more token of the answer."""
        self.count += 1
        if token in self._hidden:
            return []
        if self._text is not None:
            text = self._text.step(token)
            return self._process(InferenceChunk.text(text, 1)) if text else []
        if not self._logprobs or logprob is None:
            return self._process(InferenceChunk.tokens([token], None))
        self._held.append((token, logprob))
        return self._process(InferenceChunk.tokens([token], [(logprob.logprob, logprob.top)]))

    def finish(self, reason: FinishReason) -> list[Chunk]:
        """The sequence ended; what was held back comes out, then the last chunk."""
        self._reason = reason
        native = InferenceFinishReason.Stop if reason == "stop" else InferenceFinishReason.Length
        chunks = self._process(InferenceChunk.finish(native))
        # The processor drops a character that is not whole at the end, with its tokens.
        self._cut = [self._entry(token, logprob) for token, logprob in self._held]
        return chunks

    def close(self) -> None:
        self._processor.close()

    def frame(self, chunk: Chunk) -> bytes:
        """One server-sent event."""
        text = chunk.native.to_json()
        return b"data: " + (orjson.dumps(self.corrected(text)) if chunk.last else text.encode()) + b"\n\n"

    def corrected(self, text: str) -> dict[str, Any]:
        """A document with usage and finish reason, chunk or whole, with the final count in it."""
        document: dict[str, Any] = orjson.loads(text)
        usage = document["usage"]
        usage["completion_tokens"] = self.count
        usage["total_tokens"] = usage["prompt_tokens"] + self.count
        details = usage.get("completion_tokens_details")
        if details:
            details["reasoning_tokens"] = min(details["reasoning_tokens"], self.count)
        if self._reason == "insufficient_system_resource":
            document["choices"][0]["finish_reason"] = self._reason
        if self._cut:
            content = (document["choices"][0].get("logprobs") or {}).get("content") or []
            document["choices"][0]["logprobs"] = {"content": content + self._cut}
        return document

    def _entry(self, token: int, logprob: TokenLogprob) -> dict[str, Any]:
        top = [self._token(other, value) for other, value in logprob.top]
        return self._token(token, logprob.logprob) | {"top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._token_bytes(token)
        return {"token": shown(data), "logprob": logprob, "bytes": list(data)}

    def _process(self, piece: InferenceChunk) -> list[Chunk]:
        try:
            natives = self._processor.push(piece)
        except RuntimeError as error:
            raise InternalError(f"the output processor failed: {error}") from error
        self.finished = self._processor.finished
        chunks = [
            Chunk(native, last=self.finished and index == len(natives) - 1)
            for index, native in enumerate(natives)
            if isinstance(native, ChatCompletionChunk)
        ]
        if self._held:
            for _ in range(sum(_entries(chunk.native) for chunk in chunks)):
                self._held.popleft()
        return chunks


def _entries(native: ChatCompletionChunk) -> int:
    """Log probabilities that a chunk tells."""
    logprobs = orjson.loads(native.to_json())["choices"][0]["logprobs"]
    return len(logprobs["content"]) if logprobs else 0


class Opened(NamedTuple):
    """What is known when the first token is here. `timing`: parts of the time to it, in seconds."""

    answer: Answer
    request_id: str
    model: str
    prompt_tokens: int
    hit_tokens: int
    timing: dict[str, float]


class Whole:
    """Folds the chunks of an answer into one response."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._response: ChatCompletionResponse | None = None

    def add(self, chunk: Chunk) -> None:
        """The response takes its time of creation from the first chunk."""
        if self._response is None:
            created = int(orjson.loads(chunk.native.to_json())["created"])
            _, request_id, model, prompt_tokens, hit_tokens, _ = self._opened
            self._response = ChatCompletionResponse(request_id, model, created, prompt_tokens, hit_tokens)
        self._response.accumulate(chunk.native)

    def body(self) -> bytes:
        """The JSON of the whole answer. Raises InternalError before the last chunk."""
        if self._response is None or not self._opened.answer.finished:
            raise InternalError("the answer is not complete")
        return orjson.dumps(self._opened.answer.corrected(self._response.to_json()))
