"""Tasks that outlive the request which began them: owned here, bounded by what they do, ended with the process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

from shared.contracts.errors import DeepServeError

log = structlog.get_logger()
T = TypeVar("T")


class Background:
    """Every task is awaited: by whoever began it, or by `close`."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """A failure of the tree that nobody waits for is logged."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def close(self, timeout_s: float) -> None:
        """Waits for what still runs, then cancels it."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), DeepServeError):
            log.debug("background.failed", task=task.get_name(), error=error.message)
