"""A seeded asyncio event loop with virtual time: one thread, no input or output, the same seed gives the same run.

Owns time, the order of what is ready, and the ends of dead processes. Time stands still while anything is ready, and
jumps to the next timer otherwise. What asyncio promises stays true: callbacks of one future and plain callbacks keep
their order; only tasks that are ready at once are run in an order that the seed draws, and now and then a timer fires
early enough to overtake them, as on a busy machine. Tasks and futures hash by their number, so that a set of them has
one order in every process.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextvars
import gc
import heapq
import random
from asyncio import events
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar, TypeVarTuple, Unpack

from tests.sim import pinned, process
from tests.sim.process import SimProcess
from tests.sim.threads import SimThread

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

EPOCH_S: Final = 1_800_000_000.0
"""Wall time at the start of each simulation."""
STEPS_MAX: Final = 5_000_000
STEPS_WITHOUT_TIME_MAX: Final = 200_000
"""Callbacks in a row at one instant: more is a loop that never waits."""
_OVERTAKE_PART: Final = 0.01
_OVERTAKE_S: Final = 0.02
"""One choice in a hundred lets a timer of the next 20 ms fire before what is ready."""
_TEARDOWN_STEPS_MAX: Final = 100_000


class SimulationFailed(AssertionError):
    """Something that no run may do."""


class Deadlock(SimulationFailed):
    """Nothing is ready and no timer is set."""


class TooManySteps(SimulationFailed):
    """A bound on callbacks was passed."""


class _Numbered:
    """Hashes by number: the address of an object differs between runs."""

    _number = 0

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class SimTask(_Numbered, asyncio.Task):  # type: ignore[type-arg]
    def __init__(self, coro: Coroutine[Any, Any, Any], *, number: int, **kwargs: Any) -> None:
        self._number = number
        super().__init__(coro, **kwargs)


class SimFuture(_Numbered, asyncio.Future):  # type: ignore[type-arg]
    def __init__(self, *, number: int, loop: SimLoop) -> None:
        self._number = number
        super().__init__(loop=loop)


class SimLoop(asyncio.BaseEventLoop):
    """`shuffle=False` keeps asyncio's own order. `faults` collects what the loop's exception handler was told.

    `afterlife`: the run is over, and dead processes unwind as well."""

    _ready: collections.deque[Any]

    def __init__(self, seed: int, *, shuffle: bool = True, steps_max: int = STEPS_MAX) -> None:
        super().__init__()
        self.seed = seed
        self.shuffle = shuffle
        self.steps = 0
        self.steps_max = steps_max
        self.faults: list[str] = []
        self._random = random.Random(f"{seed}/loop")
        self._now_s = 0.0
        self._number = 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._last_time_step = 0
        self._threads: list[SimThread[Any]] = []
        self._buried: list[asyncio.Handle] = []
        self._paused: list[SimProcess] = []
        self.afterlife = False
        self.set_exception_handler(self._remember_fault)

    # -- what asyncio asks of a loop ---------------------------------------------------------------------------------

    def time(self) -> float:
        return self._now_s

    def create_future(self) -> asyncio.Future[Any]:
        return SimFuture(number=self._next_number(), loop=self)

    def create_task(
        self, coro: Any, *, name: object = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        return SimTask(coro, number=self._next_number(), loop=self, name=name, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(max(when, self._now_s), callback, args, self, context)
        heapq.heappush(self._timers, (timer.when(), self._next_number(), timer))
        return timer

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(
        self, executor: concurrent.futures.Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Short work for the default executor runs inline, a little later; an executor of its own is a thread that
        may wait, and gets the baton (threads.py)."""
        if executor is not None:
            thread: SimThread[T] = SimThread(self, func, args)
            self._threads.append(thread)
            thread.resume_soon()
            return asyncio.wrap_future(thread.future, loop=self)
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self.call_later(self._random.uniform(0, 0.002), _complete, future, func, args)
        return asyncio.wrap_future(future, loop=self)

    async def shutdown_default_executor(self) -> None:
        """There is none."""

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are skipped when their time comes."""

    def _process_events(self, event_list: object) -> None:
        raise SimulationFailed("a simulated loop has no input or output")

    def _run_once(self) -> None:
        if not self._ready:
            self._advance()
        elif self.shuffle and self._random.random() < _OVERTAKE_PART:
            self._overtake()
        handle: Any = self._take()
        if handle.cancelled():
            return
        member = process.owner(handle._context)
        if member is not None and not self.afterlife and self._kept_from(member, handle):
            return
        self.steps += 1
        if self.steps > self.steps_max or self.steps - self._last_time_step > STEPS_WITHOUT_TIME_MAX:
            self._ready.append(handle)
            stuck = self.steps - self._last_time_step
            raise TooManySteps(f"{self.steps} steps, {stuck} of them at {self._now_s:.6f} s")
        handle._run()

    def _kept_from(self, member: SimProcess, handle: Any) -> bool:
        """Whether the callback does not run now: its process is dead, or stands still."""
        if member.held_back is not None and member.alive:
            member.held_back.append(handle)
            return True
        if not member.may_step():
            self._buried.append(handle)
            return True
        return False

    def pause(self, member: SimProcess, for_s: float) -> None:
        """The process stands still for a while."""
        member.pause()
        self._paused.append(member)
        self.call_later(for_s, self._resume, member, context=process.OUTSIDE.copy())

    def _resume(self, member: SimProcess) -> None:
        self._ready.extend(member.resume())

    # -- order and time ----------------------------------------------------------------------------------------------

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _take(self) -> Any:
        """The next callback: a drawn task, or the oldest plain callback."""
        ready = self._ready
        if not self.shuffle or len(ready) == 1:
            return ready.popleft()
        index = self._random.randrange(len(ready))
        if not _of_task(ready[index]):
            index = next(i for i, h in enumerate(ready) if not _of_task(h))
        handle = ready[index]
        del ready[index]
        return handle

    def _advance(self) -> None:
        """To the next timer that still counts."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if not self._timers:
            raise Deadlock(f"nothing is ready and no timer is set at {self._now_s:.6f} s")
        self._fire(self._timers[0][0])

    def _overtake(self) -> None:
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if self._timers and self._timers[0][0] <= self._now_s + _OVERTAKE_S:
            self._fire(self._timers[0][0])

    def _fire(self, when_s: float) -> None:
        if when_s > self._now_s:
            self._now_s = when_s
            self._last_time_step = self.steps
        while self._timers and self._timers[0][0] <= self._now_s:
            timer = heapq.heappop(self._timers)[2]
            if not timer.cancelled():
                self._ready.append(timer)

    def begin_afterlife(self, steps_max: int) -> None:
        """Callbacks of dead processes run after all, so that their tasks can unwind."""
        self.afterlife = True
        self.shuffle = False
        self.steps_max = self.steps + steps_max
        self._last_time_step = self.steps
        self._ready.extend(self._buried)
        for member in self._paused:
            self._ready.extend(member.resume())
        self._buried.clear()

    def end_threads(self) -> None:
        """Unwinds threads that still wait."""
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.end()

    def _remember_fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        member = process.current()
        task = context.get("task") or context.get("future")
        if member is not None and not member.alive:
            return
        error = context.get("exception")
        self.faults.append(f"{context['message']}: {error!r} ({getattr(task, 'get_name', lambda: '')()})")


def _of_task(handle: Any) -> bool:
    return isinstance(getattr(handle._callback, "__self__", None), asyncio.Task)


def _complete(future: concurrent.futures.Future[T], func: Callable[..., T], args: tuple[Any, ...]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(func(*args))
    except BaseException as error:  # noqa: BLE001  an executor hands every error to its caller
        future.set_exception(error)


class SimClock:
    """`ports.Clock` of one process: wall time may be skewed and may step; monotonic time is the loop's."""

    def __init__(self, loop: SimLoop, skew_s: float = 0.0) -> None:
        self._loop = loop
        self._skew_s = skew_s

    def now_s(self) -> float:
        return EPOCH_S + self._loop.time() + self._skew_s

    def monotonic_s(self) -> float:
        return self._loop.time()

    def step(self, by_s: float) -> None:
        """The wall clock jumps."""
        self._skew_s += by_s


def run_simulation(
    seed: int,
    main: Callable[[SimLoop], Coroutine[Any, Any, T]],
    *,
    shuffle: bool = True,
    steps_max: int = STEPS_MAX,
    time_max_s: float = 86_400.0,
) -> T:
    """Runs `main` to its end in a world of its own. Raises what it raised, with the seed in the error's notes.

    Collecting garbage waits until the end: when a cycle is collected would depend on what ran before.
    """
    loop = SimLoop(seed, shuffle=shuffle, steps_max=steps_max)
    collecting = gc.isenabled()
    gc.disable()
    try:
        with pinned.world(loop, EPOCH_S):
            try:
                return loop.run_until_complete(_within(main(loop), time_max_s))
            except BaseException as error:
                error.add_note(f"seed {seed}, step {loop.steps}, {loop.time():.6f} s")
                raise
            finally:
                _tear_down(loop)
    finally:
        events._set_running_loop(None)
        loop.close()
        if collecting:
            gc.enable()


async def _within(work: Coroutine[Any, Any, T], time_max_s: float) -> T:
    try:
        async with asyncio.timeout(time_max_s) as bound:
            return await work
    except TimeoutError as error:
        if bound.expired():
            raise SimulationFailed(f"not finished after {time_max_s} s of virtual time") from error
        raise


def _tear_down(loop: SimLoop) -> None:
    """Unwinds what is left, the tasks of dead processes too: their ports answer with CancelledError by then."""
    loop.set_exception_handler(lambda loop, context: None)
    loop.begin_afterlife(_TEARDOWN_STEPS_MAX)
    try:
        left = sorted(asyncio.all_tasks(loop), key=hash)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=3_600.0))
        loop.run_until_complete(loop.shutdown_asyncgens())
    except SimulationFailed:
        pass
    loop.end_threads()
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]
