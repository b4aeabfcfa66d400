"""Amounts computed by hand from DeepSeek's price list, the rounding rule, decimal text."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.billing.pricing import Prices, cost_nano, format_amount, hold_nano, parse_amount
from shared.contracts.errors import InvalidRequest
from shared.contracts.usage import Usage

FLASH = Prices(version=1, model="m", currency="USD", hit=Decimal("0.003"), miss=Decimal("0.15"), output=Decimal("0.60"))


def usage(cached: int = 0, uncached: int = 0, not_eligible: int = 0, output: int = 0, reasoning: int = 0) -> Usage:
    return Usage(cached=cached, uncached=uncached, not_eligible=not_eligible, output=output, reasoning=reasoning)


def test_a_token_of_flash_costs_3_150_and_600_nano() -> None:
    assert cost_nano(FLASH, usage(cached=1)) == 3
    assert cost_nano(FLASH, usage(uncached=1)) == 150
    assert cost_nano(FLASH, usage(not_eligible=1)) == 150
    assert cost_nano(FLASH, usage(output=1)) == 600


def test_reasoning_is_output_and_not_paid_twice() -> None:
    assert cost_nano(FLASH, usage(output=100, reasoning=40)) == 60_000


def test_a_million_tokens_cost_the_listed_price() -> None:
    million = 1_000_000
    assert cost_nano(FLASH, usage(cached=million)) == 3_000_000  # 0.003 USD
    assert cost_nano(FLASH, usage(uncached=million)) == 150_000_000  # 0.15 USD
    assert cost_nano(FLASH, usage(output=million)) == 600_000_000  # 0.60 USD


def test_a_conversation_turn() -> None:
    # 2,944 hit × 3 + 57 miss × 150 + 70 output × 600 = 8,832 + 8,550 + 42,000
    assert cost_nano(FLASH, usage(cached=2_944, uncached=57, output=70)) == 59_382
    # The hold knows no hit: 3,001 × 150 + 4,096 × 600
    assert hold_nano(FLASH, 3_001, 4_096) == 450_150 + 2_457_600


@pytest.mark.parametrize(
    ("price", "tokens", "settled", "held"),
    [
        # price per million, in thousandths = nano a token: 0.0005 → half a nano-unit a token.
        ("0.0005", 1, 0, 1),  # 0.5 → 0 (even), held 1
        ("0.0005", 3, 2, 2),  # 1.5 → 2 (even), held 2
        ("0.0005", 5, 2, 3),  # 2.5 → 2 (even), held 3
        ("0.0004", 1, 0, 1),  # 0.4
        ("0.0006", 1, 1, 1),  # 0.6
        ("0.0005", 4, 2, 2),  # exact
    ],
)
def test_rounding_is_half_even_for_the_cost_and_up_for_the_hold(
    price: str, tokens: int, settled: int, held: int
) -> None:
    prices = replace(FLASH, hit=Decimal(0), miss=Decimal(price), output=Decimal(0))
    assert cost_nano(prices, usage(uncached=tokens)) == settled
    assert hold_nano(prices, tokens, 0) == held


def test_the_total_is_rounded_once_and_not_each_class() -> None:
    """0.5 + 0.5 + 0.5 nano-units: 1.5 rounds to 2; class by class it would be 0."""
    half = replace(FLASH, hit=Decimal("0.0005"), miss=Decimal("0.0005"), output=Decimal("0.0005"))
    assert cost_nano(half, usage(cached=1, uncached=1, output=1)) == 2


prices_strategy = st.decimals(min_value=0, max_value=100, places=9)
counts = st.integers(0, 2_000_000)


@given(
    low=prices_strategy, high=prices_strategy, output=prices_strategy, u=st.tuples(counts, counts, counts), out=counts
)
def test_a_covered_usage_never_costs_more_than_its_hold(
    low: Decimal, high: Decimal, output: Decimal, u: tuple[int, int, int], out: int
) -> None:
    prices = replace(FLASH, hit=min(low, high), miss=max(low, high), output=output)
    assert cost_nano(prices, usage(*u, output=out)) <= hold_nano(prices, sum(u), out)


@pytest.mark.parametrize(
    "change",
    [{"hit": Decimal("0.16")}, {"output": Decimal("-1")}, {"miss": Decimal("NaN")}, {"output": Decimal("1e7")}],
)
def test_impossible_prices_are_refused(change: dict[str, Decimal]) -> None:
    with pytest.raises(ValueError):
        replace(FLASH, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "nano"),
    [
        ("10", 10_000_000_000),
        ("0.5", 500_000_000),
        ("0.000000001", 1),
        ("1000000000", 10**18),
        ("007.10", 7_100_000_000),
    ],
)
def test_amounts_are_read_exactly(text: str, nano: int) -> None:
    assert parse_amount(text) == nano


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "0.0", "-1", "+1", "1.", ".5", " 1", "1 ", "1e3", "NaN", "Infinity", "1_000", "1,5", "٣", "0x10"),
        *("0.0000000001", "1000000000.000000001", "9" * 30),
    ],
)
def test_amounts_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_amount(text)


@pytest.mark.parametrize(
    ("nano", "text"),
    [
        (0, "0.00"),
        (10_000_000_000, "10.00"),
        (10_500_000_000, "10.50"),
        (9_999_940_618, "9.999940618"),
        (1, "0.000000001"),
        (999_999_999, "0.999999999"),
        (-1_250_000_000, "-1.25"),
        (10**18, "1000000000.00"),
    ],
)
def test_amounts_are_shown_exactly_with_at_least_two_decimals(nano: int, text: str) -> None:
    assert format_amount(nano) == text


@given(st.integers(1, 10**18))
def test_text_of_an_amount_reads_back(nano: int) -> None:
    assert parse_amount(format_amount(nano)) == nano
