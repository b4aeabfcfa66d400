"""The way between a process and a server: how long each message takes, and which are lost, doubled or overtaken.

`Wire` is calm: everything arrives, at once and in order. A simulation takes a `RoughWire`, whose seed draws the fate of
each leg. A leg is named by its kind: `core` (a message to one subscriber), `reply`, `publish` (work on its way into its
stream), `stored` (the stream's acknowledgement), `deliver`, `ack`, `acked`, `nak`, `progress`, `drop`, and for other
servers `call` and `answer`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from shared.contracts.errors import DeadlineExceeded
from tests.sim.process import OUTSIDE


class Wire:
    """`legs`: the delay in seconds of each copy that arrives; an empty answer is a loss."""

    def legs(self, kind: str, subject: str) -> Sequence[float]:
        return (0.0,)


CALM: Final = Wire()


@dataclass
class RoughWire(Wire):
    """Draws from `seed`. `lose` and `double`: chance by kind of leg; `late`: chance of a delay of up to `late_s`."""

    seed: str
    delay_s: float = 0.001
    late: float = 0.0
    late_s: float = 1.0
    lose: dict[str, float] = field(default_factory=dict)
    double: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(f"{self.seed}/wire")

    def legs(self, kind: str, subject: str) -> Sequence[float]:
        draw = self._random.random
        if draw() < self.lose.get(kind, 0.0):
            return ()
        copies = 2 if draw() < self.double.get(kind, 0.0) else 1
        return [self._delay() for _ in range(copies)]

    def _delay(self) -> float:
        if self._random.random() < self.late:
            return self._random.uniform(self.delay_s, self.late_s)
        return self._random.uniform(0, 2 * self.delay_s)


class Link:
    """One connection's direction: what takes it keeps its order unless `ordered` is off."""

    def __init__(self, ordered: bool = True) -> None:
        self.ordered = ordered
        self._free_at_s = 0.0

    def carry(self, delay_s: float, call: Callable[..., object], *args: Any) -> None:
        """Makes the call after the delay, of behalf of nobody: whoever sent it may be dead by then."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + delay_s
        if self.ordered:
            due_s = max(due_s, self._free_at_s)
            self._free_at_s = due_s
        if due_s <= loop.time():
            OUTSIDE.copy().run(call, *args)
        else:
            loop.call_at(due_s, call, *args, context=OUTSIDE.copy())


def resolve(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


async def within(timeout_s: float, answer: asyncio.Future[Any], failure: str) -> Any:
    """Raises DeadlineExceeded(failure)."""
    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except TimeoutError as error:
        raise DeadlineExceeded(failure) from error
