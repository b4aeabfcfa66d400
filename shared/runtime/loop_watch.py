"""Watches the event loop of a process: no callback may hold it for long, since everybody else waits meanwhile.

What counts is the processor time of the loop's own thread: a callback that the system merely let wait, on a busy
machine, held nothing. That clock costs a system call, so it is read once in a while (a mark) and after a callback that
took `limits.LOOP_LOOK_S` by the wall clock, which is cheap to read and never less than the processor time. What the
thread used between the mark and the callback's begin is at most the wall time between them, and is taken off: a hold is
never overstated, and understated by `limits.LOOP_LOOK_S` at most.

Works with each loop whose `call_soon`, `call_later` and `call_at` may be replaced (asyncio's and uvloop's): each step
of a task comes through `call_soon`. Protocols of the loop's own connections are watched too where they allow it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import structlog

from shared.contracts import limits
from shared.runtime.metrics import Metrics

_log = structlog.get_logger()
_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class LoopWatch:
    """`install` on a loop before it has tasks. Its metrics: `loop_held_seconds` and `loop_held_max_seconds`.

    `thread_s`: processor time of the calling thread; `wall_s`: a clock that never runs behind it.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        thread_s: Callable[[], float] = time.thread_time,
        wall_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.longest_s = 0.0
        """Of one callback, since the start or the last `begin`."""
        self._thread_s = thread_s
        self._wall_s = wall_s
        self._said_s = -limits.LOOP_SAY_EVERY_S
        self._unsaid = 0
        self._begun = False
        self._held = metrics.histogram(
            "loop_held_seconds",
            "Processor time of callbacks of the event loop that took a millisecond or more.",
            buckets=_BUCKETS_S,
        )
        says = "Longest processor time of one callback of the event loop since the process was ready."
        metrics.watch("loop_held_max_seconds", says, None, lambda: {"": self.longest_s})

    def begin(self) -> None:
        """A start may take its time: what follows counts, and is told of in the log."""
        self.longest_s = 0.0
        self._begun = True

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on every callback that is scheduled is watched."""
        run = self.timed()
        call_later, call_at = loop.call_later, loop.call_at

        def later(delay: float, callback: Callable[..., Any], *given: Any, context: Any = None) -> asyncio.TimerHandle:
            if callback is run:  # One of the two is made of the other; which one depends on the loop.
                return call_later(delay, callback, *given, context=context)
            return call_later(delay, run, callback, *given, context=context)

        def at(when: float, callback: Callable[..., Any], *given: Any, context: Any = None) -> asyncio.TimerHandle:
            if callback is run:
                return call_at(when, callback, *given, context=context)
            return call_at(when, run, callback, *given, context=context)

        watched = {
            "call_soon": partial(loop.call_soon, run),
            "call_soon_threadsafe": partial(loop.call_soon_threadsafe, run),
            "call_later": later,
            "call_at": at,
            "create_server": _with_factory(loop.create_server, run),
            "create_connection": _with_factory(loop.create_connection, run),
        }
        for name, method in watched.items():
            setattr(loop, name, method)

    def timed(self) -> Callable[..., None]:
        """`run(callback, *given)` for one loop: calls it and measures. A closure, since it runs for each callback."""
        wall_s, thread_s, noticed = self._wall_s, self._thread_s, self._noticed
        look_s = limits.LOOP_LOOK_S
        mark_wall_s = mark_thread_s = -1.0

        def run(callback: Callable[..., Any], *given: Any) -> None:
            nonlocal mark_wall_s, mark_thread_s
            begun_s = wall_s()
            if begun_s - mark_wall_s > look_s or mark_thread_s < 0:
                mark_thread_s, mark_wall_s = thread_s(), begun_s
            try:
                callback(*given)
            finally:
                ended_s = wall_s()
                if ended_s - begun_s >= look_s:
                    used_s = thread_s() - mark_thread_s
                    noticed(callback, used_s - (begun_s - mark_wall_s))
                    # The wall is read first: what is taken off must not be less than what was used.
                    mark_thread_s, mark_wall_s = mark_thread_s + used_s, ended_s

        return run

    def _noticed(self, callback: Callable[..., Any], held_s: float) -> None:
        if held_s < limits.LOOP_LOOK_S:
            return
        self._held.observe(held_s)
        self.longest_s = max(self.longest_s, held_s)
        if self._begun and held_s >= limits.LOOP_HELD_S:
            self._say(callback, held_s)

    def _say(self, callback: Callable[..., Any], held_s: float) -> None:
        """At most one line in `limits.LOOP_SAY_EVERY_S`; the next one counts what was left out."""
        now_s = self._wall_s()
        if now_s - self._said_s < limits.LOOP_SAY_EVERY_S:
            self._unsaid += 1
            return
        _log.warning("loop.held", held_s=round(held_s, 4), unsaid=self._unsaid, **named(callback))
        self._said_s, self._unsaid = now_s, 0


def named(callback: Callable[..., Any]) -> dict[str, str]:
    """What a log line says of a callback: of a step of a task its name, its coroutine and where that waits now."""
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return {"callback": getattr(callback, "__qualname__", None) or type(callback).__name__}
    coroutine = task.get_coro()
    said = {"callback": getattr(coroutine, "__qualname__", type(coroutine).__name__), "task": task.get_name()}
    waits = _place(coroutine)
    return said | {"waits_at": waits} if waits else said


def _place(coroutine: Any) -> str:
    """`file:line` of the innermost frame of a coroutine that waits; "" when it has ended."""
    place = ""
    for _ in range(limits.LOOP_STACK_MAX):
        frame = getattr(coroutine, "cr_frame", None)
        if frame is None:
            break
        place = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
        coroutine = coroutine.cr_await
    return place


def _with_factory(make: Callable[..., Any], run: Callable[..., None]) -> Callable[..., Any]:
    """`create_server` or `create_connection` whose protocols are watched when data arrives."""

    def made(factory: Callable[[], Any], *given: Any, **named_given: Any) -> Any:
        def watched() -> Any:
            protocol = factory()
            received = getattr(protocol, "data_received", None)
            if received is not None:
                try:
                    protocol.data_received = lambda data: run(received, data)
                except AttributeError:
                    pass  # Compiled protocols (the database's) cannot be changed; they only hand on to tasks.
            return protocol

        return make(watched, *given, **named_given)

    return made
