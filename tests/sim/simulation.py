"""One simulation from its plan to its verdict: set up, run clients and troubles, let everything end, judge."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from services.billing.admin_schemas import NewAccount
from services.billing.administration import Administration
from services.billing.ledger import Ledger
from services.billing.pricing import parse_amount
from shared.contracts import subjects
from shared.contracts.block import object_name, unpack_header
from shared.contracts.lifecycle import HoldState
from shared.contracts.messages import Revoked, encode
from tests.fakes.books import MemoryDatabase
from tests.fakes.database import MemoryServer
from tests.fakes.wire import RoughWire
from tests.sim.auditor import Auditor, Balance, UsageRow
from tests.sim.loop import SimLoop, SimulationFailed, run_simulation
from tests.sim.plan import PROCESSES, Kind, Plan
from tests.sim.timeline import Timeline, silence
from tests.sim.trouble import Troubles
from tests.sim.workload import Clients
from tests.sim.world import Sizes, World

STEPS_MAX: Final = 600_000
QUIET_S: Final = 45.0
"""After the last answer: what is still under way (leases, settlements, releases) ends."""
EXPIRY_S: Final = 5_600.0
"""Until the last hold and the last handoff object must be gone."""
MONEY: Final[dict[Kind, dict[str, Any]]] = {
    "paid": {"credit": "1"},
    "trial": {"grant": "1"},
    "empty": {},
    "stranger": {},
}


@dataclass
class Verdict:
    """`faults` is empty for a clean run."""

    plan: Plan
    faults: list[str] = field(default_factory=list)
    timeline: str = ""
    steps: int = 0
    requests: int = 0
    virtual_s: float = 0.0

    @property
    def clean(self) -> bool:
        return not self.faults


def simulate(plan: Plan, prepare: Callable[[World], None] | None = None) -> Verdict:
    """Runs the plan. Whatever goes wrong is a fault of the verdict, the simulation's own limits too. `prepare` may
    change the world before anything runs in it."""
    verdict = Verdict(plan)
    timelines: list[Timeline] = []

    async def main(loop: SimLoop) -> None:
        timeline = Timeline(loop)
        timelines.append(timeline)
        with timeline.hearing():
            try:
                await _run(plan, loop, timeline, verdict, prepare)
            finally:
                verdict.steps, verdict.virtual_s = loop.steps, loop.time()

    try:
        with silence():
            run_simulation(plan.seed, main, steps_max=STEPS_MAX)
    except SimulationFailed as error:
        verdict.faults.append(f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001  a failure of the simulation is a failure of the seed
        verdict.faults.append(f"the simulation failed: {error!r}")
        verdict.faults.extend(_places(error))
    if timelines:
        verdict.timeline = timelines[0].text()
    return verdict


async def _run(
    plan: Plan, loop: SimLoop, timeline: Timeline, verdict: Verdict, prepare: Callable[[World], None] | None
) -> None:
    wire = RoughWire(f"{plan.seed}", delay_s=plan.delay_s)
    sizes = Sizes(rows_per_s=plan.rows_per_s, retention_s=plan.retention_s)
    if plan.small_pages:
        sizes = replace(sizes, pages=96, sequences=3)
    world = World(loop, timeline, wire=wire, sizes=sizes)
    if prepare is not None:
        prepare(world)
    with world.patched():
        await world.up(*PROCESSES)
        auditor = Auditor(plan, world.sizes.request_deadline_s)
        office = Office(plan, world, auditor)
        clients = Clients(world, timeline, await office.open_accounts())
        troubles = Troubles(world, plan, wire, office.revoke)
        causing = asyncio.create_task(troubles.run(), name="troubles")
        await clients.run(plan.clients)
        await causing
        await asyncio.sleep(QUIET_S)
        verdict.requests = len(clients.exchanges)
        auditor.check_answers(clients.exchanges)
        verdict.faults += auditor.faults
        verdict.faults += _check_rest(world, plan, troubles)
        for name in PROCESSES:
            if name not in ("billing", "cache_index"):
                await world.drain(name)
        await asyncio.sleep(EXPIRY_S)
        auditor.faults.clear()
        auditor.check_books(clients.exchanges, _usage(world, plan), _balances(world, plan))
        verdict.faults += auditor.faults
        if handoffs := world.disk.names("handoff"):
            verdict.faults.append(f"{len(handoffs)} handoff objects are left for ever")
        verdict.faults += world.faults
        verdict.faults += loop.faults


class Office:
    """The operator: opens one account for each kind of the plan, revokes keys, and tells the auditor."""

    def __init__(self, plan: Plan, world: World, auditor: Auditor) -> None:
        self._plan = plan
        self._world = world
        self._auditor = auditor
        self._bus = world.broker.connect()
        self._keys: list[str] = []
        database: Any = MemoryDatabase(world.tables, MemoryServer())
        self._administration = Administration(
            database, self._broadcast, world.wall, os.urandom, currency="USD", concurrency=100
        )

    async def open_accounts(self) -> list[str]:
        """Returns their API keys, in order."""
        secrets = []
        for number, kind in enumerate(self._plan.accounts):
            wanted = NewAccount(name=f"account {number}", **MONEY[kind])
            account = await self._administration.create_account(wanted, f"{number}")
            key = await self._administration.create_key(account.id, None)
            self._keys.append(key.id)
            secrets.append("sk-" + "0" * 64 if kind == "stranger" else key.key)
        return secrets

    async def revoke(self, account: int) -> None:
        await self._administration.revoke_key(self._keys[account])
        self._auditor.revoked_at_s.setdefault(account, self._world.loop.time())

    async def _broadcast(self, revoked: Revoked) -> None:
        await self._bus.send(subjects.REVOKED, encode(revoked))


def _usage(world: World, plan: Plan) -> list[UsageRow]:
    accounts = {account: number for number, account in enumerate(world.tables.accounts)}
    return [
        UsageRow(
            request=str(request),
            account=accounts[row.hold.account],
            prompt=row.settle.usage.prompt_tokens,
            cached=row.settle.usage.cached,
            uncached=row.settle.usage.uncached,
            not_eligible=row.settle.usage.not_eligible,
            output=row.settle.usage.output,
            amount_nano=row.amount_nano,
            late=row.late,
        )
        for request, row in world.tables.usage.items()
    ]


def _balances(world: World, plan: Plan) -> list[Balance]:
    balances = []
    for account, kind in zip(world.tables.accounts, plan.accounts, strict=True):
        has = {ledger: world.tables.balances[account, ledger] for ledger in Ledger}
        balances.append(
            Balance(
                put_in_nano=sum(parse_amount(amount) for amount in MONEY[kind].values()),
                spendable_nano=has[Ledger.GRANTED] + has[Ledger.TOPPED_UP],
                held_nano=has[Ledger.HELD],
                spent_nano=has[Ledger.REVENUE],
                uncollected_nano=-has[Ledger.UNCOLLECTED],
            )
        )
    return balances


def _check_rest(world: World, plan: Plan, troubles: Troubles) -> list[str]:
    """What must be true of everything that lasts, once it is quiet."""
    faults = []
    for stream in world.broker.streams:
        left = [stored.subject for stored in stream.pending() if not _to_the_dead(world, stored.subject)]
        if stream.config.name in ("PREFILL", "DECODE") and left:
            faults.append(f"{len(left)} messages are left in {stream.config.name}: {left}")
    kinds = dict(zip(world.tables.accounts, plan.accounts, strict=True))
    for (namespace, key), row in world.index.rows.items():
        if kinds[row.by.account] != "paid":
            faults.append(f"a row of an account that is {kinds[row.by.account]}")
        name = object_name(key, row.put_id)
        kept = world.disk.objects.get(("pool", name))
        if name in troubles.damaged:
            continue
        if kept is None:
            faults.append(f"a row of {namespace} without its object {name}")
        elif unpack_header(kept[0]).key != key:
            faults.append(f"the object {name} has another key")
    if plan.calm:
        faults += _check_nothing_left(world)
    for name, running in world.running.items():
        if not world.alive(name):
            faults.append(f"{name} is not running")
        if running.role in ("prefill", "decode"):
            faults += _check_worker(world, name)
    return faults


def _check_nothing_left(world: World) -> list[str]:
    """Where nothing went wrong, nothing waits to be swept or to expire, and nobody logged an error."""
    faults = list(world.timeline.errors)
    named = {object_name(key, row.put_id) for (_, key), row in world.index.rows.items()}
    faults += [f"the object {name} has no row" for name in world.disk.names("pool") if name not in named]
    faults += [f"the handoff object {name} is left" for name in world.disk.names("handoff")]
    pending = [hold.request for hold in world.tables.holds.values() if hold.state is HoldState.PENDING]
    return faults + [f"the hold of {request} is open" for request in pending]


def _to_the_dead(world: World, subject: str) -> bool:
    """Work for one worker that is gone stays until its age: the gateway has published it again, to any."""
    _, at, worker = subject.partition(".at.")
    return bool(at) and all(worker != f"{name}-{life}" for name, life in world.lives.items())


def _check_worker(world: World, name: str) -> list[str]:
    metrics = world.running[name].service.metrics.render().decode()
    free = next((line.split()[-1] for line in metrics.splitlines() if line.startswith("deepserve_pages_free")), None)
    if free is None or float(free) != world.sizes.pages:
        return [f"{name} has {free} of {world.sizes.pages} pages free"]
    return []


def _places(error: BaseException, depth: int = 0) -> list[str]:
    """Where an error, and those in a group, came from."""
    lines = [f"  {getattr(error, '__notes__', '')}"]
    frames = error.__traceback__
    while frames is not None:
        lines.append(f"  {frames.tb_frame.f_code.co_filename}:{frames.tb_lineno} {frames.tb_frame.f_code.co_name}")
        frames = frames.tb_next
    if isinstance(error, BaseExceptionGroup) and depth < 5:
        for inner in error.exceptions:
            lines += [f"  {inner!r}", *_places(inner, depth + 1)]
    return lines
