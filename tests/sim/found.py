"""Bugs that simulations found, each as the smallest plan that showed it, with the seed that found it first.

They stay: a plan here must be clean for ever once its bug is gone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from tests.sim.plan import Client, Plan, Trouble, Turn
from tests.sim.sweeps import departure

_TURN: Final = Turn(text="go on", pause_s=0.0, max_tokens=30, retries=0)
_ONE: Final = Plan(
    seed=1,
    accounts=("paid",),
    clients=(Client(account=0, begins_s=1.0, system="you are a cat " * 12, turns=(_TURN,)),),
    rows_per_s=150.0,
)
"""One request: its prompt is read from 1.0 s to about 2.35 s, its answer said until about 2.6 s."""


def _one(*troubles: Trouble, turn: Turn = _TURN) -> Plan:
    client = replace(_ONE.clients[0], turns=(turn,))
    return replace(_ONE, clients=(client,), troubles=troubles)


@dataclass(frozen=True)
class Found:
    """`seed`: that showed it first. `says`: what went wrong then."""

    name: str
    seed: int
    says: str
    plan: Plan


FOUND: Final = (
    Found(
        "client_leaves_while_the_tail_is_stored",
        2484,
        "A write that is under way when the request ends is not among what is deleted: a handoff object is left.",
        departure(0.256),
    ),
    Found(
        "bus_away_for_longer_than_a_lease",
        0,
        "NATS is away for 9 s: the worker takes the living gateway for lost and settles nothing; the answer is given.",
        _one(Trouble(kind="broker_down", at_s=2.45, for_s=9.0)),
    ),
    Found(
        "gateway_cut_off_for_longer_than_a_lease",
        24,
        "As before, with the gateway alone cut off.",
        _one(Trouble(kind="cut_off", at_s=2.45, for_s=9.0, process="gateway-1")),
    ),
    Found(
        "gateway_stands_still_after_the_last_token",
        437,
        "The worker's question finds the gateway alive, without the last tokens: it settles what was acknowledged.",
        _one(Trouble(kind="pause", at_s=1.3, for_s=7.2, process="gateway-1"), turn=replace(_TURN, max_tokens=1)),
    ),
    Found(
        "worker_stands_still_and_settles_an_old_try",
        70,
        "A worker that slept through its lease takes its gateway for lost, and settles under an old epoch.",
        _one(
            Trouble(kind="pause", at_s=1.3, for_s=16.0, process="prefill-1"),
            Trouble(kind="cut_off", at_s=1.4, for_s=19.0, process="billing"),
        ),
    ),
    Found(
        "billing_clock_stepped_back_before_its_price_list",
        174,
        "The newest price list is not valid yet for a clock that was set back: 404 for every request.",
        _one(Trouble(kind="clock_step", at_s=0.5, for_s=10.0, process="billing", amount=-30.0)),
    ),
    Found(
        "revoked_in_the_middle",
        75,
        "A whole answer that ends in 401 is billed for a token that nobody got.",
        _one(Trouble(kind="revoke", at_s=1.5, amount=0.0), turn=replace(_TURN, stream=False)),
    ),
)
