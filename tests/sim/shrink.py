"""Makes a failing plan smaller while it still fails in the same way: fewer troubles, clients, turns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

from tests.sim.plan import Plan
from tests.sim.simulation import Verdict, simulate

RUNS_MAX: Final = 200
_ACCIDENTAL: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}|'[^']*'|\d+(\.\d+)?|\([^)]*\)")


def kind_of(fault: str) -> str:
    """A fault without its numbers and names: two faults of one kind are likely one bug."""
    return re.sub(r"\s+", " ", _ACCIDENTAL.sub("", fault))[:60]


def shrink(verdict: Verdict, run: Callable[[Plan], Verdict] = simulate) -> Verdict:
    """The verdict of the smallest plan found that has a fault of the same kind as the given verdict's first."""
    wanted = kind_of(verdict.faults[0])
    smallest, runs = verdict, 0
    progress = True
    while progress:
        progress = False
        for plan in _smaller(smallest.plan):
            if runs >= RUNS_MAX:
                return smallest
            runs += 1
            found = run(plan)
            if any(kind_of(fault) == wanted for fault in found.faults):
                smallest, progress = found, True
                break
    return smallest


def _smaller(plan: Plan) -> Iterator[Plan]:
    for index in range(len(plan.troubles)):
        yield plan.without_trouble(index)
    if len(plan.clients) > 1:
        for index in range(len(plan.clients)):
            yield plan.without_client(index)
    for index, client in enumerate(plan.clients):
        if len(client.turns) > 1:
            yield plan.without_last_turn(index)
