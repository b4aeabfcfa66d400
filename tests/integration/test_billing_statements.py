"""Tags, balances and namespace keys from real books, over a real bus where the way matters."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import msgspec
import pytest

from services.billing import handlers
from services.billing.accounts import key_digest
from services.billing.admin_schemas import NewCredit
from shared.contracts import subjects
from shared.contracts.errors import (
    AuthenticationFailed,
    ClaimRefused,
    Conflict,
    InsufficientBalance,
    InvalidRequest,
    NotFound,
)
from shared.contracts.ids import NamespaceId, sub_namespace
from shared.contracts.messages import (
    NAMESPACE_KEY_SEAL,
    Authorize,
    AuthorizeReply,
    BalanceQuery,
    BalanceReply,
    HoldReply,
    NamespaceKeyQuery,
    NamespaceKeyReply,
    Release,
    Settled,
)
from shared.contracts.tag import GrantClaims, TagClaims
from shared.runtime import rpc, sealing, signing
from shared.runtime.bus import NatsBus
from tests.integration.billing_books import SECRETS, Books, Customer, open_books, settlement, usage

pytestmark = pytest.mark.servers


@pytest.fixture
async def books(fresh_database: str) -> AsyncIterator[Books]:
    async with open_books(fresh_database) as opened:
        yield opened


def read_tag(books: Books, tag: str) -> TagClaims:
    return signing.verify(TagClaims, tag, SECRETS.verify_key, books.clock.now_s())


def read_grant(books: Books, grant: str) -> GrantClaims:
    return signing.verify(GrantClaims, grant, SECRETS.verify_key, books.clock.now_s())


async def test_a_tag_says_what_the_account_may_do(books: Books) -> None:
    payer, trial, poor = (
        await books.customer(credit="1"),
        await books.customer(grant="1"),
        await books.customer(),
    )
    rights = []
    for customer in (payer, trial, poor):
        tag = read_tag(books, await customer.tag())
        assert (tag.account, tag.key_id) == (customer.account, customer.key.id)
        assert (tag.issued_at_s, tag.expires_at_s) == (books.clock.now_s(), books.clock.now_s() + 60)
        assert (tag.price_version, tag.concurrency) == (1, 500)
        rights.append((tag.paid, tag.cache_read, tag.cache_write, tag.funded))
    assert rights == [(True,) * 4, (False, False, False, True), (False,) * 4]


async def test_a_trial_that_tops_up_is_paid_from_its_next_hold_on(books: Books) -> None:
    customer = await books.customer(grant="1")
    assert not read_grant(books, await customer.hold("r1")).cache_read
    tag = await customer.tag()
    await books.administration.credit(customer.account, NewCredit(amount="1", kind="topped_up"), "key")
    grant = read_grant(books, await customer.hold("r2", tag=tag))
    assert (grant.cache_read, grant.cache_write) == (True, True)


async def test_unknown_and_revoked_keys_are_refused_in_deepseeks_words(books: Books) -> None:
    customer = await books.customer(credit="1")
    tag = await customer.tag()
    with pytest.raises(AuthenticationFailed, match=r"^Authentication Fails, Your api key: \*\*\*\*abcd is invalid$"):
        await books.statements.authorize(Authorize(key_digest=key_digest("sk-unknown"), key_hint="abcd"))
    await books.administration.revoke_key(customer.key.id)
    with pytest.raises(AuthenticationFailed, match=rf"\*\*\*\*{customer.key.hint} is invalid$"):
        await customer.tag()
    with pytest.raises(AuthenticationFailed):
        await books.statements.balance(BalanceQuery(tag=tag))


async def test_a_balance_is_exact_and_without_what_is_held(books: Books) -> None:
    customer = await books.customer(credit="10", grant="0.5")
    await customer.settle(await customer.hold("r1"), usage(cached=960, uncached=40, output=1))
    await customer.hold("r2")
    balance = await books.statements.balance(BalanceQuery(tag=await customer.tag()))
    # 0.5 less 9,480 (settled) and 210,000 (held) nano-units
    assert balance == BalanceReply(
        is_available=True,
        currency="USD",
        total_balance="10.49978052",
        granted_balance="0.49978052",
        topped_up_balance="10.00",
    )
    poor = await books.customer()
    empty = await books.statements.balance(BalanceQuery(tag=await poor.tag()))
    assert (empty.is_available, empty.total_balance) == (False, "0.00")


async def namespace_key(books: Books, grant: str, namespace: NamespaceId) -> bytes:
    reply = await books.statements.namespace_key(NamespaceKeyQuery(grant=grant, namespace=namespace))
    return sealing.open_sealed(SECRETS.cluster_key, NAMESPACE_KEY_SEAL, reply.sealed_key)


async def test_a_namespace_has_one_random_key(books: Books) -> None:
    customer = await books.customer(credit="1")
    grants = [await customer.hold(f"r{number}") for number in range(8)]
    namespace = read_grant(books, grants[0]).namespace
    keys = await asyncio.gather(*(namespace_key(books, grant, namespace) for grant in grants))
    assert len(set(keys)) == 1
    assert len(keys[0]) == 32

    split = await customer.hold("r-split", user_id="u")
    assert read_grant(books, split).namespace == sub_namespace(namespace, "u")
    assert await namespace_key(books, split, sub_namespace(namespace, "u")) != keys[0]

    [stored] = await books.rows("SELECT wrapped_key FROM billing.namespaces WHERE namespace = $1", namespace)
    assert keys[0] not in stored["wrapped_key"]
    await books.rows("DELETE FROM billing.namespaces WHERE namespace = $1", namespace)
    assert await namespace_key(books, grants[0], namespace) != keys[0], "an erased cache stays erased"


async def test_a_grant_gets_no_key_but_its_own(books: Books) -> None:
    customer, other, trial = (
        await books.customer(credit="1"),
        await books.customer(credit="1"),
        await books.customer(grant="1"),
    )
    grant = await customer.hold("r1")
    mine = read_grant(books, grant).namespace
    foreign = read_grant(books, await other.hold("r2")).namespace
    for namespace in (foreign, sub_namespace(mine, "u")):
        with pytest.raises(ClaimRefused):
            await namespace_key(books, grant, namespace)
    closed = await trial.hold("r3")
    with pytest.raises(ClaimRefused):
        await namespace_key(books, closed, read_grant(books, closed).namespace)
    assert await books.rows("SELECT 1 FROM billing.namespaces") == []


async def test_no_key_for_revoked_or_expired_grants(books: Books) -> None:
    customer, other = await books.customer(credit="1"), await books.customer(credit="1")
    revoked, expired = await customer.hold("r1"), await other.hold("r2")
    await books.administration.revoke_key(customer.key.id)
    with pytest.raises(ClaimRefused):
        await namespace_key(books, revoked, read_grant(books, revoked).namespace)
    namespace = read_grant(books, expired).namespace
    books.clock.time_s += 600 + 3_600 + 6
    with pytest.raises(ClaimRefused):
        await namespace_key(books, expired, namespace)


@pytest.fixture
async def bus(nats_url: str, books: Books) -> AsyncIterator[NatsBus]:
    """Billing serves on it, and the test asks on it."""
    connected = await NatsBus.connect(nats_url, SECRETS.cluster_key, "test")
    await handlers.serve(connected, books.statements, books.money)
    yield connected
    await connected.close()


async def hold(bus: NatsBus, customer: Customer, request: str, **change: object) -> HoldReply:
    message = await customer.hold_message(request, **change)
    return await rpc.call(bus, subjects.BILLING_HOLD, message, HoldReply)


async def test_a_request_lives_over_the_bus(books: Books, bus: NatsBus) -> None:
    customer = await books.customer(credit="1")
    authorize = Authorize(key_digest=key_digest(customer.key.key), key_hint=customer.key.hint)
    tag = (await rpc.call(bus, subjects.BILLING_AUTHORIZE, authorize, AuthorizeReply)).tag
    held = await hold(bus, customer, "r1", tag=tag)
    assert held.hold_nano == 210_000
    namespace = read_grant(books, held.grant).namespace
    query = NamespaceKeyQuery(grant=held.grant, namespace=namespace)
    sealed = (await rpc.call(bus, subjects.BILLING_NAMESPACE_KEY, query, NamespaceKeyReply)).sealed_key
    assert sealing.open_sealed(SECRETS.cluster_key, NAMESPACE_KEY_SEAL, sealed) == await namespace_key(
        books, held.grant, namespace
    )
    report = settlement(held.grant, usage())
    settled = [await rpc.call(bus, subjects.BILLING_SETTLE, report, Settled) for _ in range(2)]
    assert settled == [Settled(amount_nano=174_000, currency="USD")] * 2
    released = await hold(bus, customer, "r2", tag=tag)
    await rpc.call(bus, subjects.BILLING_RELEASE, Release(grant=released.grant, reason="cancelled"), Settled)
    balance = await rpc.call(bus, subjects.BILLING_BALANCE, BalanceQuery(tag=tag), BalanceReply)
    assert balance.total_balance == "0.999826"


async def test_refusals_keep_their_class_over_the_bus(books: Books, bus: NatsBus) -> None:
    customer, poor = await books.customer(credit="1"), await books.customer()
    unknown = Authorize(key_digest=os.urandom(32), key_hint="abcd")
    with pytest.raises(AuthenticationFailed, match="abcd is invalid"):
        await rpc.call(bus, subjects.BILLING_AUTHORIZE, unknown, AuthorizeReply)
    with pytest.raises(InsufficientBalance, match=r"^Insufficient Balance$"):
        await hold(bus, poor, "r0")
    with pytest.raises(NotFound):
        await hold(bus, customer, "r0", model="unknown")
    held = await hold(bus, customer, "r1")
    with pytest.raises(Conflict):
        await hold(bus, customer, "r1", prompt_tokens=5)
    with pytest.raises(InvalidRequest):
        await hold(bus, customer, "r2", prompt_tokens=0)
    with pytest.raises(InvalidRequest):
        await rpc.call(bus, subjects.BILLING_SETTLE, settlement(held.grant, usage(output=101)), Settled)
    message = await customer.hold_message("r3")
    books.clock.time_s += 66
    with pytest.raises(ClaimRefused):
        await rpc.call(bus, subjects.BILLING_HOLD, msgspec.structs.replace(message), HoldReply)


async def test_requests_at_once_over_the_bus(books: Books, bus: NatsBus) -> None:
    """With a patience that a busy machine does not use up: this is not about time."""
    customer = await books.customer(credit="1")
    messages = [await customer.hold_message(f"r{number}") for number in range(20)]
    held = await asyncio.gather(
        *(rpc.call(bus, subjects.BILLING_HOLD, message, HoldReply, timeout_s=30) for message in messages)
    )
    reports = [settlement(reply.grant, usage(output=number)) for number, reply in enumerate(held)]
    await asyncio.gather(*(rpc.call(bus, subjects.BILLING_SETTLE, report, Settled, timeout_s=30) for report in reports))
    balances = await customer.balances()
    assert balances["revenue"] == 20 * 150_000 + sum(range(20)) * 600
    assert await books.faults() == {}
