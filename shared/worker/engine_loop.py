"""The thread that owns the engine, and the asynchronous face of it.

Everything the engine does happens on one thread: commands (`add`, `export`, `remove`) between steps, steps while there
is work, waiting without a spin when there is none. Steps go back to the event loop in order; the thread runs at most
limits.STEPS_AHEAD_MAX of them ahead, so that a slow loop slows the engine and a cancel takes hold soon.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from shared.contracts import limits
from shared.contracts.errors import BlockMiss, DeepServeError, InternalError, OutOfPages
from shared.contracts.ids import RequestId
from shared.contracts.ports import Engine, EngineProfile, Produced, SequenceSpec


class EngineStopped(InternalError):
    """This worker cannot go on; another one can: the request is given back and not failed."""


@dataclass(frozen=True, slots=True)
class Step:
    """News of one forward pass. `device_s`: how long it kept the device busy."""

    produced: list[Produced]
    device_s: float


@dataclass(slots=True)
class _Command:
    request: RequestId
    call: Callable[[], Any]
    wakes: bool
    """Whether there may be something to step afterwards."""
    future: Future[Any] = field(default_factory=Future)


class EngineLoop:
    """`run` must be under way, once, for anything else to return. `step_rows`: rows of one step at most."""

    def __init__(self, engine: Engine, step_rows: int) -> None:
        self.profile: EngineProfile = engine.profile
        self._engine = engine
        self._step_rows = step_rows
        self._exports_per_step = limits.EXPORTS_PER_STEP_MAX + step_rows // engine.profile.block_tokens
        self._condition = threading.Condition()
        self._urgent: deque[_Command] = deque()
        self._exports: deque[_Command] = deque()
        self._ahead = 0
        self._stopped = False
        self._pages_free = engine.pages_free()
        self._present: set[RequestId] = set()
        self._left = asyncio.Event()
        """Set, and replaced, when a sequence leaves."""
        self._steps: asyncio.Queue[Step] = asyncio.Queue()

    @property
    def pages_free(self) -> int:
        """As of the last command or step."""
        return self._pages_free

    async def run(self) -> None:
        """Runs the thread until cancelled; raises what broke the engine. It returns when the thread has ended."""
        loop = asyncio.get_running_loop()
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        thread = loop.run_in_executor(executor, self._work, loop)
        try:
            await asyncio.shield(thread)
        finally:
            with self._condition:
                self._stopped = True
                self._condition.notify()
            await asyncio.wait({thread})
            executor.shutdown(wait=False)

    async def add(self, spec: SequenceSpec) -> None:
        """Raises OutOfPages, InvalidRequest, BlockMiss as the engine's `add` does."""
        await self._submit(self._urgent, _Command(spec.request, lambda: self._add(spec), wakes=True))

    async def add_within(self, spec: SequenceSpec, timeout_s: float) -> None:
        """As `add`; where pages are short it waits for sequences to leave, at most `timeout_s`: those that run may have
        outgrown what they were promised."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    left = self._left
                    try:
                        return await self.add(spec)
                    except OutOfPages:
                        await left.wait()
        except TimeoutError as error:
            raise OutOfPages(f"no pages came free in {timeout_s:g} s") from error

    async def remove(self, request: RequestId) -> None:
        """Idempotent. Exports of this request that have not begun fail with BlockMiss(removed)."""
        with self._condition:
            dropped = [command for command in self._exports if command.request == request]
            self._exports = deque(command for command in self._exports if command.request != request)
        for command in dropped:
            if command.future.set_running_or_notify_cancel():
                command.future.set_exception(BlockMiss("removed", "its sequence left the engine"))
        loop = asyncio.get_running_loop()

        def take_out() -> None:
            self._present.discard(request)
            self._engine.remove(request)
            loop.call_soon_threadsafe(self._tell_left)

        # It wakes the engine: pages that came free may let a starved sequence go on. Who is cancelled while waiting for
        # this has still asked for it: a sequence must not stay behind.
        await asyncio.shield(self._submit(self._urgent, _Command(request, take_out, wakes=True)))

    def _tell_left(self) -> None:
        self._left.set()
        self._left = asyncio.Event()

    async def export(self, request: RequestId, block: int, tokens: int) -> bytes:
        """A copy of the first `tokens` positions of a block. Raises BlockMiss(removed)."""
        command = _Command(request, lambda: self._export(request, block, tokens), wakes=False)
        payload = await self._submit(self._exports, command)
        if not isinstance(payload, bytes):
            raise InternalError("an export is bytes")
        return payload

    async def steps(self) -> AsyncIterator[Step]:
        """Every step, in order, for one consumer; asking for the next says that the last one was handled."""
        while True:
            step = await self._steps.get()
            yield step
            with self._condition:
                self._ahead -= 1
                self._condition.notify()

    async def _submit(self, queue: deque[_Command], command: _Command) -> Any:
        with self._condition:
            if self._stopped:
                raise EngineStopped("the engine has stopped")
            queue.append(command)
            self._condition.notify()
        return await asyncio.wrap_future(command.future)

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        stepping: bool | None = False
        try:
            while stepping is not None:
                stepping = self._turn(loop, stepping)
        finally:
            self._fail_rest()

    def _turn(self, loop: asyncio.AbstractEventLoop, stepping: bool) -> bool | None:
        """Commands, then a step. Whether there may be more to step; None: stop.

        A method of its own, so that no local keeps a command's payloads alive while the thread waits.
        """
        batch = self._next_batch(stepping)
        if batch is None:
            return None
        commands, may_step = batch
        for command in commands:
            stepping = self._execute(command) or stepping
        if stepping and may_step:
            stepping = self._step(loop)
        self._pages_free = self._engine.pages_free()
        return stepping

    def _next_batch(self, stepping: bool) -> tuple[list[_Command], bool] | None:
        """Waits for something to do: commands, and whether a step may be made. None: stop."""
        with self._condition:
            while not (self._stopped or self._urgent or self._exports or self._may_step(stepping)):
                self._condition.wait()
            if self._stopped:
                return None
            commands = list(self._urgent)
            self._urgent.clear()
            for _ in range(min(self._exports_per_step, len(self._exports))):
                commands.append(self._exports.popleft())
            return commands, self._ahead < limits.STEPS_AHEAD_MAX

    def _may_step(self, stepping: bool) -> bool:
        return stepping and self._ahead < limits.STEPS_AHEAD_MAX

    def _execute(self, command: _Command) -> bool:
        """Whether there may be something to step now. An error of the tree is the caller's; any other ends the loop."""
        if not command.future.set_running_or_notify_cancel():
            return False
        done = False
        try:
            command.future.set_result(command.call())
            done = True
        except DeepServeError as error:
            command.future.set_exception(error)
            done = True
        finally:
            if not done:
                command.future.set_exception(EngineStopped("the engine broke"))
        return command.wakes

    def _add(self, spec: SequenceSpec) -> None:
        self._engine.add(spec)
        self._present.add(spec.request)

    def _export(self, request: RequestId, block: int, tokens: int) -> bytes:
        if request not in self._present:
            raise BlockMiss("removed", "its sequence left the engine")
        return self._engine.export(request, block, tokens)

    def _step(self, loop: asyncio.AbstractEventLoop) -> bool:
        started_s = time.perf_counter()
        produced = self._engine.step(self._step_rows)
        if not produced:
            return False
        with self._condition:
            self._ahead += 1
        loop.call_soon_threadsafe(self._steps.put_nowait, Step(produced, time.perf_counter() - started_s))
        return True

    def _fail_rest(self) -> None:
        with self._condition:
            self._stopped = True
            rest = [*self._urgent, *self._exports]
            self._urgent.clear()
            self._exports.clear()
        for command in rest:
            if command.future.set_running_or_notify_cancel():
                command.future.set_exception(EngineStopped("the engine has stopped"))
