"""Protocols between the pure parts and the outside world: at most five methods each, one real adapter and one fake."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Literal, Protocol

import msgspec

from shared.contracts.block import Fingerprint
from shared.contracts.ids import RequestId
from shared.contracts.messages import FinishReason, Sampling, TokenLogprob

Space = Literal["pool", "handoff"]


class Clock(Protocol):
    def now_s(self) -> float:
        """Wall time, seconds since the epoch."""
        ...

    def monotonic_s(self) -> float: ...


class Delivery(Protocol):
    """One delivery of a work message. Exactly one of ack, nak, drop ends it; a late ack proves nothing (epochs do)."""

    payload: bytes
    """The message, unsealed."""
    subject: str
    number: int
    """From 1; raised by JetStream at each delivery: the third part of the epoch."""

    async def ack(self) -> None:
        """Confirmed by the server within a bound; raises DeadlineExceeded otherwise."""
        ...

    async def nak(self, delay_s: float) -> None: ...

    async def in_progress(self) -> None:
        """Renews the lease."""
        ...

    async def drop(self) -> None:
        """Ends it without work (term): a stale epoch, a message that nobody can read."""
        ...


class Bus(Protocol):
    async def publish(self, subject: str, payload: bytes, message_id: str) -> None:
        """Work into its stream, sealed. Returns when JetStream acknowledged; a known `message_id` is not stored twice.

        Raises Overloaded when the stream is full, DeadlineExceeded when no answer came.
        """
        ...

    def pull(self, subjects: Sequence[str], batch: Callable[[], int]) -> AsyncIterator[Delivery]:
        """Deliveries of durable pull consumers, one for each subject. `batch()` is asked before each fetch how many
        more the worker can take; at 0 nothing is fetched. Ends when the iterator is closed."""
        ...

    async def send(self, subject: str, payload: bytes) -> None:
        """Core message: fire and forget."""
        ...

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        """Core request. Raises DeadlineExceeded, or Overloaded when nobody listens."""
        ...

    async def subscribe(
        self, subject: str, handler: Callable[[str, bytes], Awaitable[bytes | None]], queue: str | None = None
    ) -> Callable[[], Awaitable[None]]:
        """`handler(subject, payload)` for each message; what it returns is the reply. Without a queue, messages are
        handled one after another, in order; with a queue, concurrently within a bound. Returns the unsubscribe."""
        ...


class ObjectInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    object_bytes: int
    stored_at_s: float


class BlockStore(Protocol):
    """Objects: whole, immutable, named once. All calls are bounded in time and never block the event loop."""

    async def put(self, space: Space, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """The parts, one after another, as one object; durable and whole, or absent. Raises StoreFailed errors of the
        tree (Overloaded, DeadlineExceeded); after a time-out the object may still appear."""
        ...

    async def get(self, space: Space, name: str) -> bytes:
        """Raises BlockMiss(absent | late | unreachable)."""
        ...

    async def delete(self, space: Space, name: str) -> None:
        """Idempotent."""
        ...

    def list(self, space: Space) -> AsyncIterator[ObjectInfo]: ...

    async def close(self) -> None: ...


# -- the engine -------------------------------------------------------------------------------------------------------


class EngineProfile(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is. `kv_bytes_token`: KV of one token over all layers, in bytes. `block_shape`, `block_dtype`:
    of one full block's payload, C-contiguous."""

    model: str
    fingerprint: Fingerprint
    context_tokens: int
    vocabulary: int
    block_tokens: int
    block_dtype: str
    block_shape: tuple[int, ...]
    kv_bytes_token: int
    pages: int
    sequences_max: int


class SequenceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A request inside an engine. `tokens`: all known ids, prompt then delivered answer; `prompt_tokens` of them are
    the prompt. `max_new_tokens` bounds answer tokens in all, counted from index 0 of the answer. `prefix`: payloads of
    the blocks from position 0, each a whole block; `tail`: a partial block after them (payload, number of tokens).
    Loaded tokens must be fewer than `tokens`, since at least one is always computed."""

    request: RequestId
    tokens: Sequence[int]
    prompt_tokens: int
    max_new_tokens: int
    sampling: Sampling
    prefix: Sequence[bytes | memoryview] = ()
    tail: tuple[bytes | memoryview, int] | None = None


class Produced(msgspec.Struct, frozen=True, kw_only=True):
    """News of one sequence after a step. `first`: answer index of `tokens[0]`. `computed`: positions whose KV is in
    its pages now, so blocks [0, computed // block_tokens) are full. `finish`: stop token or length reached; the
    sequence is stepped no more, and its pages stay until `remove`."""

    request: RequestId
    first: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    computed: int
    finish: FinishReason | None


class Engine(Protocol):
    """A model with paged KV. Not thread-safe: one thread owns it. No clock, no network.

    Sampling is counter-based: a token depends on (seed, position) and its own prefix alone, whatever else is in the
    step. A prompt row and a decode row are the same kind of row: tokens computed catch up with tokens known.
    """

    profile: EngineProfile

    def add(self, spec: SequenceSpec) -> None:
        """Reserves pages for the known tokens and one more (never more than can come) and imports the payloads.

        Later pages are taken one by one as positions need them. Raises OutOfPages (nothing changed), InvalidRequest
        (tokens outside the vocabulary or over the context), BlockMiss(shape) when a payload has another size than the
        profile says.
        """
        ...

    def step(self, budget_rows: int) -> list[Produced]:
        """One forward pass over at most `budget_rows` rows: decode rows first, then prompt rows in order of arrival,
        cut at block boundaries where the budget allows. An empty list: nothing to do.

        A sequence that finds no page waits for others to end; if nothing at all can run for want of pages, the youngest
        that waits finishes with `insufficient_system_resource`."""
        ...

    def export(self, request: RequestId, block: int, tokens: int) -> bytes:
        """A copy of the KV of the first `tokens` positions of block `block`: the payload of a whole block, or of a
        tail. The positions must be computed."""
        ...

    def remove(self, request: RequestId) -> None:
        """Frees its pages. Idempotent; the cancel path."""
        ...

    def pages_free(self) -> int: ...
