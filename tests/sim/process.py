"""A simulated process: the tasks that stand and fall together.

Membership travels in a context variable, so whatever a task of the process starts or schedules belongs to it too. The
loop runs no callback of a dead process: it stops between two awaits, without any clean-up, as after kill -9.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")

_CURRENT: Final[contextvars.ContextVar[SimProcess | None]] = contextvars.ContextVar("process", default=None)
OUTSIDE: Final = contextvars.Context()
"""The context of what belongs to no process: servers, the network, the workload."""


class SimProcess:
    """`steps` counts callbacks that ran; `crash_at_step` kills the process in place of that one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.steps = 0
        self.crash_at_step: int | None = None
        self.tasks: list[asyncio.Task[Any]] = []
        self.held_back: list[asyncio.Handle] | None = None
        """Callbacks that wait for `resume`; None while the process runs."""
        self._context = contextvars.Context()
        self._context.run(_CURRENT.set, self)
        self._at_death: list[Callable[[], None]] = []

    def start(self, work: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
        """A task of this process."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(work, name=name or self.name, context=self._context.copy())
        self.tasks.append(task)
        return task

    def run(self, call: Callable[..., T], *args: Any) -> T:
        """Calls at once, as the process would."""
        return self._context.copy().run(call, *args)

    def at_death(self, call: Callable[[], None]) -> None:
        """`call` is made when the process dies: what its peers and servers notice."""
        self._at_death.append(call)

    def crash(self) -> None:
        """Idempotent. Nothing of the process runs from now on."""
        if not self.alive:
            return
        self.alive = False
        calls, self._at_death = self._at_death, []
        for call in calls:
            OUTSIDE.copy().run(call)

    def pause(self) -> None:
        """As SIGSTOP: the process stands still and the world goes on."""
        if self.held_back is None:
            self.held_back = []

    def resume(self) -> list[asyncio.Handle]:
        """It goes on where it stood; returns what is to be run now."""
        held_back, self.held_back = self.held_back or [], None
        return held_back

    def may_step(self) -> bool:
        """Asked by the loop before each callback of the process."""
        if self.alive and self.crash_at_step is not None and self.steps >= self.crash_at_step:
            self.crash()
        if not self.alive:
            return False
        self.steps += 1
        return True


def current() -> SimProcess | None:
    """The process that is running now."""
    return _CURRENT.get()


def owner(context: contextvars.Context) -> SimProcess | None:
    """The process that a callback's context belongs to."""
    return context.get(_CURRENT)


def check_alive() -> None:
    """What a port of a dead process does while its tasks are unwound: raises CancelledError."""
    member = current()
    if member is not None and not member.alive:
        raise asyncio.CancelledError
