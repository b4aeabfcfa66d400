"""One claimed prefill, from its prompt to an outcome. It holds pages and a place in the engine only while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import structlog

from services.prefill import handoff
from services.prefill.prefix import Prefix, PrefixFinder
from services.prefill.prompt import First, Prompt
from shared.contracts import limits, subjects
from shared.contracts.errors import DeadlineExceeded, DeepServeError, InvalidRequest, OutOfPages, Overloaded
from shared.contracts.messages import BlockRef, ClaimReply, DecodeWork, Done, PrefillTiming, PrefillWork, Touch
from shared.contracts.ports import SequenceSpec
from shared.runtime import rpc
from shared.runtime.service import as_internal_error
from shared.worker import attempt as attempts
from shared.worker import handoff_objects
from shared.worker.attempt import Attempt
from shared.worker.block_writer import SequenceWrites
from shared.worker.chain import KeyChain
from shared.worker.emitter import Ending, TokenStream
from shared.worker.endings import final_ending
from shared.worker.engine_loop import EngineStopped
from shared.worker.floor import Floor
from shared.worker.race import first_of, unless
from shared.worker.targets import HandoffTarget, PoolTarget

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class HandedOff:
    """Decode has the request."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The request ended here. `ran`: whether the prompt ran, and is paid."""

    ending: Ending
    ran: bool


@dataclass(frozen=True, slots=True)
class Failed:
    error: DeepServeError


Outcome = HandedOff | Ended | Failed


class PrefillSession:
    """`run` once."""

    def __init__(
        self,
        floor: Floor,
        finder: PrefixFinder,
        attempt: Attempt[PrefillWork],
        reply: ClaimReply,
        stream: TokenStream,
    ) -> None:
        self.hit_tokens = 0
        self._floor = floor
        self._finder = finder
        self._attempt = attempt
        self._work = attempt.work
        self._reply = reply
        self._stream = stream
        self._prompt: Prompt | None = None
        self._timing: PrefillTiming | None = None
        self._handoff_key = floor.entropy(32)
        self._handoff = HandoffTarget(attempt.grant.namespace, self._handoff_key, floor.objects)
        self._chain = KeyChain(attempt.grant.namespace, floor.fingerprint, floor.block_tokens)
        self._writes = SequenceWrites(floor.writer, self._work.request, floor.block_tokens, floor.spawn)

    @property
    def device_s(self) -> float:
        return self._prompt.device_s if self._prompt else 0.0

    async def run(self) -> Outcome:
        """An error is the outcome, a bug too. Raises EngineStopped alone: another worker may do better."""
        handed_off = False
        try:
            async with AsyncExitStack() as stack:
                outcome = await as_internal_error(self._run(stack))
            handed_off = isinstance(outcome, HandedOff)
        except EngineStopped:
            raise
        except OutOfPages as error:
            outcome = Failed(Overloaded(error.message))
        except DeepServeError as error:
            outcome = Failed(error)
        finally:
            if not handed_off:
                self._floor.spawn(self._forget_handoff())
        return outcome

    async def _forget_handoff(self) -> None:
        """No decode will read them. A write may still be under way when its request has ended: it is waited for."""
        await self._writes.wait(limits.BLOCK_WRITE_TIMEOUT_S)
        await handoff_objects.forget(self._floor, self._writes.stored())

    async def _run(self, stack: AsyncExitStack) -> Outcome:
        ended = self._stream.ended
        prompt = await unless(ended, self._start(stack))
        if prompt is None:
            return Ended(ended.result(), ran=False)
        await first_of(ended, prompt.first, timeout_s=self._attempt.seconds_left(self._floor.clock.now_s()))
        if ended.done():
            return Ended(ended.result(), ran=True)
        if not prompt.first.done():
            raise DeadlineExceeded("the prompt was not read before the request's deadline")
        if prompt.loaded:
            self._floor.spawn(self._touch(prompt.loaded))
        first = prompt.first.result()
        if first.finish is not None:
            return await self._finish()
        return await self._hand_off(prompt, first)

    async def _start(self, stack: AsyncExitStack) -> Prompt:
        """Waits for room, loads the prefix, brings the prompt into the engine."""
        floor, attempt = self._floor, self._attempt
        self._check()
        pages = -(-(len(attempt.prompt) + 1) // floor.block_tokens)
        await stack.enter_async_context(floor.pages.hold(pages, attempts.patience_s(attempt, floor.clock.now_s())))
        claimed_s = floor.clock.now_s()
        prefix = await self._finder.find(attempt, self._chain)
        loaded_tokens = len(prefix.payloads) * floor.block_tokens
        self.hit_tokens = loaded_tokens if self._reply.hit_tokens is None else self._reply.hit_tokens
        prompt = self._make_prompt(prefix, claimed_s - self._work.published_at_s)
        self._prompt = prompt
        floor.router.attach(self._work.request, loaded_tokens, prompt.on_produced)
        stack.push_async_callback(self._leave)
        await floor.engine.add_within(
            SequenceSpec(
                request=self._work.request,
                tokens=attempt.prompt,
                prompt_tokens=len(attempt.prompt),
                max_new_tokens=1,
                sampling=self._work.sampling,
                prefix=prefix.payloads,
            ),
            attempts.patience_s(attempt, floor.clock.now_s()),
        )
        return prompt

    def _check(self) -> None:
        attempt, profile = self._attempt, self._floor.profile
        self._floor.check_revoked(attempt.grant)
        if attempt.answer_max(profile) < 1:
            raise InvalidRequest(
                f"a prompt of {len(attempt.prompt)} tokens leaves no room in a context of {profile.context_tokens}"
            )
        if not attempt.seconds_left(self._floor.clock.now_s()):
            raise DeadlineExceeded("the request's deadline was over before its prompt was read")

    def _make_prompt(self, prefix: Prefix, queued_s: float) -> Prompt:
        floor, attempt = self._floor, self._attempt
        added_s = floor.clock.monotonic_s()
        lookup_s, read_s = prefix.lookup_s, prefix.read_s

        def on_first(first: First) -> None:
            self._stream.log.hit_tokens = self.hit_tokens
            self._stream.log.timing = PrefillTiming(
                queued_s=max(queued_s, 0.0),
                lookup_s=lookup_s,
                read_s=read_s,
                compute_s=floor.clock.monotonic_s() - added_s,
            )
            floor.emitter.emit(self._stream, 0, (first.token,), first.logprobs, first.finish)

        return Prompt(
            self._work.request,
            prefix,
            self._chain,
            self._writes,
            block_tokens=floor.block_tokens,
            answer_max=attempt.answer_max(floor.profile),
            pool=self._pool(),
            handoff=self._handoff,
            on_first=on_first,
        )

    def _pool(self) -> Sequence[PoolTarget]:
        if not self._attempt.grant.cache_write:
            return ()
        return (PoolTarget(self._work.grant, self._attempt.grant, self._floor),)

    async def _leave(self) -> None:
        self._floor.router.detach(self._work.request)
        await self._floor.engine.remove(self._work.request)

    async def _touch(self, refs: Sequence[BlockRef]) -> None:
        """A served hit extends its blocks' lives; a touch that is lost costs a block some of its life."""
        message = Touch(grant=self._work.grant, blocks=tuple(refs))
        try:
            await rpc.call(self._floor.bus, subjects.INDEX_TOUCH, message, Done)
        except DeepServeError:
            self._floor.counters.add("touch.failed")

    async def _finish(self) -> Outcome:
        """The answer is one token long. Its blocks go on to the pool while the gateway names the final count."""
        ending, _ = await asyncio.gather(
            final_ending(self._floor.bus, self._floor.worker, self._stream),
            self._writes.wait(limits.BLOCK_WRITE_TIMEOUT_S),
        )
        return Ended(ending, ran=True)

    async def _hand_off(self, prompt: Prompt, first: First) -> Outcome:
        floor, ended = self._floor, self._stream.ended
        gathering = handoff.gather(floor, self._attempt, prompt, self._chain, self._writes, self._handoff)
        stored = await unless(ended, gathering)
        if ended.done() or stored is None:
            return Ended(ended.result(), ran=True)
        work = DecodeWork(
            request=self._work.request,
            attempt=self._work.attempt,
            gateway=self._work.gateway,
            model=self._work.model,
            tokens=self._work.tokens,
            blocks=stored.blocks,
            tail=stored.tail,
            handoff_key=self._handoff_key,
            first_token=first.token,
            first_logprob=first.logprobs[0] if first.logprobs else None,
            hit_tokens=self.hit_tokens,
            sampling=self._work.sampling,
            grant=self._work.grant,
            published_at_s=floor.clock.now_s(),
        )
        try:
            await handoff.publish(floor, self._attempt, work)
        except DeepServeError as error:
            log.warning("handoff.refused", request=self._work.request, error=error.message)
            floor.emitter.emit(self._stream, 1, finish="insufficient_system_resource")
            await floor.emitter.flush()
            return Ended(await final_ending(floor.bus, floor.worker, self._stream), ran=True)
        log.info("handoff.offered", request=self._work.request, epoch=self._attempt.epoch, blocks=len(stored.blocks))
        return HandedOff()
