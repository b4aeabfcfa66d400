"""Prices to amounts. Pure; the only place where money is rounded or turned into text.

A price is a decimal number of currency units per million tokens, an amount an integer of nano-units (10⁻⁹ units).
The rounding rule is "once per request": the exact decimal total of all classes is rounded once, a settlement to the
nearest nano-unit with ties to even (ROUND_HALF_EVEN), a hold up (ROUND_CEILING). A usage that its hold covers token by
token therefore never costs more than the hold (invariant 1), which rounding class by class would not give.
Prices with at most three decimals need no rounding at all: a thousandth per million tokens is one nano-unit a token.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Context, Decimal
from typing import Final

from shared.contracts import limits
from shared.contracts.errors import InvalidRequest
from shared.contracts.usage import Usage

TOKENS_PER_PRICE: Final = 1_000_000
_NANO_PER_TOKEN: Final = Decimal(limits.NANO) / TOKENS_PER_PRICE
"""Nano-units of one token at a price of 1."""
_EXACT: Final = Context(prec=60)
"""Wider than any product here, so that nothing is rounded before the one rounding that has a name."""
AMOUNT_DECIMALS: Final = 9
_AMOUNT: Final = re.compile(r"[0-9]{1,10}(\.[0-9]{1,9})?")


@dataclass(frozen=True)
class Prices:
    """One model's line of a price list, in units of `currency` per million tokens. `hit` is at most `miss`."""

    version: int
    model: str
    currency: str
    hit: Decimal
    miss: Decimal
    output: Decimal

    def __post_init__(self) -> None:
        for price in (self.hit, self.miss, self.output):
            if not (price.is_finite() and 0 <= price <= limits.PRICE_MAX):
                raise ValueError(f"price {price} of {self.model} outside 0 to {limits.PRICE_MAX}")
        if self.hit > self.miss:
            raise ValueError(f"{self.model}: a hit costs {self.hit}, more than a miss at {self.miss}")


def hold_nano(prices: Prices, prompt_tokens: int, max_output_tokens: int) -> int:
    """What covers the request at its worst: every prompt token a miss, every allowed token emitted. Rounded up."""
    return _round(_total(prices, 0, prompt_tokens, max_output_tokens), ROUND_CEILING)


def cost_nano(prices: Prices, usage: Usage) -> int:
    """What the request costs: hits at the hit price, the rest of the prompt at the miss price, also when the pool was
    closed for it. Reasoning is output. Rounded to nearest, ties to even."""
    return _round(_total(prices, usage.cached, usage.uncached + usage.not_eligible, usage.output), ROUND_HALF_EVEN)


def _total(prices: Prices, hits: int, misses: int, output: int) -> Decimal:
    """Exact, in nano-units."""
    total = Decimal(0)
    for tokens, price in ((hits, prices.hit), (misses, prices.miss), (output, prices.output)):
        total = _EXACT.add(total, _EXACT.multiply(_EXACT.multiply(price, _NANO_PER_TOKEN), Decimal(tokens)))
    return total


def _round(total_nano: Decimal, rounding: str) -> int:
    return int(total_nano.to_integral_value(rounding=rounding))


def parse_amount(text: str) -> int:
    """Nano-units of a positive decimal such as "10" or "0.5". Raises InvalidRequest; never rounds."""
    if not _AMOUNT.fullmatch(text):
        raise InvalidRequest(f"an amount is a plain decimal with at most {AMOUNT_DECIMALS} decimals, not {text[:40]!r}")
    units, _, decimals = text.partition(".")
    amount_nano = int(units) * limits.NANO + int(decimals.ljust(AMOUNT_DECIMALS, "0"))
    if not 0 < amount_nano <= limits.AMOUNT_NANO_MAX:
        raise InvalidRequest(
            f"an amount is more than 0 and at most {limits.AMOUNT_NANO_MAX // limits.NANO}, not {text}"
        )
    return amount_nano


def format_amount(amount_nano: int) -> str:
    """The exact decimal text: at least two decimals, and no more than the amount needs ("10.00", "9.99985")."""
    sign = "-" if amount_nano < 0 else ""
    units, rest = divmod(abs(amount_nano), limits.NANO)
    decimals = f"{rest:0{AMOUNT_DECIMALS}d}".rstrip("0").ljust(2, "0")
    return f"{sign}{units}.{decimals}"
