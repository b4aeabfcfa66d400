"""Tokens on their way to the gateways, and the gateways' answers (invariants 3 and 11).

One message per step per gateway carries all its sequences. What a gateway has not acknowledged is kept in a log per
sequence and sent again when asked. A stream ends in one way: the gateway names the final count, the gateway is gone
(silent, and nobody listens for it), or a newer try at the same request takes its place.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import structlog

from shared.contracts import limits, messages, subjects
from shared.contracts.epoch import Epoch
from shared.contracts.errors import DeepServeError, to_record
from shared.contracts.ids import GatewayId, RequestId, WorkerId
from shared.contracts.messages import (
    Acknowledge,
    ClaimReply,
    Finalize,
    FinishReason,
    GatewayHeartbeat,
    Resend,
    TokenBatch,
    TokenEntry,
    TokenLogprob,
)
from shared.contracts.ports import Bus, Clock
from shared.worker.claims import claim
from shared.worker.token_log import TokenLog

log = structlog.get_logger()

_CONTROL = msgspec.msgpack.Decoder(Acknowledge | Resend | Finalize)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a stream ended. `count`: answer tokens that are paid. `superseded`: a newer try holds the request, and this
    one settles nothing."""

    count: int
    reasoning: int
    how: Literal["finalized", "gateway_lost", "superseded"]


def ending_named_by(reply: ClaimReply, acknowledged: int) -> Ending | None:
    """What a gateway's answer makes of a stream; None while the gateway lives and the stream goes on."""
    if reply.verdict == "stale":
        return Ending(acknowledged, 0, "superseded")
    if reply.final is not None:
        return Ending(reply.final, 0, "finalized")
    if reply.verdict == "go":
        return None
    return Ending(acknowledged, 0, "gateway_lost")


class TokenStream:
    """One sequence's way to its gateway. `ended` resolves once; whoever works on the request stops then."""

    def __init__(self, token_log: TokenLog, opened_at_s: float) -> None:
        self.log = token_log
        self.opened_at_s = opened_at_s
        self.ended: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self.closed = asyncio.Event()

    def end(self, ending: Ending) -> None:
        """The first ending counts."""
        if not self.ended.done():
            self.ended.set_result(ending)


class Emitter:
    """Owns the open streams of one worker. `run` must be under way for answers of gateways to be heard."""

    def __init__(self, bus: Bus, worker: WorkerId, clock: Clock) -> None:
        self._bus = bus
        self._worker = worker
        self._clock = clock
        self._streams: dict[RequestId, TokenStream] = {}
        self._kept: OrderedDict[RequestId, tuple[TokenLog, float]] = OrderedDict()
        self._pending: dict[GatewayId, list[TokenEntry]] = {}
        self._heard_s: dict[GatewayId, float] = {}
        self._asking: dict[RequestId, asyncio.Task[None]] = {}

    async def run(self, listening: asyncio.Event) -> None:
        """Listens to gateways until cancelled; sets `listening` when a claim may be made."""
        unsubscribe: list[Callable[[], Awaitable[None]]] = []
        try:
            unsubscribe.append(await self._bus.subscribe(subjects.control_of(self._worker), self._on_control))
            unsubscribe.append(await self._bus.subscribe(subjects.GATEWAY_HEARTBEATS, self._on_heartbeat))
            listening.set()
            while True:
                await asyncio.sleep(limits.HEARTBEAT_S)
                self._ask_silent()
                self._forget_kept()
        finally:
            for task in self._asking.values():
                task.cancel()
            if self._asking:
                await asyncio.wait(self._asking.values())
            for stop in unsubscribe:
                await stop()

    async def open(
        self, request: RequestId, epoch: Epoch, gateway: GatewayId, *, hit_tokens: int | None
    ) -> TokenStream:
        """A stream for a claimed try. An older try at the same request in this worker is ended first, and has left
        the engine when this returns."""
        while (older := self._streams.get(request)) is not None:
            older.end(Ending(older.log.acknowledged, 0, "superseded"))
            await older.closed.wait()
        token_log = TokenLog(request, epoch, gateway, hit_tokens=hit_tokens)
        stream = TokenStream(token_log, self._clock.monotonic_s())
        self._streams[request] = stream
        self._kept.pop(request, None)
        return stream

    def close(self, stream: TokenStream, *, keep: bool) -> None:
        """Forgets the stream. `keep`: its log still answers a gateway that missed something, for
        limits.CLOSED_LOG_S. Idempotent."""
        if stream.closed.is_set():
            return
        stream.closed.set()
        del self._streams[stream.log.request]
        if keep and (stream.log.acknowledged < stream.log.next_index or stream.log.error is not None):
            self._kept[stream.log.request] = (stream.log, self._clock.monotonic_s() + limits.CLOSED_LOG_S)
            while len(self._kept) > limits.CLOSED_LOGS_MAX:
                self._kept.popitem(last=False)

    def emit(
        self,
        stream: TokenStream,
        first: int,
        tokens: Sequence[int] = (),
        logprobs: Sequence[TokenLogprob] | None = None,
        finish: FinishReason | None = None,
    ) -> None:
        """Puts news of one sequence into the next flush. A gateway that takes nothing any more ends the stream."""
        try:
            stream.log.append(first, tokens, logprobs)
        except DeepServeError as error:
            log.warning("gateway.lagged", request=stream.log.request, error=error.message)
            stream.end(Ending(stream.log.acknowledged, 0, "gateway_lost"))
            return
        stream.log.finish = finish
        self._queue(stream.log, first)

    def fail(self, stream: TokenStream, error: DeepServeError) -> None:
        """The request ends without an answer; goes into the next flush."""
        stream.log.error = to_record(error)
        self._queue(stream.log, stream.log.next_index)

    async def flush(self) -> None:
        """One message for each gateway with news. A message that is lost is asked for again by its gateway."""
        pending, self._pending = self._pending, {}
        for gateway, entries in pending.items():
            batch = TokenBatch(worker=self._worker, entries=tuple(entries))
            try:
                await self._bus.send(subjects.tokens_of(gateway), messages.encode(batch))
            except DeepServeError as error:
                log.warning("tokens.unsent", gateway=gateway, error=error.message)

    def _queue(self, token_log: TokenLog, first: int) -> None:
        self._pending.setdefault(token_log.gateway, []).extend(token_log.entries_from(first))

    async def _on_control(self, subject: str, payload: bytes) -> None:
        try:
            message = _CONTROL.decode(payload)
        except msgspec.MsgspecError as error:
            log.warning("control.unreadable", subject=subject, error=str(error))
            return
        token_log = self._log_of(message.request)
        if token_log is None or token_log.epoch != message.epoch:
            return
        match message:
            case Acknowledge(received=received):
                token_log.acknowledge(received)
            case Resend(first=first):
                self._queue(token_log, first)
                await self.flush()
            case Finalize(count=count, reasoning=reasoning):
                stream = self._streams.get(message.request)
                if stream is not None:
                    stream.end(Ending(count, reasoning, "finalized"))

    async def _on_heartbeat(self, subject: str, payload: bytes) -> None:
        try:
            heartbeat = messages.decode(GatewayHeartbeat, payload)
        except msgspec.MsgspecError as error:
            log.warning("heartbeat.unreadable", subject=subject, error=str(error))
            return
        self._heard_s[heartbeat.gateway] = self._clock.monotonic_s()

    def _log_of(self, request: RequestId) -> TokenLog | None:
        stream = self._streams.get(request)
        if stream is not None:
            return stream.log
        kept = self._kept.get(request)
        return kept[0] if kept else None

    def _ask_silent(self) -> None:
        """Silence alone proves nothing, since it may be ours: a gateway that was not heard is asked by a claim."""
        bound_s = self._clock.monotonic_s() - limits.PEER_LEASE_S
        for stream in self._streams.values():
            heard_s = self._heard_s.get(stream.log.gateway, stream.opened_at_s)
            silent = max(heard_s, stream.opened_at_s) < bound_s
            if silent and not stream.ended.done() and stream.log.request not in self._asking:
                self._asking[stream.log.request] = asyncio.create_task(self._ask(stream))
        self._heard_s = {gateway: heard_s for gateway, heard_s in self._heard_s.items() if heard_s >= bound_s}

    async def _ask(self, stream: TokenStream) -> None:
        token_log = stream.log
        try:
            reply = await claim(self._bus, token_log.gateway, token_log.request, token_log.epoch, self._worker)
            ending = ending_named_by(reply, token_log.acknowledged)
            if ending is None:
                self._heard_s[token_log.gateway] = self._clock.monotonic_s()
            else:
                log.warning("stream.ended_by_claim", request=token_log.request, how=ending.how)
                stream.end(ending)
        except DeepServeError as error:
            log.warning("gateway.unclear", request=token_log.request, error=error.message)
        finally:
            del self._asking[token_log.request]

    def _forget_kept(self) -> None:
        now_s = self._clock.monotonic_s()
        while self._kept and next(iter(self._kept.values()))[1] <= now_s:
            self._kept.popitem(last=False)
