"""What goes wrong, as the plan says: crashes and restarts, servers that are away, messages lost, late or doubled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from shared.contracts.errors import Overloaded
from shared.contracts.ports import Space
from tests.fakes.store import FINE, Fate, Operation, flipped, torn
from tests.fakes.wire import RoughWire
from tests.sim.plan import Plan, Trouble
from tests.sim.world import World

FIRST_RESTART_S: Final = 0.5
_CORE: Final = ("core", "reply")
_WORK: Final = ("publish", "stored", "deliver", "nak", "progress", "drop")
_ACKS: Final = ("ack", "acked")


class Troubles:
    """`wire` is the world's; what is over leaves it as it was."""

    def __init__(self, world: World, plan: Plan, wire: RoughWire, revoke: Callable[[int], Awaitable[None]]) -> None:
        self.damaged: set[str] = set()
        """Names of objects that the store was made to damage or lose."""
        self._world = world
        self._plan = plan
        self._wire = wire
        self._revoke = revoke
        self._dice = random.Random(f"{plan.seed}/trouble")

    async def run(self) -> None:
        """Until the last one is over and every process is back."""
        async with asyncio.TaskGroup() as group:
            for trouble in self._plan.troubles:
                group.create_task(self._cause(trouble), name=trouble.kind)

    async def _cause(self, trouble: Trouble) -> None:
        await asyncio.sleep(trouble.at_s)
        kind = trouble.kind
        self._world.timeline.note("trouble", kind, process=trouble.process, for_s=trouble.for_s, amount=trouble.amount)
        if trouble.process is not None:
            await self._of_process(trouble, trouble.process)
        elif kind == "new_prices":
            self._world.prices = self._world.prices.replace('"0.60"', '"0.90"')
            self._world.crash("billing")
            await self._back("billing")
        elif kind == "revoke":
            await self._revoke(int(trouble.amount))
        elif kind == "broker_crash":
            lost = self._world.broker.crash(trouble.amount)
            self._world.timeline.note("trouble", "broker.lost", messages=len(lost))
        else:
            undo = self._begin(trouble)
            await asyncio.sleep(trouble.for_s)
            undo()
            self._world.timeline.note("trouble", f"{kind} over")

    # -- processes ---------------------------------------------------------------------------------------------------

    async def _of_process(self, trouble: Trouble, name: str) -> None:
        running = self._world.running[name]
        if trouble.kind == "pause":
            self._world.loop.pause(running.member, trouble.for_s)
            await asyncio.sleep(trouble.for_s)
        elif trouble.kind == "cut_off":
            self._world.broker.cut_off.add(running.member.name)
            await asyncio.sleep(trouble.for_s)
            self._world.broker.cut_off.discard(running.member.name)
        elif trouble.kind == "clock_step":
            running.clock.step(trouble.amount)
            await asyncio.sleep(trouble.for_s)
            running.clock.step(-trouble.amount)
        elif trouble.kind == "drain":
            await self._world.drain(name)
            await self._back(name)
        elif running.member.alive:
            running.member.crash_at_step = running.member.steps + trouble.steps
            died = asyncio.Event()
            running.member.at_death(died.set)
            running.member.at_death(lambda: self._world.timeline.note("trouble", "died", process=running.member.name))
            try:
                async with asyncio.timeout(5.0):
                    await died.wait()
            except TimeoutError:
                self._world.crash(name)
            await self._back(name)

    async def _back(self, name: str) -> None:
        """As the supervisor: a moment later it runs again."""
        await asyncio.sleep(FIRST_RESTART_S * self._dice.uniform(1, 3))
        if not self._world.alive(name):
            await self._world.up(name)

    # -- servers and wires -------------------------------------------------------------------------------------------

    def _begin(self, trouble: Trouble) -> Callable[[], None]:
        match trouble.kind:
            case "broker_down":
                return self._down(self._world.broker)
            case "store_down":
                return self._down(self._world.disk)
            case "ledger_down":
                return self._down(self._world.ledger_server)
            case "index_down":
                return self._down(self._world.index_server)
            case "store_slow":
                return self._fates(lambda operation, name: Fate(delay_s=self._dice.uniform(0, trouble.amount)))
            case "store_damage":
                return self._fates(lambda operation, name: self._damage(operation, name, trouble.amount))
            case "store_loss":
                return self._fates(lambda operation, name: self._loss(operation, name, trouble.amount))
            case "core_loss":
                return self._chances(self._wire.lose, _CORE, trouble.amount)
            case "core_double":
                return self._chances(self._wire.double, _CORE, trouble.amount)
            case "work_loss":
                return self._chances(self._wire.lose, _WORK, trouble.amount)
            case "ack_loss":
                return self._chances(self._wire.lose, _ACKS, trouble.amount)
            case "late":
                return self._late(trouble.amount)
            case _:
                raise ValueError(trouble.kind)

    def _down(self, server: object) -> Callable[[], None]:
        server.up = False  # type: ignore[attr-defined]
        return lambda: setattr(server, "up", True)

    def _fates(self, fate: Callable[[Operation, str], Fate]) -> Callable[[], None]:
        def asked(operation: Operation, space: Space, name: str) -> Fate:
            return fate(operation, name)

        def undo() -> None:
            self._world.disk.fate = lambda operation, space, name: FINE

        self._world.disk.fate = asked
        return undo

    def _damage(self, operation: Operation, name: str, chance: float) -> Fate:
        if operation != "put" or self._dice.random() >= chance:
            return FINE
        self.damaged.add(name)
        return Fate(damage=self._dice.choice((torn, flipped)))

    def _loss(self, operation: Operation, name: str, chance: float) -> Fate:
        """Of a put: refused, or said to be done and not, or done and not said."""
        if operation != "put" or self._dice.random() >= chance:
            return FINE
        self.damaged.add(name)
        return self._dice.choice(
            (
                Fate(applied=False),
                Fate(applied=False, error=Overloaded("the store is full")),
                Fate(error=Overloaded("the store is gone")),
            )
        )

    def _chances(self, table: dict[str, float], kinds: Sequence[str], chance: float) -> Callable[[], None]:
        table.update(dict.fromkeys(kinds, chance))
        return lambda: table.update(dict.fromkeys(kinds, 0.0))

    def _late(self, late_s: float) -> Callable[[], None]:
        self._wire.late, self._wire.late_s = 0.2, late_s

        def undo() -> None:
            self._wire.late = 0.0

        return undo
