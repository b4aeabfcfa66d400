"""The money acts: hold, settle, release, expire. Orchestrates; the pure modules decide, the repository writes.

Each act is lock, read, write, in one transaction with those of its account that wait (`convoy`). A repeat of an act is
answered as the first time, by the request's id; other content under the same id is a Conflict and an error in the log
(invariant 9).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from services.billing import accounts, holds, ledger, pricing, repository, tags
from services.billing.accounts import Standing, moment
from services.billing.convoy import Convoy
from services.billing.holds import HeldRequest
from services.billing.ledger import Act, Entry, Funds
from services.billing.pricing import Prices
from services.billing.repository import Movement
from services.billing.tags import TagPolicy
from shared.contracts.errors import AuthenticationFailed, Conflict, InvalidRequest, NotFound
from shared.contracts.ids import AccountId, HoldId, prefixed
from shared.contracts.lifecycle import HoldEvent, HoldState
from shared.contracts.messages import Hold, HoldReply, Release, Settle, Settled
from shared.contracts.ports import Clock
from shared.contracts.tag import GrantClaims, TagClaims
from shared.runtime import signing
from shared.runtime.database import Database

log = structlog.get_logger()

_WHENEVER: Final = -math.inf
"""A grant is looked at for its end at any time: work that was done is paid for, also after the grant has expired."""


class Money:
    """`entropy(n)`: n random bytes. `signing_key`: the Ed25519 seed of `verify_key`."""

    def __init__(
        self,
        database: Database,
        signing_key: bytes,
        verify_key: bytes,
        policy: TagPolicy,
        clock: Clock,
        entropy: Callable[[int], bytes],
    ) -> None:
        self._convoy = Convoy(database)
        self._signing_key = signing_key
        self._verify_key = verify_key
        self._policy = policy
        self._clock = clock
        self._entropy = entropy

    # -- hold ----------------------------------------------------------------------------------------------------------

    async def hold(self, message: Hold) -> HoldReply:
        """Reserves what the request costs at its worst, and grants it. Idempotent by the request.

        Raises AuthenticationFailed, ClaimRefused (the tag has expired), InsufficientBalance, NotFound (no price for
        the model), InvalidRequest, and Conflict (the request is held with other content, or its hold has ended).
        """
        now_s = self._clock.now_s()
        tag = signing.verify(TagClaims, message.tag, self._verify_key, now_s)
        tags.check_hold(message, now_s)

        async def work(connection: AsyncConnection) -> HeldRequest:
            balances = await repository.lock_balances(connection, tag.account)
            context = await repository.hold_context(
                connection, tag.account, tag.key_id, message.model, message.request, moment(now_s)
            )
            if context is None or not balances:
                raise AuthenticationFailed("the tag's account or key is gone")
            standing, prices = context.standing, context.prices
            if standing.revoked:
                raise accounts.refusal(standing.key_hint)
            if context.held_before:
                return await _repeated(connection, message, tag.account)
            if prices is None:
                raise NotFound(f"no price for model {message.model} in {standing.currency}")
            amount_nano = pricing.hold_nano(prices, message.prompt_tokens, message.max_output_tokens)
            reserved = ledger.reserve(repository.funds(balances), amount_nano)
            held = self._held(message, standing, prices, reserved, now_s)
            movement = _movement(held, Act.HOLD, amount_nano, ledger.hold(reserved), held.input_hash, now_s)
            if not await repository.insert_hold(connection, held, movement):
                raise Conflict("the request is held by another account")
            return held

        held = await self._convoy.act(tag.account, work)
        amount_nano = held.reserved.total_nano
        log.info("request.held", request=held.request, account=held.account, hold=held.id, amount_nano=amount_nano)
        return HoldReply(grant=signing.sign(held.claims, self._signing_key), hold_nano=amount_nano)

    def _held(self, message: Hold, standing: Standing, prices: Prices, reserved: Funds, now_s: float) -> HeldRequest:
        hold_id = HoldId(prefixed("hold_", self._entropy(accounts.ENTROPY_BYTES)))
        entropy = self._entropy(accounts.ENTROPY_BYTES)
        return HeldRequest(
            id=hold_id,
            request=message.request,
            account=standing.account,
            key_id=standing.key_id,
            prompt_tokens=message.prompt_tokens,
            max_output_tokens=message.max_output_tokens,
            reserved=reserved,
            prices=prices,
            claims=tags.grant_claims(message, standing, self._policy, hold_id=hold_id, entropy=entropy, now_s=now_s),
            input_hash=holds.hold_hash(message, standing.account),
            state=HoldState.PENDING,
            created_at=moment(now_s),
        )

    # -- its ends ------------------------------------------------------------------------------------------------------

    async def settle(self, message: Settle) -> Settled:
        """Takes what the usage costs and returns the rest of the hold. Idempotent by the request.

        Usage of a hold that has expired is booked as an adjustment of its own. Raises AuthenticationFailed, NotFound,
        InvalidRequest (a usage that the hold cannot have had), Conflict (released, or settled with other content).
        """
        grant = signing.verify(GrantClaims, message.grant, self._verify_key, _WHENEVER)
        _check_report(message)
        usage_hash = holds.usage_hash(grant.request, message.usage)
        now_s = self._clock.now_s()

        async def work(connection: AsyncConnection) -> tuple[Settled, HoldState]:
            balances = await repository.lock_balances(connection, grant.account)
            held = await _found(connection, grant)
            if held.state is not HoldState.PENDING:
                counted = await repository.usage_of(connection, held.request)
                if counted is not None:
                    return _settled_before(held, counted, usage_hash), held.state
            holds.check_usage(held, message.usage)
            cost_nano = pricing.cost_nano(held.prices, message.usage)
            if held.state is HoldState.EXPIRED:
                entries = ledger.late_usage(repository.funds(balances), cost_nano)
                movement = _movement(held, Act.LATE_USAGE, cost_nano, entries, usage_hash, now_s)
                await repository.late_usage(connection, held, message, movement)
            else:
                ledger.end(held.state, HoldEvent.SETTLE)
                entries = ledger.settle(held.reserved, cost_nano)
                movement = _movement(held, Act.SETTLE, cost_nano, entries, usage_hash, now_s)
                await repository.settle(connection, held, message, movement)
            return Settled(amount_nano=cost_nano, currency=held.prices.currency), held.state

        try:
            settled, found = await self._convoy.act(grant.account, work)
        except (Conflict, InvalidRequest) as error:
            log.error("settlement.refused", request=grant.request, hold=grant.hold, reason=error.message)
            raise
        log.info(
            "request.settled",
            request=grant.request,
            epoch=message.epoch,
            amount_nano=settled.amount_nano,
            hold_was=found.value,
        )
        return settled

    async def release(self, message: Release) -> Settled:
        """Gives the whole hold back. Idempotent; nothing is left to do for one that has expired.

        Raises AuthenticationFailed, NotFound, and Conflict for a hold that was settled.
        """
        grant = signing.verify(GrantClaims, message.grant, self._verify_key, _WHENEVER)
        now_s = self._clock.now_s()

        async def work(connection: AsyncConnection) -> Settled:
            await repository.lock_balances(connection, grant.account)
            held = await _found(connection, grant)
            if held.state not in (HoldState.RELEASED, HoldState.EXPIRED):
                await _give_back(connection, held, Act.RELEASE, HoldEvent.RELEASE, now_s)
            return Settled(amount_nano=0, currency=held.prices.currency)

        try:
            settled = await self._convoy.act(grant.account, work)
        except Conflict as error:
            log.error("release.refused", request=grant.request, hold=grant.hold, reason=error.message)
            raise
        log.info("request.released", request=grant.request, reason=message.reason[:200])
        return settled

    async def expire(self, hold: HoldId, account: AccountId) -> bool:
        """Ends a hold that is due. False when it has ended meanwhile."""
        now_s = self._clock.now_s()

        async def work(connection: AsyncConnection) -> HeldRequest | None:
            await repository.lock_balances(connection, account)
            held = await repository.held(connection, hold, account)
            if held is None or held.state is not HoldState.PENDING:
                return None
            await _give_back(connection, held, Act.EXPIRE, HoldEvent.EXPIRE, now_s)
            return held

        held = await self._convoy.act(account, work)
        if held is None:
            return False
        log.warning("hold.expired", request=held.request, account=account, amount_nano=held.reserved.total_nano)
        return True


async def _found(connection: AsyncConnection, grant: GrantClaims) -> HeldRequest:
    held = await repository.held(connection, grant.hold, grant.account)
    if held is None:
        raise NotFound("the books have no such hold")
    return held


async def _repeated(connection: AsyncConnection, message: Hold, account: AccountId) -> HeldRequest:
    """The hold again, for a repeat of it; else Conflict."""
    prior = await repository.held_by_request(connection, message.request)
    if prior is None or prior.input_hash != holds.hold_hash(message, account):
        log.error("hold.refused", request=message.request, account=account, reason="other content")
        raise Conflict("the request is already held with other content")
    if prior.state is not HoldState.PENDING:
        raise Conflict(f"the request's hold is already {prior.state.value}")
    return prior


def _settled_before(held: HeldRequest, counted: tuple[bytes, int], usage_hash: bytes) -> Settled:
    known_hash, amount_nano = counted
    if known_hash != usage_hash:
        raise Conflict("the request is already settled with other content")
    return Settled(amount_nano=amount_nano, currency=held.prices.currency)


def _check_report(message: Settle) -> None:
    """Raises InvalidRequest on numbers that no worker can mean, before the books refuse them."""
    if not (math.isfinite(message.device_s) and message.device_s >= 0):
        raise InvalidRequest(f"{message.device_s} busy seconds")
    if message.epoch.attempt < 1 or message.epoch.delivery < 1:
        raise InvalidRequest(f"the epoch {message.epoch} is not one")
    if not message.worker.isprintable():
        raise InvalidRequest("the worker has no printable name")


async def _give_back(connection: AsyncConnection, held: HeldRequest, act: Act, event: HoldEvent, now_s: float) -> None:
    state = ledger.end(held.state, event)
    entries = ledger.give_back(held.reserved)
    movement = _movement(held, act, held.reserved.total_nano, entries, holds.end_hash(act, held.id), now_s)
    await repository.give_back(connection, movement, state)


def _movement(
    held: HeldRequest, act: Act, amount_nano: int, entries: tuple[Entry, ...], input_hash: bytes, now_s: float
) -> Movement:
    return Movement(
        act=act,
        account=held.account,
        amount_nano=amount_nano,
        entries=entries,
        idempotency_key=f"{act.value}:{held.request}",
        input_hash=input_hash,
        now=moment(now_s),
        hold=held.id,
        request=held.request,
    )
