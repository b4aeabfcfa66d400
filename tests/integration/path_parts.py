"""Stand-ins at the ends of a request's path: a gateway with scripted claims, a billing that keeps books.

They say what the real ones say, and check what they hear: a token that comes twice with another value, or a settlement
that comes twice with another content, is an AssertionError of the test.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from nacl.signing import SigningKey

from shared.contracts import messages, subjects
from shared.contracts.block import pack_tokens
from shared.contracts.epoch import Epoch
from shared.contracts.ids import (
    AccountId,
    GatewayId,
    GrantId,
    HoldId,
    KeyId,
    NamespaceId,
    RequestId,
    prefixed,
)
from shared.contracts.messages import (
    NAMESPACE_KEY_SEAL,
    Acknowledge,
    Claim,
    ClaimReply,
    Finalize,
    FinishReason,
    GatewayHeartbeat,
    NamespaceKeyQuery,
    NamespaceKeyReply,
    PrefillWork,
    Release,
    Resend,
    Sampling,
    Settle,
    Settled,
    TokenBatch,
    TokenEntry,
    TokenLogprob,
    WorkerHeartbeat,
)
from shared.contracts.ports import Bus
from shared.contracts.tag import GrantClaims
from shared.runtime import rpc, sealing, signing
from shared.runtime.clock import SystemClock

MODEL = "hash"
WAIT_S = 20.0


@dataclass(frozen=True)
class Account:
    """`paid`: reads and writes the pool; where not `writes`, reads alone."""

    name: str
    paid: bool = True
    writes: bool = True
    namespace: NamespaceId = field(default_factory=lambda: NamespaceId(prefixed("ns_", os.urandom(16))))


@dataclass
class Books:
    """Billing's stand-in: signs grants, gives namespace keys, takes one end for each hold."""

    bus: Bus
    cluster_key: bytes
    signing_key: bytes = field(default_factory=lambda: os.urandom(32))
    settled: dict[RequestId, Settle] = field(default_factory=dict)
    released: dict[RequestId, Release] = field(default_factory=dict)
    namespace_keys: dict[NamespaceId, bytes] = field(default_factory=dict)
    keys_given: dict[str, set[NamespaceId]] = field(default_factory=lambda: defaultdict(set))
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def verify_key(self) -> bytes:
        return bytes(SigningKey(self.signing_key).verify_key)

    def grant(self, account: Account, request: RequestId, prompt_tokens: int, max_output_tokens: int) -> str:
        now_s = SystemClock().now_s()
        claims = GrantClaims(
            grant_id=GrantId(f"grant-{request}"),
            request=request,
            hold=HoldId(f"hold-{request}"),
            account=AccountId(account.name),
            key_id=KeyId(f"key-{account.name}"),
            model=MODEL,
            namespace=account.namespace,
            shared=(),
            cache_read=account.paid,
            cache_write=account.paid and account.writes,
            traffic_class="chat",
            retention_s=3_600,
            prompt_tokens=prompt_tokens,
            max_output_tokens=max_output_tokens,
            issued_at_s=now_s,
            deadline_s=now_s + 120,
        )
        return signing.sign(claims, self.signing_key)

    async def serve(self) -> list[Callable[[], Awaitable[None]]]:
        queue = subjects.BILLING_QUEUE
        return [
            await rpc.serve(self.bus, subjects.BILLING_SETTLE, Settle, self._settle, queue),
            await rpc.serve(self.bus, subjects.BILLING_RELEASE, Release, self._release, queue),
            await rpc.serve(self.bus, subjects.BILLING_NAMESPACE_KEY, NamespaceKeyQuery, self._key, queue),
        ]

    async def ended(self, request: RequestId) -> Settle | Release:
        """The hold's end, waited for."""
        async with asyncio.timeout(WAIT_S), self.changed:
            await self.changed.wait_for(lambda: request in self.settled or request in self.released)
        return self.settled.get(request) or self.released[request]

    def _claims(self, token: str) -> GrantClaims:
        return signing.verify(GrantClaims, token, self.verify_key, SystemClock().now_s())

    async def _settle(self, message: Settle) -> Settled:
        request = self._claims(message.grant).request
        async with self.changed:
            assert request not in self.released, "a hold has one end"
            assert self.settled.setdefault(request, message) == message, "the same settlement, or none"
            self.changed.notify_all()
        return Settled(amount_nano=1, currency="USD")

    async def _release(self, message: Release) -> Settled:
        request = self._claims(message.grant).request
        async with self.changed:
            assert request not in self.settled, "a hold has one end"
            self.released[request] = message
            self.changed.notify_all()
        return Settled(amount_nano=0, currency="USD")

    async def _key(self, message: NamespaceKeyQuery) -> NamespaceKeyReply:
        claims = self._claims(message.grant)
        assert message.namespace == claims.namespace
        assert claims.cache_read or claims.cache_write, "a trial account asks for no key"
        self.keys_given[claims.account].add(message.namespace)
        key = self.namespace_keys.setdefault(message.namespace, os.urandom(32))
        return NamespaceKeyReply(sealed_key=sealing.seal(self.cluster_key, NAMESPACE_KEY_SEAL, key))


@dataclass
class Asked:
    """One request as its gateway sees it. `stop_at`: the gateway names this count as the last."""

    request: RequestId
    grant: str
    stop_at: int | None = None
    epoch: Epoch | None = None
    worker: str | None = None
    tokens: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    hit_tokens: int | None = None
    finish: FinishReason | None = None
    error: str | None = None
    final: Finalize | None = None
    claims: list[Claim] = field(default_factory=list)

    @property
    def received(self) -> int:
        return next(i for i in range(len(self.tokens) + 1) if i not in self.tokens)

    @property
    def answer(self) -> list[int]:
        return [self.tokens[i] for i in range(self.received)]


class GatewayStandIn:
    """`deaf_to`: entries that are lost on the way, by a script that a test gives."""

    def __init__(self, bus: Bus, books: Books) -> None:
        self.id = GatewayId(f"gateway-{uuid.uuid4().hex[:8]}")
        self.asked: dict[RequestId, Asked] = {}
        self.deaf_to: Callable[[TokenEntry], bool] = lambda entry: False
        self.batches: list[TokenBatch] = []
        self.beats: dict[str, WorkerHeartbeat] = {}
        self._bus = bus
        self._books = books
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[GatewayStandIn]:
        stops = [
            await self._bus.subscribe(subjects.tokens_of(self.id), self._on_tokens),
            await rpc.serve(self._bus, subjects.claims_of(self.id), Claim, self._on_claim, queue=None),
            await self._bus.subscribe(subjects.WORKER_HEARTBEATS, self._on_heartbeat),
        ]
        beating = self._beating = asyncio.create_task(self._beat())
        try:
            yield self
        finally:
            beating.cancel()
            await asyncio.wait({beating})
            for stop in stops:
                await stop()

    def silence(self) -> None:
        """No heartbeat and no claim is answered any more."""
        self._beating.cancel()
        self.asked.clear()

    def note(self, account: Account, prompt: list[int], max_output_tokens: int, stop_at: int | None = None) -> Asked:
        """A new request, not yet published."""
        request = RequestId(str(uuid.uuid4()))
        grant = self._books.grant(account, request, len(prompt), max_output_tokens)
        asked = self.asked[request] = Asked(request, grant, stop_at)
        return asked

    async def ask(
        self,
        account: Account,
        prompt: list[int],
        max_output_tokens: int,
        *,
        temperature: float = 0.0,
        top_logprobs: int | None = None,
        stop_at: int | None = None,
    ) -> Asked:
        """Publishes the work of a new request."""
        asked = self.note(account, prompt, max_output_tokens, stop_at)
        work = PrefillWork(
            request=asked.request,
            attempt=1,
            gateway=self.id,
            model=MODEL,
            tokens=pack_tokens(prompt),
            sampling=Sampling(temperature=temperature, top_p=1.0, seed=7, stop_tokens=(2,), top_logprobs=top_logprobs),
            grant=asked.grant,
            published_at_s=SystemClock().now_s(),
        )
        await self._bus.publish(
            subjects.work_any("prefill", MODEL), messages.encode(work), subjects.message_id(asked.request, 1, "prefill")
        )
        return asked

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S), self._changed:
            await self._changed.wait_for(condition)

    async def idle(self, worker: str) -> None:
        """Until the worker says, from now on, that it works on nothing."""
        self.beats.pop(worker, None)
        await self.until(lambda: worker in self.beats and self.beats[worker].running == 0)

    async def _on_heartbeat(self, subject: str, payload: bytes) -> None:
        beat = messages.decode(WorkerHeartbeat, payload)
        self.beats[beat.worker] = beat
        async with self._changed:
            self._changed.notify_all()

    async def answered(self, asked: Asked) -> Asked:
        """Until the request is over."""
        await self.until(lambda: asked.final is not None or asked.error is not None)
        return asked

    async def finalize(self, asked: Asked, count: int, reason: FinishReason) -> None:
        """The one final count, to whoever holds the request."""
        assert asked.epoch is not None
        assert asked.worker is not None
        asked.final = Finalize(request=asked.request, epoch=asked.epoch, count=count, reason=reason)
        await self._bus.send(f"control.{asked.worker}", messages.encode(asked.final))
        async with self._changed:
            self._changed.notify_all()

    async def resend(self, asked: Asked, first: int) -> None:
        assert asked.epoch is not None
        message = Resend(request=asked.request, epoch=asked.epoch, first=first)
        await self._bus.send(f"control.{asked.worker}", messages.encode(message))

    async def _on_claim(self, claim: Claim) -> ClaimReply:
        asked = self.asked.get(claim.request)
        if asked is None:
            return ClaimReply(verdict="unknown")
        asked.claims.append(claim)
        if asked.epoch is not None and claim.epoch < asked.epoch:
            return ClaimReply(verdict="stale")
        delivered, final = pack_tokens(asked.answer), asked.final.count if asked.final else None
        if asked.final is not None or asked.error is not None:
            verdict: str = "cancelled"
        else:
            verdict = "go"
            asked.epoch, asked.worker = claim.epoch, claim.worker
        async with self._changed:
            self._changed.notify_all()
        return ClaimReply(
            verdict=verdict,  # type: ignore[arg-type]
            delivered=delivered,
            hit_tokens=asked.hit_tokens,
            final=final,
        )

    async def _on_tokens(self, subject: str, payload: bytes) -> None:
        batch = messages.decode(TokenBatch, payload)
        self.batches.append(batch)
        for entry in batch.entries:
            asked = self.asked.get(entry.request)
            if asked is not None and not self.deaf_to(entry):
                await self._take(asked, entry)
        async with self._changed:
            self._changed.notify_all()

    async def _take(self, asked: Asked, entry: TokenEntry) -> None:
        for index, token in enumerate(entry.tokens, start=entry.first):
            assert asked.tokens.setdefault(index, token) == token, "a token that was said is not changed"
        for index, logprob in enumerate(entry.logprobs or (), start=entry.first):
            assert asked.logprobs.setdefault(index, logprob) == logprob
        if entry.hit_tokens is not None:
            asked.hit_tokens = entry.hit_tokens
        if entry.error is not None:
            asked.error = entry.error.name
        if entry.finish is not None:
            asked.finish = entry.finish
        if asked.epoch is not None and asked.worker is not None:
            message = Acknowledge(request=asked.request, epoch=asked.epoch, received=asked.received)
            await self._bus.send(f"control.{asked.worker}", messages.encode(message))
        if asked.final is not None:
            return
        if asked.stop_at is not None and asked.received >= asked.stop_at:
            await self.finalize(asked, asked.stop_at, "stop")
        elif asked.finish is not None and entry.first + len(entry.tokens) == asked.received:
            await self.finalize(asked, asked.received, asked.finish)

    async def _beat(self) -> None:
        while True:
            beat = GatewayHeartbeat(gateway=self.id, sent_at_s=SystemClock().now_s())
            await self._bus.send(subjects.gateway_heartbeat(self.id), messages.encode(beat))
            await asyncio.sleep(0.5)
