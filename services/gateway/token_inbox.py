"""What workers say to this gateway (tokens, claims) and what it says to them (acknowledge, resend, finalize).

Owns the table of requests under way and, for limits.ENDED_KEPT_S, of those that ended: a worker that died before it
settled is replaced, and the next one asks what is to be done. All state is in `request_state`; this is its edge.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog
from msgspec import MsgspecError

from services.gateway.background import Background
from services.gateway.request_state import Ended, Request
from shared.contracts import limits, messages, subjects
from shared.contracts.epoch import Stage
from shared.contracts.errors import DeepServeError
from shared.contracts.ids import GatewayId, RequestId, WorkerId
from shared.contracts.messages import Claim, ClaimReply, Message, TokenBatch
from shared.contracts.ports import Bus, Clock
from shared.runtime import rpc

log = structlog.get_logger()


@dataclass
class Tracked:
    """A request and who waits for its news. `release`: ends its hold with a reason, for when no worker will."""

    request: Request
    release: Callable[[str], None] = lambda reason: None
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class TokenInbox:
    def __init__(self, bus: Bus, gateway: GatewayId, clock: Clock, background: Background) -> None:
        self._bus = bus
        self._background = background
        self._gateway = gateway
        self._clock = clock
        self._open: dict[RequestId, Tracked] = {}
        self._ended: OrderedDict[RequestId, tuple[Ended, Callable[[str], None], float]] = OrderedDict()
        self._unsubscribe: list[Callable[[], Awaitable[None]]] = []
        self._counts: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def under_way(self) -> int:
        return len(self._open)

    def ended_by_state(self) -> dict[str, float]:
        """How many requests ended, since the start."""
        return {state: float(count) for state, count in self._counts.items()}

    async def start(self) -> None:
        """From now on claims are answered; work may be published after this."""
        self._unsubscribe.append(await self._bus.subscribe(subjects.tokens_of(self._gateway), self._on_tokens))
        self._unsubscribe.append(
            await rpc.serve(self._bus, subjects.claims_of(self._gateway), Claim, self._on_claim, queue=None)
        )

    async def stop(self) -> None:
        for unsubscribe in self._unsubscribe:
            await unsubscribe()
        self._unsubscribe.clear()

    async def idle(self) -> None:
        """Returns when no request is under way."""
        await self._idle.wait()

    def track(self, tracked: Tracked) -> None:
        self._open[tracked.request.request] = tracked
        self._idle.clear()

    def close(self, tracked: Tracked) -> None:
        """The request is over: whoever works on it is told the final count, or the hold is given back. Does not wait,
        so that nothing that ends the caller can come between."""
        request = tracked.request
        self._open.pop(request.request, None)
        self._counts[request.state.value] += 1
        if not self._open:
            self._idle.set()
        now_s = self._clock.monotonic_s()
        self._ended[request.request] = (request.ended(), tracked.release, now_s + limits.ENDED_KEPT_S)
        while self._ended:
            first = next(iter(self._ended))
            if self._ended[first][2] > now_s and len(self._ended) <= limits.ENDED_KEPT_MAX:
                break
            del self._ended[first]
        if not request.claimed:
            tracked.release("ended before any work")
            return
        self._background.spawn(self._say_end(request), "finalize")

    async def _say_end(self, request: Request) -> None:
        # What was received counts even if Finalize is lost: the worker falls back to what was acknowledged.
        await self.tell(request.acknowledge())
        await self.tell(request.finalize())

    async def tell(self, told: tuple[WorkerId, Message] | None) -> None:
        """One message to a worker. A message that cannot be sent is as good as one that is lost on the way."""
        if told is None:
            return
        worker, message = told
        try:
            await self._bus.send(subjects.control_of(worker), messages.encode(message))
        except DeepServeError as error:
            log.warning("control.unsent", worker=worker, error=error.message)

    async def _on_tokens(self, subject: str, payload: bytes) -> None:
        try:
            batch = messages.decode(TokenBatch, payload)
        except MsgspecError as error:
            log.warning("tokens.unreadable", subject=subject, error=str(error))
            return
        for entry in batch.entries:
            tracked = self._open.get(entry.request)
            if tracked is None:
                await self._say_again(entry.request, batch.worker)
            elif tracked.request.accept(entry, batch.worker):
                tracked.changed.set()

    async def _say_again(self, request: RequestId, worker: WorkerId) -> None:
        """A worker that still sends tokens of an ended request has missed its end."""
        ended = self._ended.get(request)
        told = ended[0].finalize() if ended else None
        if told is not None and told[0] == worker:
            await self.tell(told)

    async def _on_claim(self, claim: Claim) -> ClaimReply:
        tracked = self._open.get(claim.request)
        if tracked is None:
            return self._claim_ended(claim)
        reply = tracked.request.claim(claim)
        log.info("request.claimed", request=claim.request, epoch=claim.epoch, worker=claim.worker, said=reply.verdict)
        tracked.changed.set()
        return reply

    def _claim_ended(self, claim: Claim) -> ClaimReply:
        ended = self._ended.get(claim.request)
        if ended is None:
            return ClaimReply(verdict="unknown")
        request, release, _ = ended
        reply = request.claim(claim)
        if reply.verdict == "cancelled" and claim.epoch.stage is Stage.PREFILL and request.claimed:
            # An earlier worker had it and may be gone; this one has nothing to settle.
            release("ended before its prompt ran")
        return reply
