"""What billing's books promise through the classes that answer its subjects: run on Postgres and in memory alike.

A subclass gives the fixture `books`. Every amount is computed by hand: a prompt token costs 150 nano-units as a miss
and 3 as a hit, an output token 600.
"""

from __future__ import annotations

import os

import pytest

from services.billing import sweep
from services.billing.admin_schemas import AccountView, NewAccount, NewCredit
from services.billing.money import Money
from shared.contracts.errors import (
    AuthenticationFailed,
    ClaimRefused,
    Conflict,
    InsufficientBalance,
    InvalidRequest,
    NotFound,
)
from shared.contracts.messages import NAMESPACE_KEY_SEAL, BalanceQuery, Hold, NamespaceKeyQuery
from shared.contracts.tag import GrantClaims, TagClaims
from shared.runtime import sealing, signing
from tests.integration.billing_books import SECRETS, Books, Customer, usage

HOLD = "0.00021"
COST = "0.000174"


def money_of(view: AccountView) -> tuple[str, str, str, str, str]:
    """(granted, topped up, held, spent, uncollected)."""
    return view.granted_balance, view.topped_up_balance, view.held, view.spent, view.uncollected


async def now_has(books: Books, customer: Customer) -> tuple[str, str, str, str, str]:
    return money_of(await books.administration.account(customer.account))


def claims_of(books: Books, grant: str) -> GrantClaims:
    return signing.verify(GrantClaims, grant, SECRETS.verify_key, books.clock.now_s())


class BooksSuite:
    @pytest.fixture
    def books(self) -> Books:
        raise NotImplementedError

    async def test_a_hold_takes_granted_money_first_and_a_settlement_returns_the_rest(self, books: Books) -> None:
        customer = await books.customer(credit="1", grant="0.0001")
        grant = await customer.hold("r1")
        assert await now_has(books, customer) == ("0.00", "0.99989", HOLD, "0.00", "0.00")
        settled = await customer.settle(grant, usage())
        assert (settled.amount_nano, settled.currency) == (174_000, "USD")
        assert await now_has(books, customer) == ("0.00", "0.999926", "0.00", COST, "0.00")

    async def test_a_clock_that_was_set_back_behind_the_first_price_list_still_finds_its_prices(
        self, books: Books
    ) -> None:
        customer = await books.customer(credit="1")
        books.clock.time_s -= 86_400
        grant = await customer.hold("r1")
        assert (await now_has(books, customer))[2] == HOLD
        assert (await customer.settle(grant, usage())).amount_nano == 174_000

    async def test_repeats_change_nothing_and_other_content_is_refused(self, books: Books) -> None:
        customer = await books.customer(credit="1")
        grant = await customer.hold("r1")
        again = await customer.hold("r1")
        assert claims_of(books, again) == claims_of(books, grant)
        with pytest.raises(Conflict):
            await customer.hold("r1", max_output_tokens=99)
        for attempt in (1, 2):
            assert (await customer.settle(grant, usage(), attempt)).amount_nano == 174_000
        with pytest.raises(Conflict):
            await customer.settle(grant, usage(output=41))
        with pytest.raises(Conflict):
            await customer.release(grant)
        with pytest.raises(Conflict):
            await customer.hold("r1")
        assert await now_has(books, customer) == ("0.00", "0.999826", "0.00", COST, "0.00")

    async def test_a_release_gives_everything_back_once(self, books: Books) -> None:
        customer = await books.customer(grant="0.0001", credit="0.0002")
        grant = await customer.hold("r1")
        for _ in range(2):
            assert (await customer.release(grant)).amount_nano == 0
        with pytest.raises(Conflict):
            await customer.settle(grant, usage())
        assert await now_has(books, customer) == ("0.0001", "0.0002", "0.00", "0.00", "0.00")

    async def test_a_balance_that_does_not_cover_a_hold_is_refused(self, books: Books) -> None:
        customer = await books.customer(credit="0.0003")
        await customer.hold("r1")
        with pytest.raises(InsufficientBalance):
            await customer.hold("r2")
        assert await now_has(books, customer) == ("0.00", "0.00009", HOLD, "0.00", "0.00")

    async def test_a_usage_that_its_hold_cannot_have_had_is_refused(self, books: Books) -> None:
        customer = await books.customer(credit="1")
        grant = await customer.hold("r1")
        for wrong in (usage(output=101), usage(uncached=999), usage(cached=2, uncached=999)):
            with pytest.raises(InvalidRequest):
                await customer.settle(grant, wrong)
        assert (await customer.settle(grant, usage(cached=640, uncached=360, output=100))).amount_nano == 115_920

    async def test_a_hold_of_another_signature_or_account_is_nobodys(self, books: Books) -> None:
        one, two = await books.customer(credit="1"), await books.customer(credit="1")
        grant = await one.hold("r1")
        with pytest.raises(AuthenticationFailed):
            await one.settle(grant[:-8] + "AAAAAAAA", usage())
        with pytest.raises(Conflict):
            await two.hold("r1")
        with pytest.raises(NotFound):
            await one.hold("r2", model="nobody-knows-it")

    async def test_an_expired_hold_is_given_back_and_later_usage_is_booked_on_its_own(self, books: Books) -> None:
        customer = await books.customer(credit="0.0003")
        grant = await customer.hold("r1")
        books.clock.time_s += 600 + 3_600 + 4
        assert await self._sweep(books) == 0
        books.clock.time_s += 2
        assert await self._sweep(books) == 1
        assert await self._sweep(books) == 0
        assert await now_has(books, customer) == ("0.00", "0.0003", "0.00", "0.00", "0.00")
        taken = await customer.hold("r2")
        for _ in range(2):
            assert (await customer.settle(grant, usage())).amount_nano == 174_000
        assert await now_has(books, customer) == ("0.00", "0.00", HOLD, COST, "0.000084")
        await customer.release(taken)
        rows = (await books.administration.usage(customer.account, 0, 10)).usage
        assert [(row.request, row.late, row.amount) for row in rows] == [("r1", True, COST)]

    @staticmethod
    async def _sweep(books: Books) -> int:
        money: Money = books.money
        return await sweep.sweep(books.database, money, books.clock)

    async def test_only_topped_up_money_opens_the_pool(self, books: Books) -> None:
        trial, paid = await books.customer(grant="1"), await books.customer(credit="1")
        for customer, is_open in ((trial, False), (paid, True)):
            tag = signing.verify(TagClaims, await customer.tag(), SECRETS.verify_key, books.clock.now_s())
            claims = claims_of(books, await customer.hold(f"r-{customer.account}"))
            assert (tag.paid, tag.cache_read, tag.cache_write) == (is_open,) * 3
            assert (claims.cache_read, claims.cache_write) == (is_open,) * 2
            assert (await books.administration.account(customer.account)).paid is is_open

    async def test_a_revoked_key_gets_neither_tag_nor_hold_but_its_work_is_paid(self, books: Books) -> None:
        customer = await books.customer(credit="1")
        tag = await customer.tag()
        grant = await customer.hold("r1")
        await books.administration.revoke_key(customer.key.id)
        await books.administration.revoke_key(customer.key.id)
        assert [heard.key_id for heard in books.heard] == [customer.key.id] * 2
        with pytest.raises(AuthenticationFailed):
            await customer.tag()
        message = Hold(
            tag=tag,
            request="r2",  # type: ignore[arg-type]
            model="smollm2-135m-instruct",
            user_id=None,
            traffic_class="chat",
            prompt_tokens=1,
            max_output_tokens=1,
            deadline_s=books.clock.now_s() + 600,
        )
        with pytest.raises(AuthenticationFailed):
            await books.money.hold(message)
        assert (await customer.settle(grant, usage())).amount_nano == 174_000

    async def test_the_balance_is_what_can_be_spent_now(self, books: Books) -> None:
        customer = await books.customer(credit="1", grant="0.5")
        await customer.hold("r1")
        reply = await books.statements.balance(BalanceQuery(tag=await customer.tag()))
        assert (reply.total_balance, reply.granted_balance, reply.topped_up_balance) == ("1.49979", "0.49979", "1.00")

    async def test_a_namespace_has_one_key(self, books: Books) -> None:
        customer = await books.customer(credit="1")
        keys = []
        for request in ("r1", "r2"):
            grant = await customer.hold(request)
            query = NamespaceKeyQuery(grant=grant, namespace=claims_of(books, grant).namespace)
            sealed = (await books.statements.namespace_key(query)).sealed_key
            keys.append(sealed)
        opened = {sealing.open_sealed(SECRETS.cluster_key, NAMESPACE_KEY_SEAL, sealed) for sealed in keys}
        assert len(opened) == 1
        other = await books.customer(credit="1")
        foreign = NamespaceKeyQuery(grant=await other.hold("r3"), namespace=claims_of(books, grant).namespace)
        with pytest.raises(ClaimRefused):
            await books.statements.namespace_key(foreign)

    async def test_money_comes_in_once_for_each_idempotency_key(self, books: Books) -> None:
        account = await books.administration.create_account(NewAccount(name="one", credit="1"), "key-1")
        assert await books.administration.create_account(NewAccount(name="one", credit="1.00"), "key-1") == account
        with pytest.raises(Conflict):
            await books.administration.create_account(NewAccount(name="one", credit="2"), "key-1")
        credit = NewCredit(amount="0.25", kind="granted")
        first = await books.administration.credit(account.id, credit, "key-2")
        assert await books.administration.credit(account.id, credit, "key-2") == first
        assert money_of(await books.administration.account(account.id)) == ("0.25", "1.00", "0.00", "0.00", "0.00")

    async def test_what_the_administrator_reads(self, books: Books) -> None:
        customers = [await books.customer(credit="1") for _ in range(3)]
        page = await books.administration.accounts(None, 2)
        assert [view.id for view in page.accounts] == [c.account for c in customers[:2]]
        rest = await books.administration.accounts(page.next, 2)
        assert [view.id for view in rest.accounts] == [customers[2].account]
        customer = customers[0]
        grant = await customer.hold("r1")
        await customer.settle(grant, usage(cached=640, uncached=360))
        entries = (await books.administration.entries(customer.account, 0, 100)).entries
        assert [(e.act, e.debit, e.credit, e.amount) for e in entries] == [
            ("topped_up", "funding", "topped_up", "1.00"),
            ("hold", "topped_up", "held", HOLD),
            ("settle", "held", "revenue", "0.00007992"),
            ("settle", "held", "topped_up", "0.00013008"),
        ]
        keys = (await books.administration.keys(customer.account)).keys
        assert [(key.id, key.revoked) for key in keys] == [(customer.key.id, False)]
        with pytest.raises(NotFound):
            await books.administration.account(f"acct_{os.urandom(16).hex()}")
