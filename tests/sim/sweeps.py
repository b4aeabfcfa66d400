"""Sweeps over one small scenario: each process crashed at each of its steps, each message lost, each call failed.

Where seeds draw at random, a sweep leaves nothing out. A conversation of two turns of a paying account, and one request
of a trial, begin at `BEGINS_S`; whatever is swept happens after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from shared.contracts.errors import Overloaded
from tests.fakes.wire import RoughWire
from tests.sim.plan import Client, Plan, Trouble, Turn
from tests.sim.simulation import Verdict, simulate
from tests.sim.world import World

BEGINS_S: Final = 1.0
OVER_S: Final = 60.0
"""By then everything of the scenario has ended; only sweepers call."""
_TURN: Final = Turn(text="tell me more of it", pause_s=0.2, max_tokens=12)
SCENARIO: Final = Plan(
    seed=1,
    accounts=("paid", "trial"),
    clients=(
        Client(
            account=0, begins_s=BEGINS_S, system="you are a cat on a mat", turns=(_TURN, replace(_TURN, max_tokens=3))
        ),
        Client(account=1, begins_s=BEGINS_S, system="you are a dog", turns=(replace(_TURN, stream=False),)),
    ),
    rows_per_s=400.0,
)


def crashes(process: str, stride: int = 1, steps_max: int = 2_000) -> Iterator[Verdict]:
    """The process dies at its step `n` after the beginning, for each n until the scenario is over before it."""
    for steps in range(0, steps_max, stride):
        trouble = Trouble(kind="crash", at_s=BEGINS_S - 0.01, process=process, steps=steps)
        verdict = simulate(replace(SCENARIO, troubles=(trouble,)))
        yield verdict
        if f"trouble        died process={process}.1" not in verdict.timeline or _died_idle(verdict, process):
            return


def _died_idle(verdict: Verdict, process: str) -> bool:
    """Whether the process had to be killed for want of steps, or died after every answer had come."""
    lines = verdict.timeline.splitlines()
    died = next(i for i, line in enumerate(lines) if f"died process={process}.1" in line)
    return not any(" client " in line for line in lines[died:])


def departures(step_s: float, until_s: float = 1.5) -> Iterator[tuple[float, Verdict]]:
    """The client hangs up after each length of time; nothing else is wrong, so nothing may be left behind."""
    for number in range(int(until_s / step_s)):
        yield number * step_s, simulate(departure(number * step_s))


def departure(after_s: float) -> Plan:
    """The client hangs up `after_s` after it asked."""
    turn = replace(_TURN, leave_after_s=after_s, max_tokens=40)
    return replace(SCENARIO, clients=(replace(SCENARIO.clients[0], turns=(turn,)),), delay_s=0.004)


class LoseNth(RoughWire):
    """Loses leg number `number` (from 1) of the given kinds, after the beginning."""

    number = 0
    kinds: Sequence[str] = ()
    seen = 0
    lost: str | None = None
    now_s: Callable[[], float] = staticmethod(lambda: 0.0)

    def legs(self, kind: str, subject: str) -> Sequence[float]:
        legs = super().legs(kind, subject)
        if kind not in self.kinds or subject.startswith("heartbeat") or self.now_s() < BEGINS_S:
            return legs
        self.seen += 1
        if self.seen == self.number:
            self.lost = f"{kind} {subject}"
            return ()
        return legs


def losses(kinds: Sequence[str], stride: int = 1, number_max: int = 5_000) -> Iterator[tuple[str, Verdict]]:
    """Each message of these kinds is lost once, alone; with what was lost."""
    for number in range(1, number_max, stride):
        wires: list[LoseNth] = []

        def prepare(world: World, number: int = number, wires: list[LoseNth] = wires) -> None:
            wire = LoseNth(str(SCENARIO.seed), delay_s=SCENARIO.delay_s)
            wire.number, wire.kinds, wire.now_s = number, kinds, world.loop.time
            world.rewire(wire)
            wires.append(wire)

        verdict = simulate(replace(SCENARIO, lossy=True), prepare)
        if wires[0].lost is None:
            return
        yield wires[0].lost, verdict


def failures(server: str, stride: int = 1, number_max: int = 2_000) -> Iterator[tuple[str, Verdict]]:
    """Each call of `ledger` or `index` fails once, alone, before it had any effect."""
    for number in range(1, number_max, stride):
        failed: list[str] = []

        def prepare(world: World, number: int = number, failed: list[str] = failed) -> None:
            calls = 0

            def fail(name: str) -> Exception | None:
                nonlocal calls
                if not BEGINS_S <= world.loop.time() < OVER_S:
                    return None
                calls += 1
                if calls != number:
                    return None
                failed.append(f"{server} {name}")
                return Overloaded("the database does not answer")

            (world.ledger_server if server == "ledger" else world.index_server).failure = fail

        verdict = simulate(replace(SCENARIO, lossy=True), prepare)
        if not failed:
            return
        yield failed[0], verdict
