"""Threads of a simulation: real ones, of which one at a time holds the baton, so that their order is the loop's.

For code that must wait on a thread of its own (the engine's). It runs from one wait to the next while the loop stands
still; `SimThreading` takes the place of the `threading` module where such code makes its condition.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")

_LOCAL: Final = threading.local()


class Ended(BaseException):
    """Unwinds a thread whose simulation is over."""


class SimThread(Generic[T]):
    """Runs `func` up to its next wait each time that the loop hands it the baton."""

    def __init__(self, loop: asyncio.AbstractEventLoop, func: Callable[..., T], args: tuple[Any, ...]) -> None:
        self.future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self.loop = loop
        self.ending = False
        self._context = contextvars.copy_context()
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._func = func
        self._args = args
        self._thread = threading.Thread(target=self._context.run, args=(self._main,), daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """On the loop: the thread runs until it waits or ends."""
        if self._thread.is_alive():
            self._go.release()
            self._back.acquire()

    def resume_soon(self) -> None:
        self.loop.call_soon(self.resume, context=self._context.copy())

    def pause(self) -> None:
        """On the thread: gives the baton back and waits for it."""
        self._back.release()
        self._go.acquire()
        if self.ending:
            raise Ended

    def end(self) -> None:
        """Unwinds the thread and waits until it is gone."""
        self.ending = True
        self.resume()
        self._thread.join()

    def _main(self) -> None:
        _LOCAL.thread = self
        self._go.acquire()
        try:
            if not self.ending:
                self._finish()
        except Ended:
            self.future.cancel()
        finally:
            self._back.release()

    def _finish(self) -> None:
        self.future.set_running_or_notify_cancel()
        try:
            result = self._func(*self._args)
        except Exception as error:  # noqa: BLE001  an executor hands every error to its caller
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


def current() -> SimThread[Any] | None:
    thread: SimThread[Any] | None = getattr(_LOCAL, "thread", None)
    return thread


def sleep(seconds: float) -> None:
    """`time.sleep` of a simulation: virtual, and only on a thread of its own."""
    thread = current()
    if thread is None:
        raise RuntimeError("time.sleep on the event loop")
    thread.loop.call_later(seconds, thread.resume, context=thread._context.copy())
    thread.pause()


class SimCondition:
    """A `threading.Condition` whose lock is the baton: nobody else runs between two waits."""

    def __init__(self) -> None:
        self._waiting: list[SimThread[Any]] = []

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *exc: object) -> None:
        pass

    def wait(self, timeout: float | None = None) -> bool:
        thread = current()
        if thread is None:
            raise RuntimeError("a wait on the event loop")
        if timeout is not None:
            raise NotImplementedError("only waits without a bound")
        self._waiting.append(thread)
        thread.pause()
        return True

    def notify(self, n: int = 1) -> None:
        woken, self._waiting = self._waiting[:n], self._waiting[n:]
        for thread in woken:
            thread.resume_soon()

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class SimThreading:
    """In place of the module `threading` in a module under simulation."""

    Condition = SimCondition
