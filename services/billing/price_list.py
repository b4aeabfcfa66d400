"""Price lists as text: TOML, one `[[price]]` for each model and currency, prices as decimal strings. Pure."""

from __future__ import annotations

import tomllib
from decimal import Decimal
from typing import Annotated, Final, Literal

import msgspec

from services.billing.pricing import Prices
from shared.contracts import limits
from shared.contracts.errors import SettingsError

_PRICE: Final = r"^[0-9]{1,7}(\.[0-9]{1,9})?$"
Price = Annotated[str, msgspec.Meta(pattern=_PRICE)]


class PriceLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prices are strings: a TOML float would not be the number that was written."""

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
    currency: Literal["USD", "CNY"]
    hit: Price
    miss: Price
    output: Price


class PriceFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    price: Annotated[list[PriceLine], msgspec.Meta(min_length=1, max_length=limits.PRICE_LINES_MAX)]


def parse(text: str, version: int) -> dict[tuple[str, str], Prices]:
    """(model, currency) → prices, all of the given version. Raises SettingsError that says what is wrong."""
    try:
        lines = msgspec.convert(tomllib.loads(text), PriceFile).price
        prices: dict[tuple[str, str], Prices] = {(line.model, line.currency): _prices(line, version) for line in lines}
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, ValueError) as error:
        raise SettingsError(f"price list: {error}") from error
    if len(prices) < len(lines):
        raise SettingsError("price list: a model is listed twice in one currency")
    return prices


def _prices(line: PriceLine, version: int) -> Prices:
    return Prices(
        version=version,
        model=line.model,
        currency=line.currency,
        hit=Decimal(line.hit),
        miss=Decimal(line.miss),
        output=Decimal(line.output),
    )


def same(one: dict[tuple[str, str], Prices], other: dict[tuple[str, str], Prices]) -> bool:
    """Whether both lists say the same, whatever their versions."""
    return _content(one) == _content(other)


def _content(prices: dict[tuple[str, str], Prices]) -> dict[tuple[str, str], tuple[Decimal, Decimal, Decimal]]:
    return {key: (line.hit, line.miss, line.output) for key, line in prices.items()}
