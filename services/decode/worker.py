"""Decode: writes answers. Takes a handoff, reads its blocks, steps all its sequences together, says each step's tokens
in one message a gateway, stores paid answer blocks as they fill, and settles with the one final count.

Whatever ends an answer (its last token, a stop string, a cancel, a lost gateway), this is the order: out of the engine,
usage committed by billing, handoff objects deleted, work message acknowledged.
"""

from __future__ import annotations

import asyncio

import structlog

from services.decode.session import DecodeSession
from shared.contracts import limits
from shared.contracts.epoch import Stage
from shared.contracts.messages import ClaimReply, DecodeWork
from shared.contracts.ports import Delivery
from shared.worker import attempt as attempts
from shared.worker import handoff_objects
from shared.worker.attempt import Attempt
from shared.worker.claims import claim
from shared.worker.emitter import Ending, TokenStream
from shared.worker.floor import Floor
from shared.worker.lease import lease

log = structlog.get_logger()


class DecodeWorker:
    def __init__(self, floor: Floor) -> None:
        self._floor = floor
        self._adopting = asyncio.Semaphore(limits.ADOPTING_MAX)

    async def handle(self, delivery: Delivery) -> None:
        """Ends the delivery. Raises errors of the tree that leave the request to another try (the bus is gone)."""
        floor = self._floor
        attempt = attempts.read(DecodeWork, Stage.DECODE, delivery, floor.verify, floor.clock.now_s())
        if attempt is None:
            await delivery.drop()
            return
        work = attempt.work
        async with lease(delivery):
            reply = await claim(floor.bus, work.gateway, work.request, attempt.epoch, floor.worker)
            log.info("decode.claimed", request=work.request, epoch=attempt.epoch, verdict=reply.verdict)
            if reply.verdict == "stale":
                await delivery.drop()
                return
            if reply.verdict != "go" or reply.final is not None:
                await self._end(attempt, reply, _ending_of(reply), 0.0, delivery)
                return
            stream = await floor.emitter.open(work.request, attempt.epoch, work.gateway, hit_tokens=work.hit_tokens)
            try:
                await self._serve(attempt, reply, stream, delivery)
            finally:
                floor.emitter.close(stream, keep=stream.log.error is not None)

    async def _serve(
        self, attempt: Attempt[DecodeWork], reply: ClaimReply, stream: TokenStream, delivery: Delivery
    ) -> None:
        session = DecodeSession(self._floor, self._adopting, attempt, reply, stream)
        ending = await session.run()
        if ending.how == "superseded":
            return
        await self._end(attempt, reply, ending, session.device_s, delivery)

    async def _end(
        self, attempt: Attempt[DecodeWork], reply: ClaimReply, ending: Ending, device_s: float, delivery: Delivery
    ) -> None:
        """The hits were counted once, at prefill; an earlier try's count wins over a later one's."""
        grant = attempt.grant
        hit_tokens = attempt.work.hit_tokens if reply.hit_tokens is None else reply.hit_tokens
        counted = attempts.usage_of(attempt, hit_tokens, ending.count, ending.reasoning)
        await self._floor.settlement.settle(attempt.work.grant, grant, attempt.epoch, counted, device_s)
        tail = (attempt.work.tail,) if attempt.work.tail is not None else ()
        await handoff_objects.forget(self._floor, (*attempt.work.blocks, *tail))
        await delivery.ack()


def _ending_of(reply: ClaimReply) -> Ending:
    """Of a request that ended before this try: the named count, else what the gateway has."""
    count = len(reply.delivered) // 4 if reply.final is None else reply.final
    return Ending(count, 0, "finalized")
