"""The world around a real gateway: a scripted billing that signs real statements, scripted workers on a real bus.

The gateway's app listens on loopback; whoever tests it talks HTTP to it, by the official SDK or raw.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import openai
from nacl.signing import SigningKey

from services.gateway.gateway import Gateway
from services.gateway.prepare import load_model
from shared.contracts import limits, messages, subjects
from shared.contracts.epoch import Epoch, Stage
from shared.contracts.errors import AuthenticationFailed, DeepServeError, to_record
from shared.contracts.ids import AccountId, GatewayId, GrantId, HoldId, KeyId, NamespaceId, TagId, WorkerId
from shared.contracts.messages import (
    Acknowledge,
    Authorize,
    AuthorizeReply,
    BalanceQuery,
    BalanceReply,
    Claim,
    ClaimReply,
    Finalize,
    FinishReason,
    Hold,
    HoldReply,
    Message,
    PrefillTiming,
    PrefillWork,
    Release,
    Resend,
    Role,
    Settled,
    TokenBatch,
    TokenEntry,
    TokenLogprob,
    WorkerHeartbeat,
)
from shared.contracts.ports import Bus, Delivery
from shared.contracts.tag import GrantClaims, Retention, TagClaims, TrafficClass
from shared.runtime import rpc, signing
from shared.runtime.bus import NatsBus
from shared.runtime.clock import SystemClock
from shared.text.tokenizer import Tokenizer
from tests.unit.text_models import CHATML, small_tokenizer_json

MODEL = "small"
CONTEXT = 2_000
KEY = "sk-0123456789abcdefabcd"
WAIT_S = 10.0
BLOCK = 8
NAMESPACE = NamespaceId("ns_" + "11" * 16)
FINGERPRINT = bytes(range(32))
TIMING = PrefillTiming(queued_s=0.001, lookup_s=0.002, read_s=0.003, compute_s=0.004)


def make_model_folder(folder: Path) -> Tokenizer:
    """A small model's text side, as the converter leaves it."""
    document = small_tokenizer_json()
    tokenizer = Tokenizer(document)
    end = tokenizer.id_of("<|im_end|>")
    card = {"config": {"context_tokens": CONTEXT}, "bos_token": end, "eos_token": end, "stop_tokens": [end]}
    (folder / "model.json").write_text(json.dumps(card))
    (folder / "tokenizer.json").write_text(document)
    (folder / "chat_template.jinja").write_text(CHATML)
    return tokenizer


@dataclass
class Billing:
    """Says what the real one says; `refuse[subject]` makes it refuse."""

    signing_key: bytes = field(default_factory=lambda: os.urandom(32))
    refuse: dict[str, DeepServeError] = field(default_factory=dict)
    concurrency: int = 10
    traffic_class: TrafficClass | None = None
    tag_ttl_s: float = 60.0
    funded: bool = True
    asked: list[Message] = field(default_factory=list)
    released: asyncio.Queue[Release] = field(default_factory=asyncio.Queue)
    on_hold: Callable[[], Awaitable[None]] | None = None
    stops: list[Callable[[], Awaitable[None]]] = field(default_factory=list)

    @property
    def verify_key(self) -> bytes:
        return bytes(SigningKey(self.signing_key).verify_key)

    def holds(self) -> list[Hold]:
        return [message for message in self.asked if isinstance(message, Hold)]

    async def serve(self, bus: Bus) -> list[Callable[[], Awaitable[None]]]:
        queue = subjects.BILLING_QUEUE
        return [
            await rpc.serve(bus, subjects.BILLING_AUTHORIZE, Authorize, self._authorize, queue),
            await rpc.serve(bus, subjects.BILLING_HOLD, Hold, self._hold, queue),
            await rpc.serve(bus, subjects.BILLING_RELEASE, Release, self._release, queue),
            await rpc.serve(bus, subjects.BILLING_BALANCE, BalanceQuery, self._balance, queue),
        ]

    def _note(self, subject: str, message: Message) -> None:
        self.asked.append(message)
        if subject in self.refuse:
            raise self.refuse[subject]

    async def _authorize(self, message: Authorize) -> AuthorizeReply:
        self._note(subjects.BILLING_AUTHORIZE, message)
        if message.key_hint != KEY[-4:]:
            raise AuthenticationFailed(f"Authentication Fails, Your api key: ****{message.key_hint} is invalid")
        now_s = SystemClock().now_s()
        claims = TagClaims(
            tag_id=TagId("tag_1"),
            account=AccountId("account"),
            key_id=KeyId("key"),
            paid=True,
            namespace=NAMESPACE,
            shared=(),
            cache_read=True,
            cache_write=True,
            retention=Retention(agent_s=3, chat_s=7),
            traffic_class=self.traffic_class,
            concurrency=self.concurrency,
            price_version=1,
            issued_at_s=now_s,
            expires_at_s=now_s + self.tag_ttl_s,
            funded=self.funded,
        )
        return AuthorizeReply(tag=signing.sign(claims, self.signing_key))

    async def _hold(self, message: Hold) -> HoldReply:
        self._note(subjects.BILLING_HOLD, message)
        signing.verify(TagClaims, message.tag, self.verify_key, SystemClock().now_s())
        if self.on_hold is not None:
            await self.on_hold()
        claims = GrantClaims(
            grant_id=GrantId("grant"),
            request=message.request,
            hold=HoldId("hold"),
            account=AccountId("account"),
            key_id=KeyId("key"),
            model=message.model,
            namespace=NAMESPACE,
            shared=(),
            cache_read=True,
            cache_write=True,
            traffic_class=message.traffic_class,
            retention_s=7,
            prompt_tokens=message.prompt_tokens,
            max_output_tokens=message.max_output_tokens,
            issued_at_s=SystemClock().now_s(),
            deadline_s=message.deadline_s,
        )
        return HoldReply(grant=signing.sign(claims, self.signing_key), hold_nano=1)

    async def _release(self, message: Release) -> Settled:
        self._note(subjects.BILLING_RELEASE, message)
        self.released.put_nowait(message)
        return Settled(amount_nano=0, currency="USD")

    async def _balance(self, message: BalanceQuery) -> BalanceReply:
        self._note(subjects.BILLING_BALANCE, message)
        return BalanceReply(
            is_available=True,
            currency="USD",
            total_balance="12.50",
            granted_balance="2.50",
            topped_up_balance="10.00",
        )


@dataclass
class Job:
    """One delivery of a request in the hands of a worker."""

    worker: ScriptedWorker
    delivery: Delivery
    work: PrefillWork
    epoch: Epoch

    async def claim(self) -> ClaimReply:
        message = Claim(request=self.work.request, epoch=self.epoch, worker=self.worker.name)
        return await rpc.call(self.worker.bus, subjects.claims_of(self.work.gateway), message, ClaimReply)

    async def send(
        self,
        first: int,
        tokens: Sequence[int] = (),
        *,
        hit: int | None = None,
        finish: FinishReason | None = None,
        logprobs: Sequence[TokenLogprob] | None = None,
        error: DeepServeError | None = None,
    ) -> None:
        entry = TokenEntry(
            request=self.work.request,
            epoch=self.epoch,
            first=first,
            tokens=tuple(tokens),
            logprobs=tuple(logprobs) if logprobs is not None else None,
            hit_tokens=hit,
            timing=TIMING if hit is not None else None,
            finish=finish,
            error=to_record(error) if error is not None else None,
        )
        batch = TokenBatch(worker=self.worker.name, entries=(entry,))
        await self.worker.bus.send(subjects.tokens_of(self.work.gateway), messages.encode(batch))

    async def told(self, kind: type[Message]) -> Any:
        """The next control message of this kind for this request."""
        async with asyncio.timeout(WAIT_S):
            while True:
                message = await self.worker.control.get()
                if isinstance(message, kind) and message.request == self.work.request:  # type: ignore[attr-defined]
                    return message

    def decoding(self, worker: ScriptedWorker) -> Job:
        """The same request, handed off."""
        return Job(worker, self.delivery, self.work, Epoch(self.work.attempt, Stage.DECODE, 1))


class ScriptedWorker:
    def __init__(self, bus: Bus, name: str, role: Role, capacity: int = 8) -> None:
        self.bus = bus
        self.name = WorkerId(name)
        self.role: Role = role
        self.capacity = capacity
        self.running = 0
        self.jobs: asyncio.Queue[Job] = asyncio.Queue()
        self.control: asyncio.Queue[Message] = asyncio.Queue()

    async def beat(self) -> None:
        beat = WorkerHeartbeat(
            worker=self.name,
            role=self.role,
            model=MODEL,
            capacity=self.capacity,
            running=self.running,
            pages_free=1,
            pages=1,
            context_tokens=CONTEXT,
            block_tokens=BLOCK,
            fingerprint=FINGERPRINT,
            sent_at_s=0.0,
        )
        await self.bus.send(subjects.worker_heartbeat(self.name), messages.encode(beat))

    async def run(self) -> None:
        """Beats and takes work until cancelled."""
        beating = asyncio.create_task(self._beat())
        try:
            at, anybody = subjects.work_at("prefill", MODEL, self.name), subjects.work_any("prefill", MODEL)
            if self.role == "decode":
                await asyncio.Event().wait()
            async with aclosing(self.bus.pull([at, anybody], lambda: 8)) as deliveries:  # type: ignore[type-var]
                async for delivery in deliveries:
                    work = messages.decode(PrefillWork, delivery.payload)
                    epoch = Epoch(work.attempt, Stage.PREFILL, delivery.number)
                    self.jobs.put_nowait(Job(self, delivery, work, epoch))
        finally:
            beating.cancel()
            await asyncio.wait({beating})

    async def listen(self) -> Callable[[], Awaitable[None]]:
        async def on_control(subject: str, payload: bytes) -> None:
            kinds = Acknowledge | Resend | Finalize
            self.control.put_nowait(msgspec.msgpack.decode(payload, type=kinds))

        return await self.bus.subscribe(subjects.control_of(self.name), on_control)

    async def job(self) -> Job:
        async with asyncio.timeout(WAIT_S):
            return await self.jobs.get()

    async def _beat(self) -> None:
        while True:
            await self.beat()
            await asyncio.sleep(limits.HEARTBEAT_S / 2)


@dataclass
class World:
    gateway: Gateway
    billing: Billing
    bus: Bus
    prefill: ScriptedWorker
    decode: ScriptedWorker
    tokenizer: Tokenizer
    http: httpx2.AsyncClient
    stack: AsyncExitStack

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.port}"

    def sdk(self, api_key: str = KEY) -> openai.AsyncOpenAI:
        client = openai.AsyncOpenAI(api_key=api_key, base_url=f"{self.url}/v1", max_retries=0, timeout=WAIT_S)
        self.stack.push_async_callback(client.close)
        return client

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode_text(text)

    def stop(self) -> int:
        return self.tokenizer.id_of("<|im_end|>") or 0

    async def answer(
        self, tokens: Sequence[int], *, hit: int = 0, finish: FinishReason = "stop", step: int = 1, **entry: Any
    ) -> Finalize:
        """One request served from claim to the final count: token 0 by prefill, the others by decode."""
        job = await self.prefill.job()
        assert (await job.claim()).verdict == "go"
        await job.send(0, tokens[:1], hit=hit, **entry)
        await job.delivery.ack()
        decoding = job.decoding(self.decode)
        assert (await decoding.claim()).verdict == "go"
        for first in range(1, len(tokens), step):
            await decoding.send(first, tokens[first : first + step])
        await decoding.send(len(tokens), finish=finish)
        final: Finalize = await decoding.told(Finalize)
        return final

    async def start_worker(self, name: str, role: Role) -> ScriptedWorker:
        worker = ScriptedWorker(self.bus, name, role)
        self.stack.push_async_callback(await worker.listen())
        task = asyncio.create_task(worker.run())

        async def stop() -> None:
            task.cancel()
            await asyncio.wait({task})

        self.stack.push_async_callback(stop)
        return worker


@asynccontextmanager
async def world(nats_url: str, folder: Path, **options: Any) -> AsyncIterator[World]:
    tokenizer = make_model_folder(folder)
    cluster_key = os.urandom(32)
    billing = Billing()
    async with AsyncExitStack() as stack:
        ours = await NatsBus.connect(nats_url, cluster_key, "gateway")
        stack.push_async_callback(ours.close)
        theirs = await NatsBus.connect(nats_url, cluster_key, "world")
        stack.push_async_callback(theirs.close)
        billing.stops = await billing.serve(theirs)
        for stop in billing.stops:
            stack.push_async_callback(stop)
        gateway = Gateway(
            GatewayId("gateway-1"),
            ours,
            SystemClock(),
            signing.Verifier(billing.verify_key),
            os.urandom,
            [load_model(MODEL, folder)],
            host="127.0.0.1",
            port=0,
            **options,
        )
        await gateway.start()
        running = asyncio.create_task(gateway.run())

        async def end() -> None:
            gateway.stop()
            await asyncio.wait({running})
            await gateway.close()

        stack.push_async_callback(end)
        async with asyncio.timeout(WAIT_S):
            await gateway.up()
        http = await stack.enter_async_context(
            httpx2.AsyncClient(
                base_url=f"http://127.0.0.1:{gateway.port}", headers={"Authorization": f"Bearer {KEY}"}, timeout=WAIT_S
            )
        )
        place = World(gateway, billing, theirs, None, None, tokenizer, http, stack)  # type: ignore[arg-type]
        place.prefill = await place.start_worker("prefill-1", "prefill")
        place.decode = await place.start_worker("decode-1", "decode")
        async with asyncio.timeout(WAIT_S):
            while (await http.get("/readyz")).status_code != 200:
                pass  # workers beat at once; each look is a round trip
        yield place
