"""The end of a hold, told to billing until it is committed (invariants 1 and 8).

A worker acknowledges its work message only after this returned. Both calls are idempotent at billing, so a try that is
repeated, here or by the next worker, changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from shared.contracts import limits, subjects
from shared.contracts.epoch import Epoch
from shared.contracts.errors import ClaimRefused, ClientError, DeepServeError, IllegalTransition
from shared.contracts.ids import WorkerId
from shared.contracts.messages import Message, Release, Settle, Settled
from shared.contracts.ports import Bus, Clock
from shared.contracts.tag import GrantClaims
from shared.contracts.usage import Usage
from shared.runtime import rpc

log = structlog.get_logger()


class Settlement:
    """Waits for billing as long as a grant is good for settlement; the caller keeps the lease meanwhile."""

    def __init__(self, bus: Bus, worker: WorkerId, clock: Clock) -> None:
        self._bus = bus
        self._worker = worker
        self._clock = clock
        self.observe: Callable[[float], None] = lambda seconds: None
        """Told how long each settlement took until billing had committed it."""

    async def settle(self, token: str, grant: GrantClaims, epoch: Epoch, usage: Usage, device_s: float) -> None:
        """The hold's end after work. A hold that ended otherwise (Conflict) is logged and left as it is."""
        message = Settle(grant=token, epoch=epoch, usage=usage, worker=self._worker, device_s=device_s)
        begun_s = self._clock.monotonic_s()
        if await self._until_committed(subjects.BILLING_SETTLE, message, grant):
            self.observe(self._clock.monotonic_s() - begun_s)
            log.info("request.settled", request=grant.request, epoch=epoch, output=usage.output, cached=usage.cached)

    async def release(self, token: str, grant: GrantClaims, reason: str) -> None:
        """The hold's end when no prefill ran."""
        if await self._until_committed(subjects.BILLING_RELEASE, Release(grant=token, reason=reason), grant):
            log.info("request.released", request=grant.request, reason=reason)

    async def _until_committed(self, subject: str, message: Message, grant: GrantClaims) -> bool:
        pause_s = limits.SETTLE_RETRY_S
        while True:
            try:
                await rpc.call(self._bus, subject, message, Settled)
                return True
            except (ClientError, ClaimRefused, IllegalTransition) as error:
                log.warning("settlement.refused", request=grant.request, error=error.message)
                return False
            except DeepServeError as error:
                log.warning("settlement.delayed", request=grant.request, error=error.message)
            if self._clock.now_s() > grant.deadline_s + limits.SETTLE_ALLOWANCE_S:
                log.error("settlement.abandoned", request=grant.request)
                return False
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, limits.SETTLE_RETRY_MAX_S)
