"""Work that an event may end early, and tasks that are surely stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from shared.contracts import limits

T = TypeVar("T")


async def stop(task: asyncio.Task[Any]) -> None:
    """Cancels it until it has ended; its result is left to whoever owns it. `asyncio.wait_for` of Python 3.11, which
    libraries use, swallows a cancel that comes together with its result: the task is then told again."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=limits.STOP_AGAIN_S)


async def unless(ended: asyncio.Future[Any], work: Coroutine[Any, Any, T]) -> T | None:
    """`work`'s result; None when `ended` came first. The work is then cancelled and has stopped when this returns.

    Where both happen at once the result is returned: the caller looks at `ended` first. Raises what `work` raised.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await stop(task)
    return None if task.cancelled() else task.result()


async def first_of(*events: asyncio.Future[Any], timeout_s: float) -> None:
    """Until one of `events` has come, at most `timeout_s`; the caller looks which."""
    await asyncio.wait(events, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
