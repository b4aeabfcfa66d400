"""A database server in memory: down, slow, or lost in the middle of a call, as hooks say.

A call has its effect at one instant, at the server: a caller that died before it never asked, one that died after it
never learns. Owns no data.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from shared.contracts.errors import Overloaded
from tests.fakes.wire import CALM, Link, Wire
from tests.sim import process

T = TypeVar("T")
TIMEOUT_S: Final = 3.0
"""Of a call that was lost on its way, or whose answer was; the real pool ends its statements by bounds of its own."""


class MemoryServer:
    """`failure(name)` is asked at each call: an error to be raised in place of the effect."""

    def __init__(self, *, wire: Wire = CALM) -> None:
        self.up = True
        self.wire = wire
        self.failure: Callable[[str], Exception | None] = lambda name: None

    async def call(self, name: str, work: Callable[[], T]) -> T:
        """`work` at one instant. Raises what it raises, and Overloaded where the server did not answer."""
        process.check_alive()
        if not self.up:
            raise Overloaded("the database is down")
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def act() -> None:
            if not self.up:
                return
            result: T | None = None
            error = self.failure(name)
            if error is None:
                try:
                    result = work()
                except Exception as raised:  # noqa: BLE001  handed to the caller
                    error = raised
            for delay_s in self.wire.legs("answer", name):
                Link().carry(delay_s, _answer, answer, result, error)

        for delay_s in self.wire.legs("call", name):
            Link().carry(delay_s, act)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await answer
        except TimeoutError as error:
            raise Overloaded("the database did not answer") from error


def _answer(answer: asyncio.Future[T], result: T, error: Exception | None) -> None:
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)
