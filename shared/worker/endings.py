"""The one final count (design, section 2): waited for, asked for again, and only then what was acknowledged."""

from __future__ import annotations

import asyncio

from shared.contracts import limits
from shared.contracts.ids import WorkerId
from shared.contracts.ports import Bus
from shared.worker.claims import claim
from shared.worker.emitter import Ending, TokenStream, ending_named_by


async def final_ending(bus: Bus, worker: WorkerId, stream: TokenStream) -> Ending:
    """How a stream ends whose last token was sent. The gateway's Finalize may be lost on the way, so that it is asked
    after each limits.FINAL_WAIT_S. A gateway that lives and has not named the count yet is still gathering tokens (it
    asks for them again, and gives up by the request's deadline): settling before it would settle another count."""
    while not stream.ended.done():
        await asyncio.wait({stream.ended}, timeout=limits.FINAL_WAIT_S)
        if not stream.ended.done():
            log = stream.log
            reply = await claim(bus, log.gateway, log.request, log.epoch, worker)
            ending = ending_named_by(reply, log.acknowledged)
            if ending is not None:
                stream.end(ending)
    return stream.ended.result()
