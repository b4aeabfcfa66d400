"""Between the flow that makes chunks and the writer whose pace the client sets.

Bounded: a client that lags too far behind is disconnected, and never slows the request's work or its final count.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from services.gateway.output import Chunk, Opened
from shared.contracts.errors import DeepServeError


@dataclass
class Batch:
    """What came since the writer last looked. `timings`: for benches, each before the chunks that came with it."""

    opened: Opened | None = None
    chunks: list[Chunk] = field(default_factory=list)
    timings: list[dict[str, float]] = field(default_factory=list)
    ended: bool = False


class Outbox:
    """`stream`: whether the client wants a stream; None until its request was read."""

    def __init__(self, chunks_max: int) -> None:
        self.error: DeepServeError | None = None
        self.stream: bool | None = None
        self._chunks_max = chunks_max
        self._batch = Batch()
        self._news = asyncio.Event()
        self._taken = False

    def open(self, opened: Opened) -> None:
        self._batch.opened = opened
        self._batch.timings.append(opened.timing)

    def time(self, timing: dict[str, float]) -> None:
        self._batch.timings.append(timing)

    def put(self, chunks: list[Chunk]) -> bool:
        """False when the client lags too far behind: too much is here, and the writer is not done with what it took."""
        self._batch.chunks += chunks
        if self._batch.chunks:
            self._news.set()
        return not self._taken or len(self._batch.chunks) <= self._chunks_max

    def end(self) -> None:
        """Nothing comes any more."""
        self._batch.ended = True
        self._news.set()

    def fail(self, error: DeepServeError) -> None:
        """The request ended in an error. The first one counts."""
        self.error = self.error or error
        self.end()

    async def take(self, timeout_s: float) -> Batch | None:
        """Everything that is there, at once; None after `timeout_s` of silence. Asking says that what was taken before
        is written."""
        self._taken = False
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return None
        self._news.clear()
        self._taken = True
        batch, self._batch = self._batch, Batch(ended=self._batch.ended)
        if batch.ended:
            self._news.set()
        return batch
