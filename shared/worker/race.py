"""Work that an event may end early."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def unless(ended: asyncio.Future[Any], work: Coroutine[Any, Any, T]) -> T | None:
    """`work`'s result; None when `ended` came first. The work is then cancelled and has stopped when this returns.

    Where both happen at once the result is returned: the caller looks at `ended` first. Raises what `work` raised.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    return None if task.cancelled() else task.result()


async def first_of(*events: asyncio.Future[Any], timeout_s: float) -> None:
    """Until one of `events` has come, at most `timeout_s`; the caller looks which."""
    await asyncio.wait(events, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
