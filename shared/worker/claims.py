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
    """The gateway's verdict. A gateway that stays silent for limits.PEER_LEASE_S is gone: the verdict is `unknown`."""
    message = Claim(request=request, epoch=epoch, worker=worker)
    try:
        async with asyncio.timeout(limits.PEER_LEASE_S):
            while True:
                try:
                    return await rpc.call(bus, subjects.claims_of(gateway), message, ClaimReply)
                except (DeadlineExceeded, Overloaded):
                    await asyncio.sleep(limits.CLAIM_RETRY_S)
    except TimeoutError:
        log.warning("gateway.lost", gateway=gateway, request=request, epoch=epoch)
        return ClaimReply(verdict="unknown")
