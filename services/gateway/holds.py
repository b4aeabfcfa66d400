"""The gateway's part of a hold's life: made before the work, and ended here only when no worker will (invariant 1).

A hold whose reply was lost, or whose client left meanwhile, is still one at billing: it is asked for again (holds are
idempotent by request) and given back.
"""

from __future__ import annotations

import asyncio

import structlog

from services.gateway.background import Background
from shared.contracts import limits, subjects
from shared.contracts.errors import ClaimRefused, ClientError, DeadlineExceeded, DeepServeError, Overloaded
from shared.contracts.ids import RequestId
from shared.contracts.messages import Hold, HoldReply, Release, Settled
from shared.contracts.ports import Bus
from shared.runtime import rpc

log = structlog.get_logger()


class Holds:
    def __init__(self, bus: Bus, background: Background) -> None:
        self._bus = bus
        self._background = background

    async def hold(self, message: Hold) -> HoldReply:
        """Raises InsufficientBalance and what else billing answers; Overloaded when it does not. Whatever is raised
        here, cancellation too, leaves no hold behind that nobody gives back."""
        task = self._background.spawn(self._ask(message), "hold")
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._background.spawn(self._give_back(message, "the client left"), "release")
            raise
        except DeadlineExceeded as error:
            self._background.spawn(self._give_back(message, "billing was late"), "release")
            raise Overloaded(error.message) from error

    def release(self, grant: str, request: RequestId, reason: str) -> None:
        """Gives the hold back in the background, with limits.RELEASE_ATTEMPTS_MAX tries."""
        self._background.spawn(self._release(grant, request, reason), "release")

    async def _ask(self, message: Hold) -> HoldReply:
        return await rpc.call(self._bus, subjects.BILLING_HOLD, message, HoldReply)

    async def _give_back(self, message: Hold, reason: str) -> None:
        for attempt in range(limits.RELEASE_ATTEMPTS_MAX):
            try:
                reply = await self._ask(message)
            except (ClientError, ClaimRefused):
                return  # refused: there is no hold
            except DeepServeError as error:
                log.warning("hold.unknown", request=message.request, error=error.message)
                await asyncio.sleep(limits.RELEASE_RETRY_S * 2**attempt)
                continue
            await self._release(reply.grant, message.request, reason)
            return

    async def _release(self, grant: str, request: RequestId, reason: str) -> None:
        for attempt in range(limits.RELEASE_ATTEMPTS_MAX):
            try:
                await rpc.call(self._bus, subjects.BILLING_RELEASE, Release(grant=grant, reason=reason), Settled)
            except (ClientError, ClaimRefused) as error:
                log.warning("hold.unreleased", request=request, error=error.message)
                return
            except DeepServeError as error:
                log.warning("release.delayed", request=request, error=error.message)
                await asyncio.sleep(limits.RELEASE_RETRY_S * 2**attempt)
            else:
                log.info("hold.released", request=request, reason=reason)
                return
        log.error("release.abandoned", request=request)
