"""One claimed decode, from its handoff to an ending. It holds pages and a place in the engine only while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import structlog

from services.decode.adopt import Adopted, adopt
from services.decode.answer import Answer
from services.decode.room import pages_promised
from shared.contracts import limits
from shared.contracts.block import unpack_tokens
from shared.contracts.errors import DeepServeError, OutOfPages
from shared.contracts.messages import ClaimReply, DecodeWork, FinishReason
from shared.contracts.ports import SequenceSpec
from shared.runtime.service import as_internal_error
from shared.worker import attempt as attempts
from shared.worker.attempt import Attempt
from shared.worker.block_writer import SequenceWrites
from shared.worker.chain import KeyChain
from shared.worker.emitter import Ending, TokenStream
from shared.worker.endings import final_ending
from shared.worker.engine_loop import EngineStopped
from shared.worker.floor import Floor
from shared.worker.race import first_of, unless
from shared.worker.targets import PoolTarget

log = structlog.get_logger()


class DecodeSession:
    """`run` once. `adopting` bounds the requests whose payloads are read at a time."""

    def __init__(
        self,
        floor: Floor,
        adopting: asyncio.Semaphore,
        attempt: Attempt[DecodeWork],
        reply: ClaimReply,
        stream: TokenStream,
    ) -> None:
        self._floor = floor
        self._adopting = adopting
        self._attempt = attempt
        self._work = attempt.work
        self._stream = stream
        self.device_s = 0.0
        self._known = self._known_tokens(reply)
        self._writes = SequenceWrites(floor.writer, self._work.request, floor.block_tokens, floor.spawn)

    async def run(self) -> Ending:
        """The client is told of an error, of a bug too, and the ending says what is paid. Raises EngineStopped alone:
        another worker may do better."""
        try:
            self._floor.check_revoked(self._attempt.grant)
            reason = self._finished_already()
            if reason is not None:
                return await self._say_finish(reason)
            return await as_internal_error(self._run())
        except EngineStopped:
            raise
        except OutOfPages as error:
            log.warning("pages.missed", request=self._work.request, error=error.message)
            return await self._say_finish("insufficient_system_resource")
        except DeepServeError as error:
            log.warning("decode.failed", request=self._work.request, error=error.message)
            self._floor.emitter.fail(self._stream, error)
            await self._floor.emitter.flush()
            return await final_ending(self._floor.bus, self._floor.worker, self._stream)

    def _known_tokens(self, reply: ClaimReply) -> list[int]:
        """The answer so far, into the stream's log: what the gateway has, at least the first token."""
        delivered = unpack_tokens(reply.delivered)
        known = delivered or [self._work.first_token]
        first_logprob = self._work.first_logprob
        logprobs = (first_logprob,) if first_logprob is not None and not delivered else None
        self._stream.log.append(0, known, logprobs)
        self._stream.log.acknowledge(len(delivered))
        return known

    async def _run(self) -> Ending:
        """Into the engine and out of it; again, with everything that is known, when pages ran short meanwhile."""
        preemptions = 0
        while True:
            async with AsyncExitStack() as stack:
                answer = await unless(self._stream.ended, self._start(stack, whole=preemptions > 0))
                if answer is None:
                    return self._stream.ended.result()
                ending = await self._follow(answer, may_return=preemptions < limits.PREEMPTIONS_MAX)
            if ending is not None:
                return ending
            preemptions += 1
            self._known += answer.tokens
            self._floor.counters.add("answer.preempted")
            log.info("answer.preempted", request=self._work.request, tokens=len(self._known))

    async def _follow(self, answer: Answer, *, may_return: bool) -> Ending | None:
        """Until the answer ends; None when it left the engine for want of pages and may come back."""
        ended = self._stream.ended
        try:
            await first_of(ended, answer.finished, timeout_s=self._attempt.seconds_left(self._floor.clock.now_s()))
            if ended.done():
                return ended.result()
            if may_return and answer.finished.done() and answer.finished.result() == "insufficient_system_resource":
                return None
            return await self._finish(answer)
        finally:
            self.device_s += answer.device_s

    def _finished_already(self) -> FinishReason | None:
        """An earlier try may have said the last token and died before the gateway named the final count."""
        if self._known[-1] in self._work.sampling.stop_tokens:
            return "stop"
        return "length" if len(self._known) >= self._attempt.answer_max(self._floor.profile) else None

    async def _start(self, stack: AsyncExitStack, *, whole: bool) -> Answer:
        """Waits for room, reads the handoff, brings the sequence into the engine with every token that is known."""
        floor, attempt = self._floor, self._attempt
        answer_max = attempt.answer_max(floor.profile)
        pages = pages_promised(len(attempt.prompt), len(self._known), answer_max, floor.block_tokens, whole=whole)
        await stack.enter_async_context(floor.pages.hold(pages, attempts.patience_s(attempt, floor.clock.now_s())))
        chain = KeyChain(attempt.grant.namespace, floor.fingerprint, floor.block_tokens)
        tokens = [*attempt.prompt, *self._known]
        if attempt.grant.cache_write:
            await chain.extend_far(tokens)
        async with self._adopting:
            adopted = await adopt(floor, attempt)
            answer = self._make_answer(adopted, chain)
            floor.router.attach(self._work.request, adopted.loaded_tokens, answer.on_produced)
            stack.push_async_callback(self._leave)
            await floor.engine.add_within(
                SequenceSpec(
                    request=self._work.request,
                    tokens=tokens,
                    prompt_tokens=len(attempt.prompt),
                    max_new_tokens=answer_max,
                    sampling=self._work.sampling,
                    prefix=adopted.prefix,
                    tail=adopted.tail,
                ),
                attempts.patience_s(attempt, floor.clock.now_s()),
            )
        log.info("handoff.adopted", request=self._work.request, epoch=attempt.epoch, loaded=adopted.loaded_tokens)
        return answer

    def _make_answer(self, adopted: Adopted, chain: KeyChain) -> Answer:
        return Answer(
            self._stream,
            self._floor.emitter,
            chain,
            self._writes,
            self._pool(),
            block_tokens=self._floor.block_tokens,
            begin_at=len(adopted.prefix),
            indexed={i for i, ref in enumerate(self._work.blocks) if ref.source == "pool"},
            suspects=adopted.suspects,
        )

    def _pool(self) -> Sequence[PoolTarget]:
        if not self._attempt.grant.cache_write:
            return ()
        return (PoolTarget(self._work.grant, self._attempt.grant, self._floor),)

    async def _leave(self) -> None:
        self._floor.router.detach(self._work.request)
        await self._floor.engine.remove(self._work.request)

    async def _finish(self, answer: Answer) -> Ending:
        """The last token is out. The next turn of a conversation often follows at once and wants the last block's row,
        so that the word of the end waits for it, briefly."""
        await self._writes.wait(limits.FINISH_FLUSH_S)
        if not answer.finished.done():
            # The request's deadline came before its last token; nothing is said after this word.
            answer.finished.set_result("insufficient_system_resource")
        ending, _ = await asyncio.gather(
            self._say_finish(answer.finished.result()), self._writes.wait(limits.BLOCK_WRITE_TIMEOUT_S)
        )
        return ending

    async def _say_finish(self, reason: FinishReason) -> Ending:
        self._floor.emitter.emit(self._stream, self._stream.log.next_index, finish=reason)
        await self._floor.emitter.flush()
        return await final_ending(self._floor.bus, self._floor.worker, self._stream)
