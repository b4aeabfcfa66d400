"""Pages promised to sequences before the engine is asked for them: first come, first served.

Admission counts what a sequence will ever need (loaded blocks and new tokens), so that a loaded prefix can always be
stepped to its end. A worker reads no payload for a sequence that would find no room.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shared.contracts.errors import OutOfPages


class PageGate:
    def __init__(self, pages: int) -> None:
        self._pages = pages
        self._free = pages
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def free(self) -> int:
        return self._free

    @asynccontextmanager
    async def hold(self, pages: int, timeout_s: float) -> AsyncIterator[None]:
        """Holds `pages` while the block runs. Raises OutOfPages when they never fit or did not come free in time."""
        await self._take(pages, timeout_s)
        try:
            yield
        finally:
            self._free += pages
            self._admit()

    async def _take(self, pages: int, timeout_s: float) -> None:
        if pages > self._pages:
            raise OutOfPages(f"{pages} pages never fit into {self._pages}")
        entry = (pages, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        self._admit()
        taken = False
        try:
            async with asyncio.timeout(timeout_s):
                await entry[1]
            taken = True
        except TimeoutError as error:
            raise OutOfPages(f"{pages} pages did not come free in {timeout_s:g} s") from error
        finally:
            if not taken:
                self._leave(entry)

    def _admit(self) -> None:
        while self._waiting and (self._waiting[0][1].done() or self._waiting[0][0] <= self._free):
            pages, admitted = self._waiting.popleft()
            if not admitted.done():
                self._free -= pages
                admitted.set_result(None)

    def _leave(self, entry: tuple[int, asyncio.Future[None]]) -> None:
        """After a wait that ended early: gives back what came at the same moment, and lets those behind come up."""
        pages, admitted = entry
        if admitted.done() and not admitted.cancelled():
            self._free += pages
        admitted.cancel()
        self._admit()
