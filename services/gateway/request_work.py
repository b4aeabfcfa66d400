"""The part of a request that workers do: publish, follow the tokens, repair what is lost, name the one final count."""

from __future__ import annotations

import asyncio
from functools import partial

import structlog

from services.gateway.edge import Edge
from services.gateway.gate import Slot
from services.gateway.outbox import Outbox
from services.gateway.output import Answer, Chunk, Opened
from services.gateway.prepare import Prepared, sampling
from services.gateway.request_state import Request
from services.gateway.stopwatch import Stopwatch
from services.gateway.token_inbox import Tracked
from services.gateway.watch import Watch
from shared.contracts import limits, messages, subjects
from shared.contracts.block import chain_keys, chain_root, pack_tokens
from shared.contracts.epoch import Stage
from shared.contracts.errors import DeadlineExceeded, Overloaded
from shared.contracts.ids import RequestId, WorkerId
from shared.contracts.lifecycle import RequestEvent
from shared.contracts.messages import FinishReason, PrefillWork

log = structlog.get_logger()

SEED_BITS = 63


class SlowClient(Exception):
    """The client lags behind its answer by more than limits.STREAM_BUFFER_TOKENS_MAX."""


class RequestWork:
    """`run` once, while the request has its place and its hold."""

    def __init__(
        self,
        edge: Edge,
        request_id: RequestId,
        prepared: Prepared,
        slot: Slot,
        outbox: Outbox,
        stopwatch: Stopwatch,
    ) -> None:
        self._edge = edge
        self._prepared = prepared
        self._grant = ""
        self._slot = slot
        self._outbox = outbox
        self._stopwatch = stopwatch
        self._request = Request(request_id, max_output_tokens=prepared.max_output_tokens)
        self._tracked = Tracked(self._request)
        self._answer = Answer(prepared.converted.request, request_id, prepared.model.name, prepared.model.tools)
        self._watch = Watch(edge.clock.monotonic_s())
        self._sampling = sampling(prepared, int.from_bytes(edge.entropy(8), "big") >> (64 - SEED_BITS))
        self._keys: list[bytes] = []
        self._opened = False
        self._acknowledged = 0

    async def run(self, grant: str, deadline_s: float) -> None:
        """Takes over the hold behind `grant`; returns when the last chunk is in the outbox. `deadline_s`: monotonic.

        Raises errors of the tree, SlowClient.
        """
        edge, request = self._edge, self._request
        self._grant = grant
        # What outlives the request must not keep its prompt and its output in memory.
        self._tracked.release = partial(edge.holds.release, grant, request.request)
        edge.inbox.track(self._tracked)
        try:
            await self._publish(await self._preferred())
            await self._follow(deadline_s)
        except (asyncio.CancelledError, SlowClient):
            if not request.over:
                request.end(RequestEvent.CANCEL, request.log.received, "cancelled")
            raise
        finally:
            if not request.over:
                # A whole answer that fails gave its client nothing: nothing of it is billed.
                count = self._answer.count if self._outbox.stream else 0
                request.end(RequestEvent.FAIL, count, "insufficient_system_resource")
            self._answer.close()
            edge.inbox.close(self._tracked)
            self._tell_end()

    async def _follow(self, deadline_s: float) -> None:
        clock, request = self._edge.clock, self._request
        while True:
            now_s = clock.monotonic_s()
            if now_s >= deadline_s:
                self._run_out()
                return
            news = await self._wait(min(self._watch.next_look_s(), deadline_s - now_s))
            if request.error is not None:
                raise request.error
            if news:
                self._watch.progressed(clock.monotonic_s())
            if request.stage is Stage.DECODE:
                self._slot.handed_off()
            self._forward()
            if request.over:
                return
            await self._acknowledge()
            await self._look()

    async def _wait(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._tracked.changed.wait()
        except TimeoutError:
            return False
        self._tracked.changed.clear()
        return True

    def _forward(self) -> None:
        """Tokens into chunks, at once and whatever the client's pace, so that the final count is named promptly."""
        request, answer = self._request, self._answer
        if request.hit_tokens is None or (not request.log.waiting and request.finish is None):
            return
        chunks = [] if self._opened else self._open(request.hit_tokens)
        taken = request.log.take()
        if request.log.received > 1 and taken and (timing := self._stopwatch.second_token(self._now())):
            self._outbox.time(timing)
        for token, logprob in taken:
            chunks += answer.push(token, logprob)
            if answer.finished:
                request.end(RequestEvent.FINISH, answer.count, "stop")
                break
        if not request.over and request.finish is not None:
            reason = request.finish
            chunks += answer.finish(reason)
            request.end(RequestEvent.FINISH, answer.count, reason)
        if not self._outbox.put(chunks):
            raise SlowClient

    def _open(self, hit_tokens: int) -> list[Chunk]:
        self._opened = True
        prompt_tokens = len(self._prepared.tokens)
        model = self._prepared.model.name
        fingerprint = self._edge.workers.fingerprint(model, self._now())
        chunks = self._answer.ready(prompt_tokens, hit_tokens, f"fp_{fingerprint.hex()[:10]}" if fingerprint else None)
        timing = self._stopwatch.first_token(self._request.timing, self._now())
        self._outbox.open(Opened(self._answer, self._request.request, model, prompt_tokens, hit_tokens, timing))
        return chunks

    def _run_out(self) -> None:
        """The deadline is over: an answer that has begun ends as it is, one that has not is an error."""
        if not self._opened:
            raise DeadlineExceeded("The request was not answered in time. Please retry.")
        reason: FinishReason = "insufficient_system_resource"
        chunks = self._answer.finish(reason)
        self._request.end(RequestEvent.FINISH, self._answer.count, reason)
        self._outbox.put(chunks)

    async def _acknowledge(self) -> None:
        """Not before the hit count is known: it comes with token 0, which a worker forgets when it is acknowledged."""
        received = self._request.log.received
        if self._request.hit_tokens is not None and received - self._acknowledged >= limits.ACK_EVERY_TOKENS:
            self._acknowledged = received
            await self._edge.inbox.tell(self._request.acknowledge())

    async def _look(self) -> None:
        """Silence and loss."""
        request, workers, now_s = self._request, self._edge.workers, self._now()
        held = request.waiting_for is None and workers.alive(request.worker, now_s)
        role: messages.Role = "decode" if request.stage is Stage.DECODE else "prefill"
        room = workers.room(role, self._prepared.model.name, now_s)
        match self._watch.act(now_s, held=held, room=room, prefill=role == "prefill"):
            case "resend":
                await self._edge.inbox.tell(request.resend())
            case "to_any" | "again":
                log.warning("work.lost", request=request.request, attempt=request.attempt, stage=request.stage.name)
                await self._publish(None)
            case "give_up":
                raise Overloaded("No worker took the request. Please retry.", retry_after_s=limits.RETRY_AFTER_S)
            case "wait":
                pass

    async def _publish(self, worker: WorkerId | None) -> None:
        """A new attempt, to `worker` or to any."""
        request, model = self._request, self._prepared.model.name
        attempt = request.publish()
        work = PrefillWork(
            request=request.request,
            attempt=attempt,
            gateway=self._edge.gateway,
            model=model,
            tokens=pack_tokens(self._prepared.tokens),
            sampling=self._sampling,
            grant=self._grant,
            published_at_s=self._edge.clock.now_s(),
        )
        subject = subjects.work_at("prefill", model, worker) if worker else subjects.work_any("prefill", model)
        self._watch.published(self._now(), preferred=worker is not None)
        message_id = subjects.message_id(request.request, attempt, "prefill")
        began_s = self._now()
        await self._edge.bus.publish(subject, messages.encode(work), message_id)
        self._stopwatch.published(began_s, self._now())
        log.info(
            "request.published", request=request.request, attempt=attempt, prompt_tokens=len(self._prepared.tokens)
        )

    async def _preferred(self) -> WorkerId | None:
        """The prefill worker that read the longest known beginning of this prompt, if it is one of several."""
        edge, model = self._edge, self._prepared.model.name
        if edge.workers.count("prefill", model, self._now()) < 2:
            return None
        namespace = edge.verifier.grant(self._grant, edge.clock.now_s()).namespace
        width = edge.workers.block_tokens(model, self._now())
        root = chain_root(namespace, b"")
        self._keys = await asyncio.to_thread(chain_keys, root, self._prepared.tokens, width)
        return edge.workers.choose(edge.affinity.find(self._keys), model, self._now())

    def _tell_end(self) -> None:
        request = self._request
        if request.prefill_worker is not None:
            self._edge.affinity.remember(self._keys, request.prefill_worker)
        log.info(
            "request.ended",
            request=request.request,
            state=request.state.value,
            attempts=request.attempt,
            output=request.final.count if request.final else None,
            hit_tokens=request.hit_tokens,
        )

    def _now(self) -> float:
        return self._edge.clock.monotonic_s()
