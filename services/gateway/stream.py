"""A chat completion on the wire: raw ASGI, frames encoded once, whatever is queued in one write (rows 42 to 46).

Nothing is sent before there is something to say, so that a request that fails at once gets its true HTTP status. After
`keep_alive_s` of silence the response begins with a comment (`: keep-alive`, stream) or a blank line (whole), which
JSON allows. From then on an error is an error frame, or the error's JSON, and never followed by `[DONE]`.

With `X-DeepServe-Timing: 1` a stream has a comment `: timing {json}` right before its first content, and another one
(`handoff_s`) before its second token; a whole answer has them in the response header of the same name, unless the
response had begun. The parts are `stopwatch.Stopwatch`'s, in seconds.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.edge import Call, Edge
from services.gateway.errors import body_of, response_of
from services.gateway.outbox import Batch, Outbox
from services.gateway.output import DONE, Answer, Whole
from services.gateway.request_flow import RequestFlow
from services.gateway.request_work import SlowClient
from shared.contracts import limits
from shared.contracts.errors import DeepServeError, InternalError

TIMING_HEADER = "x-deepserve-timing"


class Body(Protocol):
    """How an answer is written."""

    content_type: bytes
    keep_alive: bytes

    def render(self, batch: Batch) -> bytes:
        """What to write now."""
        ...

    def end(self) -> bytes: ...

    def error(self, error: DeepServeError) -> bytes: ...

    def header(self) -> dict[bytes, bytes]:
        """More response headers, asked for when the response begins."""
        ...


class StreamBody:
    content_type = b"text/event-stream; charset=utf-8"
    keep_alive = b": keep-alive\n\n"

    def __init__(self, *, timing: bool) -> None:
        self._timing = timing
        self._answer: Answer | None = None

    def render(self, batch: Batch) -> bytes:
        if batch.opened is not None:
            self._answer = batch.opened.answer
        timings = batch.timings if self._timing else []
        comments = [b": timing " + orjson.dumps(timing) + b"\n\n" for timing in timings]
        frames = [self._answer.frame(chunk) for chunk in batch.chunks] if self._answer else []
        return b"".join([*comments, *frames])

    def end(self) -> bytes:
        return DONE

    def error(self, error: DeepServeError) -> bytes:
        return b"data: " + body_of(error) + b"\n\n"

    def header(self) -> dict[bytes, bytes]:
        return {b"cache-control": b"no-cache"}


class WholeBody:
    content_type = b"application/json"
    keep_alive = b"\n"

    def __init__(self, *, timing: bool) -> None:
        self._timing = timing
        self._timings: dict[str, float] = {}
        self._whole: Whole | None = None

    def render(self, batch: Batch) -> bytes:
        if batch.opened is not None:
            self._whole = Whole(batch.opened)
        for timing in batch.timings:
            self._timings |= timing
        if self._whole is not None:
            for chunk in batch.chunks:
                self._whole.add(chunk)
        return b""

    def end(self) -> bytes:
        if self._whole is None:
            raise InternalError("an answer ended before it began")
        return self._whole.body()

    def error(self, error: DeepServeError) -> bytes:
        return body_of(error)

    def header(self) -> dict[bytes, bytes]:
        return {TIMING_HEADER.encode(): orjson.dumps(self._timings)} if self._timing and self._timings else {}


class Writer:
    """Empties the outbox at the client's pace. `run` once."""

    def __init__(self, outbox: Outbox, scope: Scope, receive: Receive, send: Send, *, timing: bool) -> None:
        self._outbox = outbox
        self._scope = scope
        self._receive = receive
        self._send_raw = send
        self._timing = timing
        self._body: Body | None = None
        self._begun = False

    async def run(self, keep_alive_s: float) -> None:
        """Raises TimeoutError when the client does not take a write in time."""
        while True:
            batch = await self._outbox.take(keep_alive_s)
            if self._body is None and self._outbox.stream is not None:
                kind = StreamBody if self._outbox.stream else WholeBody
                self._body = kind(timing=self._timing)
            if batch is not None and batch.ended:
                await self._end(batch)
                return
            if self._body is None:
                continue
            part = self._body.keep_alive if batch is None else self._body.render(batch)
            if part:
                await self._send(part, self._body, more=True)

    async def _end(self, batch: Batch) -> None:
        error, body = self._outbox.error, self._body
        if error is not None and (body is None or (not self._begun and not batch.chunks)):
            await response_of(error)(self._scope, self._receive, self._send_raw)
        elif body is not None:
            rest = body.render(batch)
            await self._send(rest + (body.end() if error is None else body.error(error)), body, more=False)

    async def _send(self, part: bytes, body: Body, *, more: bool) -> None:
        async with asyncio.timeout(limits.CLIENT_WRITE_TIMEOUT_S):
            if not self._begun:
                self._begun = True
                headers = {b"content-type": body.content_type, **body.header()}
                if not more:
                    headers[b"content-length"] = str(len(part)).encode()
                await self._send_raw({"type": "http.response.start", "status": 200, "headers": list(headers.items())})
            await self._send_raw({"type": "http.response.body", "body": part, "more_body": more})


class ChatResponse(Response):
    """Runs the request while it answers; a client that leaves ends both."""

    def __init__(self, edge: Edge, call: Call, *, timing: bool) -> None:
        super().__init__()
        self._edge = edge
        self._call = call
        self._timing = timing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises what is a bug of the flow; the server answers 500 or cuts the connection."""
        outbox = Outbox(limits.STREAM_BUFFER_TOKENS_MAX)
        writer = Writer(outbox, scope, receive, send, timing=self._timing)
        loop = asyncio.get_running_loop()
        flow = loop.create_task(RequestFlow(self._edge, self._call, outbox).run(), name="flow")
        writing = loop.create_task(writer.run(self._edge.keep_alive_s), name="write")
        gone = loop.create_task(_disconnected(receive), name="disconnect")
        try:
            running = {flow, writing, gone}
            while not writing.done() and not gone.done() and not _failed(flow):
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (flow, writing, gone):
                task.cancel()
            await asyncio.wait({flow, writing, gone})
        for task in (flow, writing):
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, SlowClient | TimeoutError):
                raise error


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
