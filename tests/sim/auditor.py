"""The auditor: sees what clients asked and saw, and at the end what the books say; keeps books of its own.

It knows the one right answer to every prompt (oracle.py), which prefixes a namespace may have in the pool, and what
each request may cost. It never looks into a service. `faults` are sentences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tests.sim import oracle
from tests.sim.plan import Plan
from tests.sim.workload import Exchange

BLOCK: Final = 16
CONTEXT: Final = 2_048
PRICES: Final = ("0.003", "0.15", "0.60")
NEW_PRICES: Final = ("0.003", "0.15", "0.90")
REVOKED_SOON_S: Final = 1.0
DEADLINE_SLACK_S: Final = 15.0
ALLOWED: Final = (200, 401, 402, 429, 503)
SETTLED_SOON_S: Final = 3.0
"""After this long a next turn finds the last one's blocks in the pool, when nothing is wrong."""


@dataclass(frozen=True)
class UsageRow:
    """What the books say of one request."""

    request: str
    account: int
    prompt: int
    cached: int
    uncached: int
    not_eligible: int
    output: int
    amount_nano: int
    late: bool


@dataclass(frozen=True)
class Balance:
    """What the books say of one account, in nano-units; `put_in`: what the auditor knows to have come in."""

    put_in_nano: int
    spendable_nano: int
    held_nano: int
    spent_nano: int
    uncollected_nano: int


class Auditor:
    """`deadline_s`: of each request. `lossy`: work may have been lost for good, with the gateway that knew of it."""

    def __init__(self, plan: Plan, deadline_s: float) -> None:
        self.faults: list[str] = []
        self.revoked_at_s: dict[int, float] = {}
        """When the operator revoked an account's key."""
        self._plan = plan
        self._deadline_s = deadline_s
        kinds = {trouble.kind for trouble in plan.troubles}
        self._lossy = plan.lossy or bool(
            kinds & {"broker_crash", "crash", "work_loss", "drain", "cut_off", "pause", "broker_down"}
        )
        self._quiet = kinds <= {"revoke"} and not plan.lossy
        """Nothing keeps messages from arriving."""
        self._gateway_dies = any(t.kind in ("crash", "drain") and t.process == "gateway-1" for t in plan.troubles)
        """A dead gateway's final count may be lost with it: then what it had acknowledged is paid."""
        self._prices = (PRICES, NEW_PRICES) if "new_prices" in kinds else (PRICES,)

    def _say(self, exchange: Exchange, what: str) -> None:
        self.faults.append(f"exchange {exchange.number} ({exchange.request}): {what}")

    # -- answers -----------------------------------------------------------------------------------------------------

    def check_answers(self, exchanges: Sequence[Exchange]) -> None:
        for exchange in exchanges:
            for fault in exchange.faults:
                self._say(exchange, fault)
            self._check_end(exchange)
            self._check_tokens(exchange)
            self._check_hits(exchange, exchanges)

    def _check_end(self, exchange: Exchange) -> None:
        kind = self._plan.accounts[exchange.account]
        took_s = exchange.ended_at_s - exchange.asked_at_s
        if exchange.ended in ("stuck", "open") or took_s > self._deadline_s + DEADLINE_SLACK_S:
            self._say(exchange, f"took {took_s:.1f} s and is {exchange.ended}")
        if exchange.status is not None and exchange.status not in ALLOWED:
            self._say(exchange, f"status {exchange.status}: {exchange.error}")
        if exchange.ended == "whole" and kind in ("empty", "stranger"):
            self._say(exchange, f"an account that is {kind} was answered")
        refused = {"empty": 402, "stranger": 401}.get(kind)
        if refused and self._plan.calm and exchange.ended == "error" and exchange.status != refused:
            self._say(exchange, f"an account that is {kind} got status {exchange.status}")
        revoked_at_s = self.revoked_at_s.get(exchange.account)
        if revoked_at_s is not None and exchange.asked_at_s > revoked_at_s + REVOKED_SOON_S and self._quiet:  # noqa: SIM102
            if exchange.ended == "whole" or (exchange.ended == "error" and exchange.status != 401):
                self._say(exchange, f"its key was revoked, but it ended as {exchange.ended} {exchange.status}")
        if self._plan.calm and kind in ("paid", "trial") and exchange.ended not in ("whole", "left"):
            self._say(exchange, f"nothing was wrong, but it ended as {exchange.ended}: {exchange.error}")

    def _check_tokens(self, exchange: Exchange) -> None:
        limit = min(exchange.turn.max_tokens, CONTEXT - len(exchange.prompt))
        tokens = self._answer(exchange, limit)
        stop_at = _stop_at(tokens, exchange.turn.stop)
        right = _shown(tokens[: limit if stop_at is None else stop_at])
        if stop_at is not None:
            right = right[: right.index(exchange.turn.stop or "")]
        if not right.startswith(exchange.text):
            self._say(exchange, f"said {exchange.text!r}, right is {right!r}")
        if exchange.ended != "whole":
            return
        if not exchange.done or exchange.usage is None:
            self._say(exchange, "ended without its usage")
            return
        count = exchange.usage["completion_tokens"]
        if exchange.finish in ("length", "stop"):
            wanted = ("length", limit) if stop_at is None else ("stop", stop_at)
            if (exchange.finish, count) != wanted or exchange.text != right:
                self._say(exchange, f"ended by {exchange.finish} after {count} with {exchange.text!r}, not {wanted}")
        elif exchange.finish != "insufficient_system_resource" or self._plan.calm:
            self._say(exchange, f"ended by {exchange.finish}")
        elif exchange.text != _shown(tokens[:count]):
            self._say(exchange, f"{count} tokens are not {exchange.text!r}")

    def _answer(self, exchange: Exchange, count: int) -> list[int]:
        turn = exchange.turn
        return oracle.answer(exchange.prompt, count, temperature=turn.temperature, seed=turn.seed or 0)

    def _check_hits(self, exchange: Exchange, exchanges: Sequence[Exchange]) -> None:
        """Usage adds up; a hit is whole blocks of a prefix that its own namespace asked for or was answered before."""
        usage = exchange.usage
        if usage is None:
            return
        prompt, hits = len(exchange.prompt), usage["prompt_cache_hit_tokens"]
        sums = (
            usage["prompt_tokens"] == prompt,
            usage["prompt_cache_miss_tokens"] == prompt - hits,
            usage["prompt_tokens_details"]["cached_tokens"] == hits,
            usage["total_tokens"] == prompt + usage["completion_tokens"],
        )
        if not all(sums):
            self._say(exchange, f"a usage that does not add up for {prompt} tokens: {usage}")
        if hits % BLOCK or not 0 <= hits < prompt or (hits and self._plan.accounts[exchange.account] != "paid"):
            self._say(exchange, f"{hits} hits of {prompt}")
        possible = [self._shared(exchange, other) for other in exchanges if _may_hit(exchange, other)]
        if hits > max(possible, default=0):
            self._say(exchange, f"{hits} hits, but at most {max(possible, default=0)} were ever there")
        lasting = self._plan.retention_s > 1_000
        if self._plan.calm and lasting and self._plan.accounts[exchange.account] == "paid":
            sure = [
                self._shared(exchange, other, sure=True)
                for other in exchanges
                if _may_hit(exchange, other)
                and other.ended == "whole"
                and other.ended_at_s + SETTLED_SOON_S < exchange.asked_at_s
            ]
            if hits < max(sure, default=0):
                self._say(exchange, f"{hits} hits, though {max(sure)} were there")

    def _shared(self, exchange: Exchange, other: Exchange, *, sure: bool = False) -> int:
        """Tokens of the other's sequence in whole blocks that this prompt begins with, all but its last token. `sure`:
        of the other's prompt alone."""
        known = other.prompt if sure else [*other.prompt, *self._answer(other, other.turn.max_tokens)]
        common = 0
        for mine, theirs in zip(exchange.prompt, known, strict=False):
            if mine != theirs:
                break
            common += 1
        return min(common, len(exchange.prompt) - 1) // BLOCK * BLOCK

    # -- books -------------------------------------------------------------------------------------------------------

    def check_books(self, exchanges: Sequence[Exchange], rows: Sequence[UsageRow], balances: Sequence[Balance]) -> None:
        """When everything is over: every request was counted once and for what it was; the balances follow."""
        by_request: dict[str, UsageRow] = {}
        for row in rows:
            if row.request in by_request:
                self.faults.append(f"request {row.request} was counted twice")
            by_request[row.request] = row
            self._check_row(row)
        for exchange in exchanges:
            if exchange.request is not None:
                self._check_counted(exchange, by_request.pop(exchange.request, None))
        unknown = sum(1 for exchange in exchanges if exchange.request is None and exchange.ended in ("lost", "left"))
        if len(by_request) > unknown:
            self.faults.append(f"{len(by_request)} requests were counted that nobody knows: {sorted(by_request)}")
        for account, balance in enumerate(balances):
            self._check_balance(account, balance, sum(row.amount_nano for row in rows if row.account == account))

    def _check_row(self, row: UsageRow) -> None:
        misses = row.uncached + row.not_eligible
        costs = [oracle.cost_nano(row.cached, misses, row.output, prices) for prices in self._prices]
        if row.amount_nano not in costs:
            self.faults.append(f"request {row.request} cost {row.amount_nano} and not {costs}: {row}")
        if row.cached + row.uncached + row.not_eligible != row.prompt:
            self.faults.append(f"request {row.request}: classes that do not sum to the prompt: {row}")
        paid = self._plan.accounts[row.account] == "paid"
        if (row.not_eligible if paid else row.cached + row.uncached) > 0:
            self.faults.append(f"request {row.request}: classes of another kind of account: {row}")

    def _check_counted(self, exchange: Exchange, row: UsageRow | None) -> None:
        if row is None:
            if exchange.ended == "whole" and not self._lossy:
                self._say(exchange, "was answered and never counted")
            return
        if row.account != exchange.account or row.prompt != len(exchange.prompt):
            self._say(exchange, f"was counted as another: {row}")
        if exchange.ended == "whole" and exchange.usage is not None:
            told = (exchange.usage["prompt_cache_hit_tokens"], exchange.usage["completion_tokens"])
            fewer = self._gateway_dies and row.cached == told[0] and row.output < told[1]
            if (row.cached, row.output) != told and not fewer:
                self._say(exchange, f"was told (hits, output) {told} and counted {row}")
        elif exchange.status not in (200, None) and row.output:
            self._say(exchange, f"got status {exchange.status} and paid for output: {row}")
        elif row.output > exchange.turn.max_tokens:
            self._say(exchange, f"paid for more than it could get: {row}")
        elif exchange.ended == "left" and len(exchange.text) > row.output:
            self._say(exchange, f"saw {len(exchange.text)} characters and paid for fewer: {row}")

    def _check_balance(self, account: int, balance: Balance, spent_nano: int) -> None:
        if balance.held_nano:
            self.faults.append(f"account {account}: {balance.held_nano} nano are held for ever")
        if balance.spent_nano != spent_nano:
            self.faults.append(f"account {account} spent {balance.spent_nano} nano, its requests cost {spent_nano}")
        left = balance.put_in_nano - spent_nano + balance.uncollected_nano
        if balance.spendable_nano != left or balance.uncollected_nano < 0:
            self.faults.append(f"account {account} has {balance.spendable_nano} nano and not {left}")


def _shown(tokens: Sequence[int]) -> str:
    """An answer's text as the API gives it: without the newlines that it begins with."""
    return oracle.text_of(tokens).lstrip("\n")


def _may_hit(exchange: Exchange, other: Exchange) -> bool:
    """Whether the pool may have this exchange's prefix from the other one: same namespace, begun before."""
    return (
        other is not exchange
        and (other.account, other.user) == (exchange.account, exchange.user)
        and other.asked_at_s <= exchange.ended_at_s
    )


def _stop_at(tokens: Sequence[int], stop: str | None) -> int | None:
    """The count at which the stop string is complete."""
    if stop is None:
        return None
    for count in range(1, len(tokens) + 1):
        if stop in oracle.text_of(tokens[count - 1 : count]):
            return count
    return None
