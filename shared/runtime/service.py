"""The life of one process: start, serve, drain, stop. Owns its tasks and the only broad excepts of the product.

    if __name__ == "__main__":
        sys.exit(run(PrefillSettings, start))

`start(service, settings)` builds the adapters, spawns the process's tasks and returns or, with all it needs at hand,
calls `service.ready()`. A signal (or the failure of a task) sets `service.draining`; tasks spawned with `drains=True`
then finish by themselves within `drain_timeout_s`, the others are cancelled, and what was registered with `on_stop`
runs in reverse order. A second signal cuts the draining short.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

import structlog
import uvloop

from shared.contracts import block, limits
from shared.contracts.errors import DeepServeError, InternalError, SettingsError
from shared.runtime import log
from shared.runtime.clock import SystemClock
from shared.runtime.config import Settings, WorkerSettings, load
from shared.runtime.health import HealthServer, write_port
from shared.runtime.loop_watch import LoopWatch
from shared.runtime.memory import keep_freed_memory, settle_heap
from shared.runtime.metrics import Metrics

_log = structlog.get_logger()
T = TypeVar("T")
S = TypeVar("S", bound=Settings)

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_SETTINGS: Final = 2


class Service:
    """What a composition root holds of its process. Made by `run`."""

    def __init__(self, name: str, drain_timeout_s: float, at_ready: Callable[[], None] = lambda: None) -> None:
        """`at_ready` is called once, when the start is over."""
        self.name = name
        self._at_ready = at_ready
        self.clock = SystemClock()
        self.metrics = Metrics(name)
        self.loop_watch = LoopWatch(self.metrics)
        self.draining = asyncio.Event()
        """Set once: stop taking work."""
        self._drain_timeout_s = drain_timeout_s
        self._hurry = asyncio.Event()
        self._failure: BaseException | None = None
        self._phase = "starting"
        self._is_ready = False
        self._checks: list[Callable[[], str | None]] = []
        self._draining_tasks: set[asyncio.Task[Any]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closers: list[tuple[str, Callable[[], Awaitable[None]]]] = []

    # -- for the composition root --------------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, T], name: str, *, drains: bool = False) -> asyncio.Task[T]:
        """A task that the service owns. Its failure drains and ends the process with exit code 1; its end does not.

        `drains`: it watches `draining` and ends by itself.
        """
        task = asyncio.create_task(work, name=name)
        (self._draining_tasks if drains else self._tasks).add(task)
        task.add_done_callback(self._ended)
        return task

    def on_stop(self, name: str, close: Callable[[], Awaitable[None]]) -> None:
        """`close` runs after all tasks have ended; the last one registered runs first."""
        self._closers.append((name, close))

    def waiting_for(self, what: str) -> None:
        """Says in `/readyz` and in the log what takes time now."""
        self._phase = f"waiting for {what}"
        _log.info("service.waiting", what=what)

    def ready(self) -> None:
        """The process can do its work."""
        if not self._is_ready:
            self._is_ready = True
            self._at_ready()
            # Not this callback: what `at_ready` takes is still the start.
            asyncio.get_running_loop().call_soon(self.loop_watch.begin)
            _log.info("service.ready")

    def require(self, missing: Callable[[], str | None]) -> None:
        """A condition of readiness that may come and go: `missing()` says what is wrong, None when nothing is."""
        self._checks.append(missing)

    def missing(self) -> str | None:
        """Why the process is not ready; None when it is."""
        if self.draining.is_set():
            return "draining"
        if not self._is_ready:
            return self._phase
        return next((reason for check in self._checks if (reason := check()) is not None), None)

    # -- for `run` -----------------------------------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """Begins to drain; the second time, cuts it short."""
        if self.draining.is_set():
            self._hurry.set()
            return
        _log.info("service.draining", reason=reason)
        self.draining.set()

    async def live(self, starting: Coroutine[Any, Any, None]) -> None:
        """From the start to the end of all tasks. Raises what the start or a task failed with."""
        start = self.spawn(starting, "start")
        await self.draining.wait()
        start.cancel()
        await self._drain()
        for task in self._tasks | self._draining_tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._draining_tasks, return_exceptions=True)
        await self._close()
        if self._failure is not None:
            raise self._failure

    async def _drain(self) -> None:
        if not self._draining_tasks:
            return
        hurry = asyncio.create_task(self._hurry.wait())
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                while self._draining_tasks and not hurry.done():
                    await asyncio.wait({hurry, *self._draining_tasks}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            pass
        finally:
            hurry.cancel()
        if self._draining_tasks:
            _log.warning("service.abandoned", tasks=sorted(task.get_name() for task in self._draining_tasks))

    async def _close(self) -> None:
        while self._closers:
            name, close = self._closers.pop()
            try:
                async with asyncio.timeout(limits.CLOSE_TIMEOUT_S):
                    await close()
            except TimeoutError:
                _log.warning("service.close_abandoned", what=name)
            except Exception:  # noqa: BLE001 - the others must still close
                _log.exception("service.close_failed", what=name)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._draining_tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if self._failure is None:
            self._failure = error
        else:
            _log.error("task.failed", task=task.get_name(), exc_info=error)
        if not self.draining.is_set():
            self.stop(f"{task.get_name()} failed")


def run(kind: type[S], start: Callable[[Service, S], Coroutine[Any, Any, None]]) -> int:
    """The whole process; returns its exit code: 0 drained, 1 failed, 2 wrong settings.

    Reads the settings, sets up logs, checks the golden vectors of the block keys, serves health, handles SIGTERM and
    SIGINT.
    """
    log.configure(kind.role, "info")
    try:
        settings = load(kind)
        log.configure(kind.role, settings.log_level)
        block.check_golden()
        if isinstance(settings, WorkerSettings) and settings.heap_kept_bytes:
            keep_freed_memory(settings.heap_kept_bytes)
        _log.info("service.starting", settings=settings.effective())
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(kind.role, settings, start))
    except SettingsError as error:
        _log.error("service.refused", error=error.message)
        return EXIT_SETTINGS
    except Exception as error:  # noqa: BLE001 - the last word of the process is its exit code
        _log.exception("service.failed", error=f"{type(error).__name__}: {error}")
        return EXIT_FAILED
    _log.info("service.stopped")
    return EXIT_OK


async def _serve(name: str, settings: S, start: Callable[[Service, S], Coroutine[Any, Any, None]]) -> None:
    service = Service(name, settings.drain_timeout_s, settle_heap)
    loop = asyncio.get_running_loop()
    service.loop_watch.install(loop)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.stop, number.name)
    health = HealthServer(service.missing, service.metrics.render)
    port = await health.start(settings.health_port)
    try:
        if settings.health_port_file is not None:
            write_port(settings.health_port_file, port)
        _log.info("health.listening", port=port)
        await service.live(start(service, settings))
    finally:
        await health.close()


async def as_internal_error(work: Awaitable[T]) -> T:
    """The supervision of one message: an exception outside of the tree is a bug, logged with its place, and becomes
    InternalError. It costs its message, not the process with everybody else's requests."""
    try:
        return await work
    except DeepServeError:
        raise
    except Exception as error:
        _log.error("handler.failed", exc_info=error)
        raise InternalError("internal error") from error
