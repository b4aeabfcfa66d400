"""Tasks beside the requests (writes, touches, deletions): owned, counted on, ended with the worker.

They end in their own errors of the tree; any other error is a bug, and `run` raises it, so that the worker ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Background:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def run(self) -> None:
        """Until cancelled; raises the first error of a task."""
        await asyncio.shield(self._failed)

    async def close(self, timeout_s: float) -> None:
        """Lets what runs finish within `timeout_s`, cancels the rest."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)
        rest = set(self._tasks)
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest)
        self._failed.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)
