"""What the administrator may do: accounts, money coming in, API keys, and looking at the books.

Calls that move money carry an idempotency key: the same call again is answered as the first time, another call under
the same key is a Conflict (invariant 9).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Final, TypeVar

import msgspec
import structlog
from sqlalchemy.ext.asyncio import AsyncConnection

from services.billing import account_repository, accounts, ledger, pricing, reconcile, repository
from services.billing.account_repository import AccountBooks
from services.billing.accounts import ApiKey, moment
from services.billing.admin_schemas import (
    Accounts,
    AccountView,
    CreditView,
    EntriesPage,
    FindingView,
    Keys,
    NewAccount,
    NewCredit,
    NewKeyView,
    Reconciliation,
    UsagePage,
    account_view,
    entry_view,
    key_view,
    usage_view,
)
from services.billing.ledger import Act, Ledger
from services.billing.repository import Movement
from shared.contracts import limits
from shared.contracts.block import digest
from shared.contracts.errors import Conflict, InvalidRequest, NotFound, TooManyRequests
from shared.contracts.ids import AccountId, KeyId
from shared.contracts.messages import Revoked
from shared.contracts.ports import Clock
from shared.contracts.tag import TrafficClass
from shared.runtime.database import Database

log = structlog.get_logger()
_ACCOUNT: Final = re.compile(r"acct_[0-9a-f]{32}")
_KEY: Final = re.compile(r"key_[0-9a-f]{32}")
V = TypeVar("V", bound=AccountView)


class Administration:
    """`broadcast` tells every service of a revocation. `entropy(n)`: n random bytes."""

    def __init__(
        self,
        database: Database,
        broadcast: Callable[[Revoked], Awaitable[None]],
        clock: Clock,
        entropy: Callable[[int], bytes],
        *,
        currency: str,
        concurrency: int,
    ) -> None:
        self._database = database
        self._broadcast = broadcast
        self._clock = clock
        self._entropy = entropy
        self._currency = currency
        self._concurrency = concurrency

    # -- accounts and money --------------------------------------------------------------------------------------------

    async def create_account(self, wanted: NewAccount, idempotency_key: str | None) -> AccountView:
        """Raises InvalidRequest when money is named without an idempotency key, Conflict."""
        credits = [(Act.TOPPED_UP, wanted.credit), (Act.GRANTED, wanted.grant)]
        amounts = [(act, pricing.parse_amount(text)) for act, text in credits if text is not None]
        if amounts or idempotency_key is not None:
            require_key(idempotency_key)
        now = moment(self._clock.now_s())
        account = accounts.new_account(
            wanted.name,
            wanted.currency or self._currency,
            wanted.concurrency or self._concurrency,
            self._entropy(2 * accounts.ENTROPY_BYTES),
            now,
        )
        input_hash = _hash("account", wanted.name, wanted.currency, wanted.concurrency, *amounts)

        async def create(connection: AsyncConnection) -> AccountView:
            await account_repository.insert_account(connection, account)
            for act, amount_nano in amounts:
                await _credit(connection, account.id, act, amount_nano, f"{act}:{idempotency_key}", input_hash, now)
            return account_view(await _books(connection, account.id))

        made = await self._once(idempotency_key, input_hash, AccountView, create, now)
        log.info("account.created", account=made.id, currency=made.currency, paid=made.paid)
        return made

    async def credit(self, account: str, wanted: NewCredit, idempotency_key: str | None) -> CreditView:
        """Raises NotFound, InvalidRequest, Conflict."""
        account_id, key = _account_id(account), require_key(idempotency_key)
        amount_nano, act = pricing.parse_amount(wanted.amount), Act(wanted.kind)
        now = moment(self._clock.now_s())
        input_hash = _hash("credit", account_id, act, amount_nano)

        async def bring_in(connection: AsyncConnection) -> CreditView:
            journal = await _credit(connection, account_id, act, amount_nano, f"{act}:{key}", input_hash, now)
            view = account_view(await _books(connection, account_id))
            amount = pricing.format_amount(amount_nano)
            return CreditView(**view.model_dump(), amount=amount, kind=act.value, journal=journal)

        made = await self._once(key, input_hash, CreditView, bring_in, now)
        log.info("account.credited", account=account_id, act=act.value, amount_nano=amount_nano, journal=made.journal)
        return made

    async def _once(
        self,
        key: str | None,
        input_hash: bytes,
        kind: type[V],
        act: Callable[[AsyncConnection], Awaitable[V]],
        now: datetime,
    ) -> V:
        """The act's answer, or the one that it had before under this key."""

        async def work(connection: AsyncConnection) -> V:
            if key is None:
                return await act(connection)
            known = await account_repository.lock_idempotency_key(connection, key)
            if known is not None:
                if known[0] != input_hash:
                    log.error("idempotency.refused", idempotency_key=key)
                    raise Conflict("this Idempotency-Key was used for another call")
                return kind.model_validate(known[1])
            answer = await act(connection)
            await account_repository.remember_reply(connection, key, input_hash, answer.model_dump(mode="json"), now)
            return answer

        return await self._database.transact(work)

    async def account(self, account: str) -> AccountView:
        account_id = _account_id(account)

        async def read(connection: AsyncConnection) -> AccountBooks:
            return await _books(connection, account_id)

        return account_view(await self._database.read(read))

    async def accounts(self, after: str | None, limit: int) -> Accounts:
        last = _account_id(after) if after is not None else None

        async def read(connection: AsyncConnection) -> list[AccountBooks]:
            return await account_repository.list_accounts(connection, last, limit)

        found = await self._database.read(read)
        return Accounts(
            accounts=[account_view(books) for books in found],
            next=found[-1].account.id if len(found) == limit else None,
        )

    # -- keys ----------------------------------------------------------------------------------------------------------

    async def create_key(self, account: str, traffic_class: TrafficClass | None) -> NewKeyView:
        """A new key, shown once. A repeated call makes another key: the secret is kept nowhere to be shown again."""
        account_id = _account_id(account)
        entropy = self._entropy(3 * accounts.ENTROPY_BYTES)
        secret, key = accounts.new_api_key(account_id, traffic_class, entropy, moment(self._clock.now_s()))

        async def work(connection: AsyncConnection) -> None:
            await _books(connection, account_id)
            if await account_repository.count_api_keys(connection, account_id) >= limits.API_KEYS_PER_ACCOUNT_MAX:
                raise TooManyRequests(f"an account has at most {limits.API_KEYS_PER_ACCOUNT_MAX} keys")
            await account_repository.insert_api_key(connection, key)

        await self._database.transact(work)
        log.info("key.created", account=account_id, key_id=key.id)
        return NewKeyView(**key_view(key).model_dump(), key=secret)

    async def keys(self, account: str) -> Keys:
        account_id = _account_id(account)

        async def read(connection: AsyncConnection) -> list[ApiKey]:
            await _books(connection, account_id)
            return await account_repository.list_api_keys(connection, account_id)

        return Keys(keys=[key_view(key) for key in await self._database.read(read)])

    async def revoke_key(self, key: str) -> None:
        """Refuses the key from now on and tells every service. Repeating it repeats the broadcast."""
        if not _KEY.fullmatch(key):
            raise NotFound("no such key")
        key_id, now_s = KeyId(key), self._clock.now_s()

        async def work(connection: AsyncConnection) -> ApiKey | None:
            return await account_repository.revoke_api_key(connection, key_id, moment(now_s))

        revoked = await self._database.transact(work)
        if revoked is None:
            raise NotFound("no such key")
        # After the commit: a service that hears of it and asks again is refused. `at_s` is now also for a repeat, so
        # that no tag issued since then, by another process that had not yet seen the row, outlives it.
        await self._broadcast(Revoked(account=revoked.account, key_id=key_id, at_s=self._clock.now_s()))
        log.info("key.revoked", account=revoked.account, key_id=key_id)

    # -- the books -----------------------------------------------------------------------------------------------------

    async def usage(self, account: str, after: int, limit: int) -> UsagePage:
        account_id = _account_id(account)

        async def read(connection: AsyncConnection) -> UsagePage:
            await _books(connection, account_id)
            rows = await account_repository.usage_rows(connection, account_id, after, limit)
            following = rows[-1].id if len(rows) == limit else None
            return UsagePage(usage=[usage_view(row) for row in rows], next=following)

        return await self._database.read(read)

    async def entries(self, account: str, after: int, limit: int) -> EntriesPage:
        account_id = _account_id(account)

        async def read(connection: AsyncConnection) -> EntriesPage:
            await _books(connection, account_id)
            rows = await account_repository.entry_rows(connection, account_id, after, limit)
            following = rows[-1].id if len(rows) == limit else None
            return EntriesPage(entries=[entry_view(row) for row in rows], next=following)

        return await self._database.read(read)

    async def reconciliation(self) -> Reconciliation:
        now = moment(self._clock.now_s())

        async def read(connection: AsyncConnection) -> list[reconcile.Finding]:
            return await reconcile.reconcile(connection, now)

        findings = await self._database.snapshot(read)
        for finding in findings:
            if finding.count:
                log.error("books.unsound", check=finding.name, count=finding.count, samples=finding.samples)
        checks = [FindingView(name=f.name, says=f.says, count=f.count, samples=list(f.samples)) for f in findings]
        return Reconciliation(sound=not any(check.count for check in checks), checks=checks)


def require_key(idempotency_key: str | None) -> str:
    """Raises InvalidRequest without one: money is not moved twice because an answer was lost on its way."""
    if idempotency_key is None:
        raise InvalidRequest("a call that moves money needs the header Idempotency-Key")
    if not 1 <= len(idempotency_key) <= limits.IDEMPOTENCY_KEY_CHARS_MAX or not idempotency_key.isprintable():
        raise InvalidRequest(f"an Idempotency-Key has 1 to {limits.IDEMPOTENCY_KEY_CHARS_MAX} printable characters")
    return idempotency_key


def _account_id(text: str) -> AccountId:
    if not _ACCOUNT.fullmatch(text):
        raise NotFound("no such account")
    return AccountId(text)


def _hash(*content: object) -> bytes:
    """Of a call's content; amounts as nano-units, so that "5" and "5.00" are the same."""
    return digest("deepserve/billing/admin/1", msgspec.json.encode(content))


async def _books(connection: AsyncConnection, account: AccountId) -> AccountBooks:
    found = await account_repository.find_account(connection, account)
    if found is None:
        raise NotFound("no such account")
    return found


async def _credit(
    connection: AsyncConnection,
    account: AccountId,
    act: Act,
    amount_nano: int,
    idempotency_key: str,
    input_hash: bytes,
    now: datetime,
) -> int:
    """The journal id. Raises NotFound, and InvalidRequest when the balance would pass its bound."""
    balances = await repository.lock_balances(connection, account)
    if not balances:
        raise NotFound("no such account")
    after_nano = repository.funds(balances).total_nano + balances[Ledger.HELD] + amount_nano
    if after_nano > limits.AMOUNT_NANO_MAX:
        raise InvalidRequest(f"the balance would pass {limits.AMOUNT_NANO_MAX // limits.NANO}")
    movement = Movement(
        act=act,
        account=account,
        amount_nano=amount_nano,
        entries=ledger.credit(act, amount_nano),
        idempotency_key=idempotency_key,
        input_hash=input_hash,
        now=now,
    )
    return await repository.credit(connection, movement)
