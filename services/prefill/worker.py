"""Prefill: reads prompts. Takes a request, loads the prefix that the pool has, computes the rest block by block, says
the first token at once, hands the request to decode. One-token answers end here.

Each path out of here ends the request's hold or passes it on: handed off, settled, released, or left to a newer try.
"""

from __future__ import annotations

import structlog

from services.prefill.prefix import PrefixFinder
from services.prefill.session import Ended, Failed, HandedOff, Outcome, PrefillSession
from shared.contracts.epoch import Stage
from shared.contracts.messages import ClaimReply, PrefillWork
from shared.contracts.ports import Delivery
from shared.worker import attempt as attempts
from shared.worker.attempt import Attempt
from shared.worker.claims import claim
from shared.worker.emitter import Ending, TokenStream
from shared.worker.floor import Floor
from shared.worker.lease import lease

log = structlog.get_logger()


class PrefillWorker:
    def __init__(self, floor: Floor) -> None:
        self._floor = floor
        self._finder = PrefixFinder(floor)

    async def handle(self, delivery: Delivery) -> None:
        """Ends the delivery. Raises errors of the tree that leave the request to another try (the bus is gone)."""
        floor = self._floor
        attempt = attempts.read(PrefillWork, Stage.PREFILL, delivery, floor.verify, floor.clock.now_s())
        if attempt is None:
            await delivery.drop()
            return
        work = attempt.work
        async with lease(delivery):
            reply = await claim(floor.bus, work.gateway, work.request, attempt.epoch, floor.worker)
            log.info("prefill.claimed", request=work.request, epoch=attempt.epoch, verdict=reply.verdict)
            if reply.verdict != "go":
                await self._turn_away(attempt, reply, delivery)
                return
            stream = await floor.emitter.open(work.request, attempt.epoch, work.gateway, hit_tokens=None)
            try:
                await self._serve(attempt, reply, stream, delivery)
            finally:
                floor.emitter.close(stream, keep=True)

    async def _turn_away(self, attempt: Attempt[PrefillWork], reply: ClaimReply, delivery: Delivery) -> None:
        """A request that its gateway does not know any more is released here: nobody else will."""
        if reply.verdict == "unknown":
            await self._floor.settlement.release(attempt.work.grant, attempt.grant, "its gateway is gone")
        await delivery.drop()

    async def _serve(
        self, attempt: Attempt[PrefillWork], reply: ClaimReply, stream: TokenStream, delivery: Delivery
    ) -> None:
        session = PrefillSession(self._floor, self._finder, attempt, reply, stream)
        if reply.final is not None:
            # Named before this try began: an earlier one read the prompt.
            outcome: Outcome = Ended(Ending(reply.final, 0, "finalized"), ran=True)
        else:
            outcome = await session.run()
        match outcome:
            case HandedOff():
                pass
            case Failed(error):
                log.warning("prefill.failed", request=attempt.work.request, error=error.message)
                self._floor.emitter.fail(stream, error)
                await self._floor.emitter.flush()
                await self._floor.settlement.release(attempt.work.grant, attempt.grant, type(error).__name__)
            case Ended(ending, _) if ending.how == "superseded":
                return
            case Ended(_, ran) if not ran:
                await self._floor.settlement.release(attempt.work.grant, attempt.grant, "ended before its prompt ran")
            case Ended(ending, _):
                await self._settle(attempt, reply, session, ending)
        await delivery.ack()

    async def _settle(
        self, attempt: Attempt[PrefillWork], reply: ClaimReply, session: PrefillSession, ending: Ending
    ) -> None:
        grant = attempt.grant
        hit_tokens = session.hit_tokens if reply.hit_tokens is None else reply.hit_tokens
        counted = attempts.usage_of(attempt, hit_tokens, ending.count, ending.reasoning)
        await self._floor.settlement.settle(attempt.work.grant, grant, attempt.epoch, counted, session.device_s)
