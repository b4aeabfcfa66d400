"""What billing answers to the other services about who they are and what they may do: tags, balances, namespace keys.

The money acts are in `money.py`; `serve` puts both on their subjects.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncConnection

from services.billing import account_repository, accounts, namespaces, repository, tags
from services.billing.accounts import Standing, moment
from services.billing.money import Money
from services.billing.pricing import format_amount
from services.billing.tags import TagPolicy
from shared.contracts import subjects
from shared.contracts.errors import AuthenticationFailed, ClaimRefused, NotFound
from shared.contracts.ids import NamespaceId
from shared.contracts.messages import (
    NAMESPACE_KEY_SEAL,
    Authorize,
    AuthorizeReply,
    BalanceQuery,
    BalanceReply,
    Hold,
    NamespaceKeyQuery,
    NamespaceKeyReply,
    Release,
    Settle,
)
from shared.contracts.ports import Bus, Clock
from shared.contracts.tag import GrantClaims, TagClaims
from shared.runtime import rpc, sealing, signing
from shared.runtime.database import Database


@dataclass(frozen=True)
class Secrets:
    """`signing_key` and `master_key` are billing's alone."""

    signing_key: bytes
    verify_key: bytes
    master_key: bytes
    cluster_key: bytes

    def __repr__(self) -> str:
        return "Secrets(…)"


class Statements:
    """`entropy(n)`: n random bytes."""

    def __init__(
        self, database: Database, secrets: Secrets, policy: TagPolicy, clock: Clock, entropy: Callable[[int], bytes]
    ) -> None:
        self._database = database
        self._secrets = secrets
        self._policy = policy
        self._clock = clock
        self._entropy = entropy

    async def authorize(self, message: Authorize) -> AuthorizeReply:
        """A tag for the key's account, also for one without money: what it may do is the tag's content.

        Raises AuthenticationFailed, in DeepSeek's words, for a key that is unknown or revoked.
        """
        now_s = self._clock.now_s()

        async def read(connection: AsyncConnection) -> tuple[Standing, int] | None:
            return await repository.standing_by_digest(connection, message.key_digest, moment(now_s))

        found = await self._database.read(read)
        if found is None or found[0].revoked:
            raise accounts.refusal(message.key_hint)
        standing, price_version = found
        claims = tags.tag_claims(
            standing, self._policy, price_version=price_version, entropy=self._entropy(16), now_s=now_s
        )
        return AuthorizeReply(tag=signing.sign(claims, self._secrets.signing_key))

    async def balance(self, message: BalanceQuery) -> BalanceReply:
        """What can be spent now: without what pending holds reserve. Raises AuthenticationFailed, ClaimRefused."""
        now_s = self._clock.now_s()
        tag = signing.verify(TagClaims, message.tag, self._secrets.verify_key, now_s)

        async def read(connection: AsyncConnection) -> tuple[Standing, int] | None:
            return await repository.standing_by_key(connection, tag.key_id, moment(now_s))

        found = await self._database.read(read)
        if found is None:
            raise AuthenticationFailed("the tag's key is gone")
        standing = found[0]
        if standing.revoked:
            raise accounts.refusal(standing.key_hint)
        funds = standing.funds
        return BalanceReply(
            is_available=funds.total_nano > 0,
            currency=standing.currency,
            total_balance=format_amount(funds.total_nano),
            granted_balance=format_amount(funds.granted_nano),
            topped_up_balance=format_amount(funds.topped_up_nano),
        )

    async def namespace_key(self, message: NamespaceKeyQuery) -> NamespaceKeyReply:
        """The key of a namespace that the grant names, made on its first need, sealed for the way.

        Raises AuthenticationFailed, and ClaimRefused for an expired or revoked grant or a namespace that it lacks.
        """
        now_s = self._clock.now_s()
        grant = signing.verify(GrantClaims, message.grant, self._secrets.verify_key, now_s)
        namespaces.check_access(grant, message.namespace)

        async def read(connection: AsyncConnection) -> bytes | None:
            found = await repository.standing_by_key(connection, grant.key_id, moment(now_s))
            if found is None or found[0].revoked:
                raise ClaimRefused("the grant's key was revoked")
            return await account_repository.find_namespace_key(connection, message.namespace)

        wrapped = await self._database.read(read)
        if wrapped is None:
            wrapped = await self._make_namespace_key(grant, message.namespace, now_s)
        key = namespaces.unwrap(self._secrets.master_key, message.namespace, wrapped)
        return NamespaceKeyReply(sealed_key=sealing.seal(self._secrets.cluster_key, NAMESPACE_KEY_SEAL, key))

    async def _make_namespace_key(self, grant: GrantClaims, namespace: NamespaceId, now_s: float) -> bytes:
        """The wrapped key; where two make it at once, the first one wins. Shared namespaces are the operator's."""
        if namespace != grant.namespace:
            raise NotFound("the shared namespace has no key")
        fresh = self._entropy(namespaces.KEY_BYTES)
        wrapped = namespaces.wrap(self._secrets.master_key, namespace, fresh, self._entropy(namespaces.NONCE_BYTES))

        async def work(connection: AsyncConnection) -> bytes:
            return await account_repository.make_namespace_key(
                connection, namespace, grant.account, wrapped, moment(now_s)
            )

        return await self._database.transact(work)


async def serve(bus: Bus, statements: Statements, money: Money) -> list[Callable[[], Awaitable[None]]]:
    """Answers all of billing's subjects, as one of its queue group. Returns the unsubscribes."""
    queue = subjects.BILLING_QUEUE
    return [
        await rpc.serve(bus, subjects.BILLING_AUTHORIZE, Authorize, statements.authorize, queue),
        await rpc.serve(bus, subjects.BILLING_BALANCE, BalanceQuery, statements.balance, queue),
        await rpc.serve(bus, subjects.BILLING_NAMESPACE_KEY, NamespaceKeyQuery, statements.namespace_key, queue),
        await rpc.serve(bus, subjects.BILLING_HOLD, Hold, money.hold, queue),
        await rpc.serve(bus, subjects.BILLING_SETTLE, Settle, money.settle, queue),
        await rpc.serve(bus, subjects.BILLING_RELEASE, Release, money.release, queue),
    ]
