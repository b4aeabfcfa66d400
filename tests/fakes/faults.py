"""Faults in front of any port: the n-th call, or drawn ones, is late, fails, or fails after its effect.

`faulty(port, plan)` stands in place of the port, real or in memory. The plan is asked at each asynchronous call and
says what befalls it; what the port yields (deliveries) is wrapped alike. `sweep` fails the first call of a scenario,
then the second, and so on until one run passes untouched.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import random
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, cast

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fault:
    """`error` is raised before the call has any effect, or after it had it (a lost answer)."""

    error: Exception | None = None
    when: Literal["before", "after"] = "before"
    delay_s: float = 0.0


class Plan(Protocol):
    def fault(self, call: str) -> Fault | None:
        """Of the call that is about to be made; `call` names port and method."""
        ...


@dataclass
class NthFailure:
    """Fails call number `number` (from 1) of all ports that share the plan. `calls`: how many were made."""

    number: int
    error: Callable[[], Exception]
    when: Literal["before", "after"] = "before"
    calls: int = 0
    failed: str | None = None

    def fault(self, call: str) -> Fault | None:
        self.calls += 1
        if self.calls != self.number:
            return None
        self.failed = call
        return Fault(self.error(), self.when)


class DrawnFaults:
    """Each call named in `chances` fails with its chance, before or after its effect, or is late by up to `late_s`."""

    def __init__(
        self, seed: str, chances: Mapping[str, float], error: Callable[[], Exception], late_s: float = 0.0
    ) -> None:
        self._random = random.Random(f"{seed}/faults")
        self._chances = chances
        self._error = error
        self._late_s = late_s

    def fault(self, call: str) -> Fault | None:
        draw = self._random.random()
        if draw >= self._chances.get(call, 0.0):
            return None
        match self._random.randrange(3 if self._late_s else 2):
            case 0:
                return Fault(self._error())
            case 1:
                return Fault(self._error(), "after")
            case _:
                return Fault(delay_s=self._random.uniform(0, self._late_s))


def faulty(port: T, plan: Plan, name: str | None = None) -> T:
    """The port behind the plan. `name` is the first part of its calls' names; the class's name without one."""
    return cast(T, _Faulty(port, plan, name or type(port).__name__))


class _Faulty:
    def __init__(self, port: object, plan: Plan, name: str) -> None:
        self._port = port
        self._plan = plan
        self._name = name

    def __getattr__(self, method: str) -> Any:
        call = getattr(self._port, method)
        name = f"{self._name}.{method}"
        if inspect.iscoroutinefunction(call):
            return _once(call, name, self._plan)
        if inspect.isasyncgenfunction(call):
            return _each(call, name, self._plan)
        return call


def _once(call: Callable[..., Any], name: str, plan: Plan) -> Callable[..., Any]:
    async def made(*args: Any, **kwargs: Any) -> Any:
        fault = plan.fault(name) or Fault()
        if fault.delay_s:
            await asyncio.sleep(fault.delay_s)
        if fault.error is not None and fault.when == "before":
            raise fault.error
        result = await call(*args, **kwargs)
        if fault.error is not None:
            raise fault.error
        return result

    return made


def _each(call: Callable[..., Any], name: str, plan: Plan) -> Callable[..., Any]:
    async def made(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        items = call(*args, **kwargs)
        try:
            async for item in items:
                yield faulty(item, plan, f"{name}.item") if hasattr(item, "ack") else item
        finally:
            await items.aclose()

    return made


def sweep(
    scenario: Callable[[NthFailure], object],
    error: Callable[[], Exception],
    when: Literal["before", "after"] = "before",
    runs_max: int = 10_000,
) -> int:
    """Runs the scenario with its first call failing, then its second, until one makes fewer calls than that; returns
    how many runs had a failure. The scenario checks what must hold."""
    for number in itertools.count(1):
        if number > runs_max:
            raise AssertionError(f"the scenario makes more than {runs_max} calls")
        plan = NthFailure(number, error, when)
        try:
            scenario(plan)
        except BaseException as failure:
            failure.add_note(f"call {number} failed {when} its effect: {plan.failed}")
            raise
        if plan.failed is None:
            return number - 1
    raise AssertionError("unreachable")
