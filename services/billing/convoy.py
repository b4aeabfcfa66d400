"""Money acts of one account that wait for each other go together: one transaction, one lock, one commit.

Acts of an account follow one another anyway, since each locks its balances first. Alone, each would pay for a
connection, a lock and a commit while the others wait in the database and keep its connections from other accounts.
Here they wait in line in this process: the first takes those behind it along. Nobody is answered before the commit.

An act that is refused has written nothing (its one write is its last step), so that the others of its transaction
stand. Where one breaks the transaction, each is tried again by its own caller: no act fails for another's sake.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection

from shared.contracts import limits
from shared.contracts.errors import DeadlineExceeded, DeepServeError, Overloaded
from shared.contracts.ids import AccountId

T = TypeVar("T")
Work = Callable[[AsyncConnection], Awaitable[T]]


class Transactions(Protocol):
    """Of `shared.runtime.database.Database`."""

    async def transact(self, work: Work[T]) -> T: ...


@dataclass(eq=False, slots=True)
class _Act:
    """One in line. `result` and `error` are those of the last try; `done`: they count."""

    work: Work[Any]
    done: bool = False
    result: Any = None
    error: DeepServeError | None = None


@dataclass(slots=True)
class _Line:
    """Of one account: who waits, in order. The lock is whose turn it is, in the same order."""

    waiting: deque[_Act] = field(default_factory=deque)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    callers: int = 0


class Convoy:
    def __init__(self, database: Transactions) -> None:
        self._database = database
        self._lines: dict[AccountId, _Line] = {}

    async def act(self, account: AccountId, work: Work[T]) -> T:
        """As `Database.transact`, in the account's order. `work` locks the account's balances first, and writes, if at
        all, in one statement that is its last. It may run several times.

        Raises what `work` raises, and Overloaded: the database is away, or the line does not move for
        limits.ACT_WAIT_S; DeadlineExceeded where the act was under way by then, and may still be done.
        """
        line = self._lines.setdefault(account, _Line())
        mine = _Act(work)
        line.waiting.append(mine)
        line.callers += 1
        try:
            await _take_turn(line, mine)
            try:
                if not mine.done:
                    await self._drive(line, mine)
            finally:
                line.turn.release()
        finally:
            line.callers -= 1
            if mine in line.waiting:
                line.waiting.remove(mine)
            if not line.callers:
                del self._lines[account]
        if mine.error is not None:
            raise mine.error
        result: T = mine.result
        return result

    async def _drive(self, line: _Line, mine: _Act) -> None:
        """The oldest of the line, `mine` first among them, with as many as may go together."""
        together = [line.waiting.popleft() for _ in range(min(len(line.waiting), limits.ACTS_TOGETHER_MAX))]
        try:
            (error,) = await asyncio.gather(self._commit(together), return_exceptions=True)
            if error is None:
                return
            if isinstance(error, DeepServeError) or len(together) == 1:
                raise error  # Of the transaction itself: acts keep their own.
            await self._commit([mine])
        finally:
            # What was not decided (a failure, a cancel) goes back to its place; its own caller tries next.
            line.waiting.extendleft(reversed([act for act in together if not act.done and act is not mine]))

    async def _commit(self, together: list[_Act]) -> None:
        async def all_of_them(connection: AsyncConnection) -> None:
            for act in together:
                act.result = act.error = None
                try:
                    act.result = await act.work(connection)
                except DeepServeError as error:
                    act.error = error

        await self._database.transact(all_of_them)
        for act in together:
            act.done = True


async def _take_turn(line: _Line, mine: _Act) -> None:
    try:
        async with asyncio.timeout(limits.ACT_WAIT_S):
            await line.turn.acquire()
    except TimeoutError as error:
        if mine in line.waiting:
            raise Overloaded("too many requests of this account wait for its books") from error
        raise DeadlineExceeded("the books did not answer in time") from error
