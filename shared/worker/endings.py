"""The one final count (design, section 2): waited for, asked for again, and only then what was acknowledged."""

from __future__ import annotations

import asyncio

from shared.contracts import limits
from shared.contracts.ids import WorkerId
from shared.contracts.ports import Bus
from shared.worker.claims import claim
from shared.worker.emitter import Ending, TokenStream


async def final_ending(bus: Bus, worker: WorkerId, stream: TokenStream) -> Ending:
    """How a stream ends whose last token was sent. The gateway's Finalize may be lost on the way, so that after
    limits.FINAL_WAIT_S the gateway is asked once more."""
    await asyncio.wait({stream.ended}, timeout=limits.FINAL_WAIT_S)
    if stream.ended.done():
        return stream.ended.result()
    log = stream.log
    reply = await claim(bus, log.gateway, log.request, log.epoch, worker)
    if reply.verdict == "stale":
        stream.end(Ending(log.acknowledged, 0, "superseded"))
    elif reply.final is not None:
        stream.end(Ending(reply.final, 0, "finalized"))
    else:
        stream.end(Ending(log.acknowledged, 0, "gateway_lost"))
    return stream.ended.result()
