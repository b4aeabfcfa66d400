"""Asking the gateway that owns a request whether this try at it still counts (design, section 5; invariant 4)."""

from __future__ import annotations

import asyncio

import structlog

from shared.contracts import limits, subjects
from shared.contracts.epoch import Epoch
from shared.contracts.errors import DeadlineExceeded, Overloaded
from shared.contracts.ids import GatewayId, RequestId, WorkerId
from shared.contracts.messages import Claim, ClaimReply
from shared.contracts.ports import Bus
from shared.runtime import rpc

log = structlog.get_logger()


async def claim(bus: Bus, gateway: GatewayId, request: RequestId, epoch: Epoch, worker: WorkerId) -> ClaimReply:
    """The gateway's verdict; `unknown` when it is gone.

    Only a bus on which nobody listens for the gateway, for the whole of limits.PEER_LEASE_S, proves that it is gone. A
    question that runs out of time proves nothing (NATS is away, the gateway or this worker stood still): it is asked
    again, at most until no request can be younger than its deadline.
    """
    message = Claim(request=request, epoch=epoch, worker=worker)
    now_s = asyncio.get_running_loop().time
    until_s = now_s() + limits.REQUEST_DEADLINE_S
    nobody_since_s: float | None = None
    while now_s() < until_s:
        try:
            return await rpc.call(bus, subjects.claims_of(gateway), message, ClaimReply)
        except DeadlineExceeded:
            nobody_since_s = None
        except Overloaded:
            nobody_since_s = now_s() if nobody_since_s is None else nobody_since_s
            if now_s() - nobody_since_s >= limits.PEER_LEASE_S:
                break
        await asyncio.sleep(limits.CLAIM_RETRY_S)
    log.warning("gateway.lost", gateway=gateway, request=request, epoch=epoch)
    return ClaimReply(verdict="unknown")
