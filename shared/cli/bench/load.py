"""The load of `deepserve bench plane`: streamed chat completions from many clients at once, in a process of its own.

    python -m shared.cli.bench.load < plan.json > outcome.json

A client here must cost little beside the service that it measures: one connection each, kept alive, requests made of
prepared bytes, answers only looked through for their first event, their timing comments and their usage.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from typing import Final, cast

import msgspec
import uvloop

ANSWER_TIMEOUT_S: Final = 60.0
"""For each client's first answer and last one, beside the window."""
_END: Final = b"0\r\n\r\n"
_HEAD_BYTES: Final = 16 * 1024
_TAIL_BYTES: Final = 4 * 1024
_LENGTH: Final = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_TIMING: Final = re.compile(rb": timing (\{[^}]*\})")
_COMPLETION: Final = re.compile(rb'"completion_tokens":\s*(\d+)')
_HIT: Final = re.compile(rb'"prompt_cache_hit_tokens":\s*(\d+)')


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`clients` at once, each asking again as soon as it is answered, for `seconds` from the moment when each has had
    an answer. A client's prompt is `prompt`, begun with words of its own, and a question that no other request has."""

    host: str
    port: int
    api_key: str
    model: str
    clients: int
    seconds: float
    prompt: str
    max_tokens: int
    run: str


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. `begun_s`: when it was asked for, in time of the window, so that it is negative before it; `first_s`:
    from the request to its first event; `parts`: the service's own, in seconds."""

    begun_s: float
    first_s: float
    whole_s: float
    tokens: int
    hit_tokens: int
    parts: dict[str, float]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """All answers, those before the window too. `cpu_s`: processor time of the load itself from the first request to
    the last answer."""

    samples: tuple[Sample, ...]
    seconds: float
    cpu_s: float
    failure: str | None = None


class Reply:
    """One answer as it arrives. `feed` until it is `done`."""

    def __init__(self) -> None:
        self.done = False
        self.first_s: float | None = None
        self._head = b""
        self._tail = b""
        self._size = 0
        self._ok = False
        self._whole_size: int | None = None
        """Of an answer that tells its length: one that was complete before anything was written."""

    def feed(self, data: bytes, now_s: float) -> None:
        self._size += len(data)
        if len(self._head) < _HEAD_BYTES:
            self._head += data
            self._look_at_head(now_s)
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        if self._whole_size is not None:
            self.done = self._size >= self._whole_size
        else:
            self.done = self._tail.endswith(_END)

    def _look_at_head(self, now_s: float) -> None:
        head, found, _ = self._head.partition(b"\r\n\r\n")
        if not found:
            return
        self._ok = head.startswith(b"HTTP/1.1 200 ")
        length = _LENGTH.search(head)
        if length is not None:
            self._whole_size = len(head) + len(found) + int(length[1])
        if self.first_s is None and self._ok and b"data: " in self._head:
            self.first_s = now_s

    @property
    def failure(self) -> str | None:
        """Of a reply that is done: why it is no answer."""
        if not self._ok:
            return self._head.decode(errors="replace")[:400]
        if self.first_s is None or b'data: {"error"' in self._tail or _COMPLETION.search(self._tail) is None:
            return self._tail.decode(errors="replace")[-400:]
        return None

    def sample(self, window_s: float, sent_s: float, now_s: float) -> Sample:
        parts: dict[str, float] = {}
        for told in _TIMING.findall(self._head):
            parts |= msgspec.json.decode(told, type=dict[str, float])
        first_s = now_s if self.first_s is None else self.first_s
        return Sample(
            begun_s=sent_s - window_s,
            first_s=first_s - sent_s,
            whole_s=now_s - sent_s,
            tokens=_last(_COMPLETION, self._tail),
            hit_tokens=_last(_HIT, self._tail),
            parts=parts,
        )


def _last(pattern: re.Pattern[bytes], text: bytes) -> int:
    found = pattern.findall(text)
    return int(found[-1]) if found else 0


class Window:
    """When counting begins and ends, once each client has had an answer; and all answers, with their times."""

    def __init__(self, clients: int, seconds: float) -> None:
        self._cold = clients
        self._seconds = seconds
        self._stop_s = float("inf")
        self._answers: list[tuple[Reply, float, float]] = []

    def answered(self, reply: Reply, sent_s: float, now_s: float, *, first: bool) -> bool:
        """Whether to ask again."""
        self._answers.append((reply, sent_s, now_s))
        self._cold -= first
        if self._cold == 0 and self._stop_s == float("inf"):
            self._stop_s = now_s + self._seconds
        return now_s < self._stop_s

    def stop(self) -> None:
        """Something failed: nobody asks again."""
        self._stop_s = 0.0

    def samples(self) -> tuple[Sample, ...]:
        begun_s = self._stop_s - self._seconds
        return tuple(reply.sample(begun_s, sent_s, now_s) for reply, sent_s, now_s in self._answers)


class Client(asyncio.Protocol):
    """One connection that asks as long as its window wants."""

    def __init__(self, plan: Plan, number: int, window: Window) -> None:
        self.ended: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._plan = plan
        self._number = number
        self._window = window
        self._asked = 0
        self._sent_s = 0.0
        self._reply = Reply()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are asyncio's by what they do, not by their class.
        self._transport = cast(asyncio.Transport, transport)
        self._ask(self._transport)

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        self._reply.feed(data, now_s)
        if not self._reply.done or self._transport is None:
            return
        if (failure := self._reply.failure) is not None:
            self._window.stop()
            self._end(failure)
            return
        if self._window.answered(self._reply, self._sent_s, now_s, first=self._asked == 1):
            self._ask(self._transport)
        else:
            self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"the connection ended: {exc}" if exc else "the gateway closed the connection")

    def _ask(self, transport: asyncio.Transport) -> None:
        self._reply = Reply()
        transport.write(request_bytes(self._plan, self._number, self._asked))
        self._asked += 1
        self._sent_s = time.perf_counter()

    def _end(self, failure: str | None) -> None:
        if not self.ended.done():
            self.ended.set_result(failure)
        if self._transport is not None:
            self._transport.close()


def request_bytes(plan: Plan, client: int, number: int) -> bytes:
    """The whole HTTP request: a beginning that only this client's requests share, a question of its own."""
    content = f"Client {client} of {plan.run}. {plan.prompt} Question {number}: what comes next, and why?"
    body = msgspec.json.encode(
        {
            "model": plan.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": plan.max_tokens,
            "temperature": 0,
            "stream": True,
        }
    )
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {plan.host}:{plan.port}\r\n"
        f"Authorization: Bearer {plan.api_key}\r\nContent-Type: application/json\r\nX-DeepServe-Timing: 1\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def drive(plan: Plan) -> Outcome:
    """All clients to their end."""
    loop = asyncio.get_running_loop()
    window = Window(plan.clients, plan.seconds)
    clients = [Client(plan, number, window) for number in range(plan.clients)]
    begun_cpu_s = time.process_time()
    for client in clients:
        await loop.create_connection(lambda c=client: c, plan.host, plan.port)  # type: ignore[misc]
    limit_s = ANSWER_TIMEOUT_S + plan.seconds
    try:
        async with asyncio.timeout(limit_s):
            failures = await asyncio.gather(*(client.ended for client in clients))
        failure = next((text for text in failures if text is not None), None)
    except TimeoutError:
        failure = f"the answers did not end within {limit_s:.0f} s"
    cpu_s = time.process_time() - begun_cpu_s
    samples = () if failure else window.samples()
    return Outcome(samples=samples, seconds=plan.seconds, cpu_s=cpu_s, failure=failure)


def main() -> int:
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            outcome = runner.run(drive(plan))
    except OSError as error:
        outcome = Outcome(samples=(), seconds=plan.seconds, cpu_s=0.0, failure=f"cannot connect: {error}")
    sys.stdout.buffer.write(msgspec.json.encode(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main())
