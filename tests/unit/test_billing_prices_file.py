"""Price lists as text."""

from __future__ import annotations

from decimal import Decimal
from importlib.resources import files

import pytest

from services.billing import price_list
from shared.contracts.errors import SettingsError

LINE = '[[price]]\nmodel = "m"\ncurrency = "USD"\nhit = "0.003"\nmiss = "0.15"\noutput = "0.60"\n'


def test_the_built_in_list_has_deepseek_flashs_off_peak_prices() -> None:
    """The published list: USD 0.003, 0.15, 0.60; CNY 0.02, 1, 4 per million tokens."""
    prices = price_list.parse(files("services.billing").joinpath("prices.toml").read_text(), 1)
    usd, cny = (prices["smollm2-135m-instruct", currency] for currency in ("USD", "CNY"))
    assert (usd.hit, usd.miss, usd.output) == (Decimal("0.003"), Decimal("0.15"), Decimal("0.6"))
    assert (cny.hit, cny.miss, cny.output) == (Decimal("0.02"), Decimal(1), Decimal(4))


def test_a_list_is_the_same_by_its_content() -> None:
    one, other = price_list.parse(LINE, 1), price_list.parse(LINE.replace("0.60", "0.600"), 7)
    assert price_list.same(one, other)
    assert not price_list.same(one, price_list.parse(LINE.replace("0.60", "0.61"), 1))
    assert not price_list.same(one, price_list.parse(LINE + LINE.replace('"m"', '"n"'), 1))


@pytest.mark.parametrize(
    "text",
    [
        *("", "price = 1", "[[price]\n", "[[price]]\nmodel = 'm'\n"),
        LINE.replace('"0.15"', "0.15"),
        LINE.replace("0.15", "-0.15"),
        LINE.replace("0.15", "0.0000000001"),
        LINE.replace("0.003", "0.2"),
        LINE.replace("USD", "EUR"),
        LINE.replace("0.60", "9999999"),
        LINE + LINE,
        LINE + 'peak = "1"\n',
    ],
)
def test_a_list_that_cannot_be_meant_stops_the_start(text: str) -> None:
    with pytest.raises(SettingsError, match="price list"):
        price_list.parse(text, 1)
