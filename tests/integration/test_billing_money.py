"""Holds and their ends on a real Postgres; every amount is computed by hand from DeepSeek's price list."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import msgspec
import pytest

from services.billing import sweep
from services.billing.accounts import moment
from services.billing.admin_schemas import NewCredit
from services.billing.main import open_books as open_books_of
from shared.contracts.errors import (
    AuthenticationFailed,
    ClaimRefused,
    Conflict,
    InsufficientBalance,
    InvalidRequest,
    NotFound,
)
from shared.contracts.messages import Hold
from shared.contracts.tag import GrantClaims
from shared.contracts.usage import Usage
from shared.runtime import signing
from tests.integration.billing_books import MODEL, PRICES, SECRETS, Books, open_books, settlement, usage

pytestmark = pytest.mark.servers

HOLD_NANO = 210_000
COST_NANO = 174_000
ALLOWANCE_S = 600 + 3_600 + 5
"""From the hold to its expiry: deadline, settlement allowance, clock skew."""


@pytest.fixture
async def books(fresh_database: str) -> AsyncIterator[Books]:
    async with open_books(fresh_database) as opened:
        yield opened
        assert await opened.faults() == {}


async def test_a_request_is_held_and_settled_once(books: Books) -> None:
    customer = await books.customer(credit="1", grant="0.0001")
    reply = await books.money.hold(await customer.hold_message("r1"))
    assert reply.hold_nano == HOLD_NANO
    assert await customer.balances() == {
        "funding": -1_000_000_000,
        "grants": -100_000,
        "granted": 0,
        "topped_up": 1_000_000_000 - 110_000,
        "held": HOLD_NANO,
        "revenue": 0,
        "uncollected": 0,
    }
    settled = await customer.settle(reply.grant, usage())
    assert (settled.amount_nano, settled.currency) == (COST_NANO, "USD")
    after = await customer.balances()
    assert (after["granted"], after["topped_up"]) == (0, 1_000_000_000 - 74_000)
    assert (after["held"], after["revenue"]) == (0, COST_NANO)
    assert await customer.entries() == [
        ("topped_up", "funding", "topped_up", 1_000_000_000),
        ("granted", "grants", "granted", 100_000),
        ("hold", "granted", "held", 100_000),
        ("hold", "topped_up", "held", 110_000),
        ("settle", "held", "revenue", COST_NANO),
        ("settle", "held", "topped_up", 36_000),
    ]


async def test_hits_cost_the_hit_price(books: Books) -> None:
    customer = await books.customer(credit="1")
    settled = await customer.settle(await customer.hold("r1"), usage(cached=960, uncached=40, output=10))
    assert settled.amount_nano == 960 * 3 + 40 * 150 + 10 * 600


async def test_a_repeated_hold_gets_the_same_grant_and_holds_once(books: Books) -> None:
    """The second time the balance is empty, and the grant was read back from the database, its times with it."""
    books.clock.time_s += 0.123457
    customer = await books.customer(credit="0.00021")
    message = await customer.hold_message("r1", user_id="u")
    first = await books.money.hold(message)
    books.clock.time_s += 30
    renewed = await customer.hold_message("r1", user_id="u")
    assert await books.money.hold(renewed) == first
    assert (await customer.balances())["held"] == HOLD_NANO
    grant = signing.verify(GrantClaims, first.grant, SECRETS.verify_key, books.clock.now_s())
    assert (grant.request, grant.prompt_tokens, grant.max_output_tokens) == ("r1", 1_000, 100)


@pytest.mark.parametrize(
    "change",
    [{"prompt_tokens": 999}, {"max_output_tokens": 101}, {"user_id": "u"}, {"user_id": ""}, {"traffic_class": "agent"}],
)
async def test_a_hold_with_other_content_is_a_conflict(books: Books, change: dict[str, object]) -> None:
    customer = await books.customer(credit="1")
    await customer.hold("r1")
    with pytest.raises(Conflict):
        await customer.hold("r1", **change)
    assert (await customer.balances())["held"] == HOLD_NANO


async def test_another_account_cannot_take_a_request(books: Books) -> None:
    first, second = await books.customer(credit="1"), await books.customer(credit="1")
    await first.hold("r1")
    with pytest.raises(Conflict):
        await second.hold("r1")
    assert (await second.balances())["held"] == 0


async def test_a_hold_that_ended_is_not_held_again(books: Books) -> None:
    customer = await books.customer(credit="1")
    await customer.release(await customer.hold("r1"))
    with pytest.raises(Conflict, match="released"):
        await customer.hold("r1")


async def test_a_repeated_settlement_is_answered_again_and_takes_nothing(books: Books) -> None:
    customer = await books.customer(credit="1")
    grant = await customer.hold("r1")
    assert (await customer.settle(grant, usage())).amount_nano == COST_NANO
    # The next worker's try after a fail-over: another epoch, the same count.
    assert (await customer.settle(grant, usage(), attempt=2)).amount_nano == COST_NANO
    assert (await customer.balances())["revenue"] == COST_NANO
    for other in (usage(output=41), usage(cached=64, uncached=936)):
        with pytest.raises(Conflict):
            await customer.settle(grant, other)
    with pytest.raises(Conflict):
        await customer.release(grant)


async def test_a_release_gives_everything_back_once(books: Books) -> None:
    customer = await books.customer(credit="1", grant="0.0001")
    before = await customer.balances()
    grant = await customer.hold("r1")
    assert [(await customer.release(grant)).amount_nano for _ in range(2)] == [0, 0]
    assert await customer.balances() == before
    with pytest.raises(Conflict, match="released"):
        await customer.settle(grant, usage())


@pytest.mark.parametrize(
    "impossible",
    [
        usage(uncached=999),
        usage(uncached=1_001),
        usage(output=101),
        Usage(cached=0, uncached=0, not_eligible=2_000, output=0),
    ],
)
async def test_nothing_settles_beyond_its_hold(books: Books, impossible: Usage) -> None:
    customer = await books.customer(credit="1")
    grant = await customer.hold("r1")
    with pytest.raises(InvalidRequest):
        await customer.settle(grant, impossible)
    assert (await customer.balances())["held"] == HOLD_NANO
    assert (await customer.settle(grant, usage(output=100))).amount_nano == HOLD_NANO


async def test_a_trial_cannot_report_hits(books: Books) -> None:
    customer = await books.customer(grant="1")
    grant = await customer.hold("r1")
    with pytest.raises(InvalidRequest):
        await customer.settle(grant, usage(cached=64, uncached=936))
    trial = Usage(cached=0, uncached=0, not_eligible=1_000, output=40)
    assert (await customer.settle(grant, trial)).amount_nano == COST_NANO


async def test_holds_expire_only_after_deadline_and_allowance(books: Books) -> None:
    customer = await books.customer(credit="1")
    grant = await customer.hold("r1")
    books.clock.time_s += ALLOWANCE_S
    assert await sweep.sweep(books.database, books.money, books.clock) == 0
    assert (await customer.settle(grant, usage())).amount_nano == COST_NANO

    await customer.hold("r2")
    books.clock.time_s += ALLOWANCE_S + 1
    assert await sweep.sweep(books.database, books.money, books.clock) == 1
    assert await sweep.sweep(books.database, books.money, books.clock) == 0
    after = await customer.balances()
    assert (after["held"], after["topped_up"]) == (0, 1_000_000_000 - COST_NANO)


async def test_usage_after_expiry_is_an_adjustment_and_not_lost(books: Books) -> None:
    customer = await books.customer(credit="1")
    grant = await customer.hold("r1")
    books.clock.time_s += ALLOWANCE_S + 1
    await sweep.sweep(books.database, books.money, books.clock)
    assert (await customer.release(grant)).amount_nano == 0
    assert [(await customer.settle(grant, usage())).amount_nano for _ in range(2)] == [COST_NANO, COST_NANO]
    with pytest.raises(Conflict):
        await customer.settle(grant, usage(output=1))
    assert (await customer.entries())[-2:] == [
        ("expire", "held", "topped_up", HOLD_NANO),
        ("late_usage", "topped_up", "revenue", COST_NANO),
    ]


async def test_late_usage_that_the_balance_lacks_stands_as_uncollected(books: Books) -> None:
    customer = await books.customer(credit="0.00021", grant="0.000005")
    grant = await customer.hold("r1")
    books.clock.time_s += ALLOWANCE_S + 1
    await sweep.sweep(books.database, books.money, books.clock)
    spent = await customer.hold("r2", prompt_tokens=900, max_output_tokens=50)
    await customer.settle(spent, usage(uncached=900, output=50))
    # 215,000 came in, 165,000 are spent, 174,000 are owed.
    await customer.settle(grant, usage())
    after = await customer.balances()
    assert (after["granted"], after["topped_up"], after["revenue"]) == (0, 0, 165_000 + COST_NANO)
    assert after["uncollected"] == -(COST_NANO - 50_000)


async def test_fifty_holds_at_once_on_money_for_ten_make_exactly_ten(books: Books) -> None:
    customer = await books.customer(credit="0.0021")
    messages = [await customer.hold_message(f"r{number}") for number in range(50)]
    outcomes = await asyncio.gather(*(books.money.hold(message) for message in messages), return_exceptions=True)
    assert Counter(type(outcome).__name__ for outcome in outcomes) == {"HoldReply": 10, "InsufficientBalance": 40}
    balances = await customer.balances()
    assert (balances["topped_up"], balances["held"]) == (0, 10 * HOLD_NANO)


async def test_one_of_all_ends_at_once_wins(books: Books) -> None:
    customer = await books.customer(credit="1")
    for number in range(10):
        grant = await customer.hold(f"r{number}")
        claims = signing.verify(GrantClaims, grant, SECRETS.verify_key, books.clock.now_s())
        outcomes = await asyncio.gather(
            *(books.money.settle(settlement(grant, usage(output=n))) for n in (1, 2, 2)),
            customer.release(grant),
            books.money.expire(claims.hold, claims.account),
            return_exceptions=True,
        )
        ends = await books.rows("SELECT act FROM billing.journal WHERE hold = $1 AND act <> 'hold'", claims.hold)
        acts = sorted(row["act"] for row in ends)
        assert acts in (["settle"], ["release"], ["expire"], ["expire", "late_usage"]), outcomes


async def test_everything_at_once_over_several_accounts_stays_balanced(books: Books) -> None:
    customers = [await books.customer(credit="0.01", grant="0.0005") for _ in range(4)]

    async def live(number: int) -> None:
        customer = customers[number % 4]
        try:
            grant = await customer.hold(f"r{number}")
        except InsufficientBalance:
            return
        if number % 3 == 0:
            await customer.release(grant)
        elif number % 3 == 1:
            await customer.settle(grant, usage(output=number % 100))
        else:
            credit = NewCredit(amount="0.0001", kind="topped_up" if number % 2 else "granted")
            await books.administration.credit(customer.account, credit, f"key-{number}")

    await asyncio.gather(*(live(number) for number in range(120)))
    assert sum([(await customer.balances())["held"] for customer in customers]) == 40 * HOLD_NANO


async def test_books_open_again_while_money_moves(books: Books) -> None:
    """A second process starts: it must neither stop the first one nor be stopped by it."""
    customer = await books.customer(credit="1")

    async def live(number: int) -> None:
        await customer.settle(await customer.hold(f"r{number}"), usage())

    async with asyncio.timeout(30):
        await asyncio.gather(
            *(live(number) for number in range(60)),
            *(open_books_of(books.database, PRICES, moment(books.clock.now_s())) for _ in range(4)),
        )
    assert (await customer.balances())["revenue"] == 60 * COST_NANO


async def test_a_model_without_a_price_is_not_found(books: Books) -> None:
    customer = await books.customer(credit="1")
    with pytest.raises(NotFound):
        await customer.hold("r1", model="unknown")


async def test_a_free_model_is_held_and_settled_for_nothing(books: Books) -> None:
    customer = await books.customer(credit="1")
    free = '[[price]]\nmodel = "free"\ncurrency = "USD"\nhit = "0"\nmiss = "0"\noutput = "0"\n'
    await open_books_of(books.database, free, moment(books.clock.now_s()))
    reply = await books.money.hold(await customer.hold_message("r1", model="free"))
    assert reply.hold_nano == 0
    assert [(await customer.settle(reply.grant, usage())).amount_nano for _ in range(2)] == [0, 0]
    with pytest.raises(Conflict):
        await customer.settle(reply.grant, usage(output=1))
    with pytest.raises(NotFound):
        await customer.hold("r2")
    assert len(await customer.entries()) == 1


async def test_an_account_pays_in_its_currency(books: Books) -> None:
    customer = await books.customer(credit="1", currency="CNY")
    reply = await books.money.hold(await customer.hold_message("r1"))
    assert reply.hold_nano == 1_000 * 1_000 + 100 * 4_000
    settled = await customer.settle(reply.grant, usage(cached=500, uncached=500, output=1))
    assert (settled.amount_nano, settled.currency) == (500 * 20 + 500 * 1_000 + 4_000, "CNY")


async def test_a_hold_keeps_the_prices_that_it_was_placed_at(books: Books) -> None:
    customer = await books.customer(credit="1")
    old = await customer.hold("r1")
    dearer = PRICES.replace('"0.15"', '"0.30"')
    books.clock.time_s += 1
    now = moment(books.clock.now_s())
    assert [await open_books_of(books.database, dearer, now) for _ in range(2)] == [2, 2]
    new = await books.money.hold(await customer.hold_message("r2"))
    assert new.hold_nano == 1_000 * 300 + 100 * 600
    assert (await customer.settle(old, usage())).amount_nano == COST_NANO
    versions = await books.rows("SELECT request, price_version FROM billing.holds ORDER BY request")
    assert [tuple(row) for row in versions] == [("r1", 1), ("r2", 2)]


async def test_an_empty_account_is_told_so_in_deepseeks_words(books: Books) -> None:
    customer = await books.customer()
    with pytest.raises(InsufficientBalance, match=r"^Insufficient Balance$"):
        await customer.hold("r1", prompt_tokens=1, max_output_tokens=1)


async def test_a_revoked_key_holds_nothing_more_and_still_settles(books: Books) -> None:
    customer = await books.customer(credit="1")
    grant, message = await customer.hold("r1"), await customer.hold_message("r2")
    await books.administration.revoke_key(customer.key.id)
    with pytest.raises(AuthenticationFailed, match=rf"\*\*\*\*{customer.key.hint} is invalid"):
        await books.money.hold(message)
    assert (await customer.settle(grant, usage())).amount_nano == COST_NANO


async def test_forged_and_expired_statements_move_no_money(books: Books) -> None:
    customer = await books.customer(credit="1")
    message = await customer.hold_message("r1")
    grant = await customer.hold("r1")
    forged = grant[:-2] + ("AA" if not grant.endswith("AA") else "BB")
    for act in (books.money.settle(settlement(forged, usage())), customer.release(forged)):
        with pytest.raises(AuthenticationFailed):
            await act
    books.clock.time_s += 66
    with pytest.raises(ClaimRefused):
        await books.money.hold(message)
    as_tag = Hold(
        tag=grant,
        request=message.request,
        model=MODEL,
        user_id=None,
        traffic_class="chat",
        prompt_tokens=1,
        max_output_tokens=1,
        deadline_s=books.clock.now_s() + 1,
    )
    with pytest.raises(AuthenticationFailed):
        await books.money.hold(as_tag)


@pytest.mark.parametrize(("device_s", "attempt"), [(-1.0, 1), (float("nan"), 1), (float("inf"), 1), (0.0, 0)])
async def test_reports_that_no_worker_means_are_refused(books: Books, device_s: float, attempt: int) -> None:
    customer = await books.customer(credit="1")
    message = settlement(await customer.hold("r1"), usage(), attempt)
    with pytest.raises(InvalidRequest):
        await books.money.settle(msgspec.structs.replace(message, device_s=device_s))
