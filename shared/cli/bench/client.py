"""One streamed chat completion, timed at the client."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any, Final

import httpx2

from shared.cli.failure import CommandFailed

TIMEOUT_S: Final = 600.0
TIMING_COMMENT: Final = ": timing "


@dataclass(frozen=True)
class Answer:
    """`first_token_s`: from sending the request to the first chunk, which leaves the gateway with the first token. (Its
    text may come later: newlines before an answer are dropped, as by the official service.) `timing`: the service's
    own parts of it, in seconds, as far as it tells them."""

    first_token_s: float
    whole_s: float
    usage: dict[str, Any]
    timing: dict[str, float] = field(default_factory=dict)

    @property
    def prompt_tokens(self) -> int:
        return int(self.usage["prompt_tokens"])

    @property
    def hit_tokens(self) -> int:
        return int(self.usage["prompt_cache_hit_tokens"])


class ChatClient:
    """Blocking; keeps its connection, so that a measurement holds no TCP handshake."""

    def __init__(self, gateway_url: str, api_key: str, model: str) -> None:
        self._model = model
        headers = {"Authorization": f"Bearer {api_key}", "X-DeepServe-Timing": "1"}
        self._http = httpx2.Client(base_url=gateway_url, headers=headers, timeout=TIMEOUT_S)

    def close(self) -> None:
        self._http.close()

    def ask(self, content: str, *, max_tokens: int, user_id: str | None = None) -> Answer:
        """Raises CommandFailed when the service does not answer with a stream."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        if user_id is not None:
            body["user_id"] = user_id
        sent_s = time.perf_counter()
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as reply:
                if reply.status_code != 200:
                    reply.read()
                    raise CommandFailed(f"the gateway answered {reply.status_code}: {reply.text[:300]}")
                return _read(reply, sent_s)
        except httpx2.TransportError as error:
            raise CommandFailed(f"the gateway did not answer: {error}") from error


def _read(reply: httpx2.Response, sent_s: float) -> Answer:
    first_token_s: float | None = None
    usage: dict[str, Any] | None = None
    timing: dict[str, float] = {}
    for line in reply.iter_lines():
        if line.startswith(TIMING_COMMENT):
            timing |= json.loads(line.removeprefix(TIMING_COMMENT))
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            raise CommandFailed(f"the answer ended with an error: {chunk['error']['message']}")
        if first_token_s is None:
            first_token_s = time.perf_counter() - sent_s
        usage = chunk.get("usage") or usage
    if first_token_s is None or usage is None:
        raise CommandFailed("the answer ended before it began")
    return Answer(first_token_s=first_token_s, whole_s=time.perf_counter() - sent_s, usage=usage, timing=timing)
