"""The fair queue of requests that wait for capacity: pure, time comes as an argument (design, section 5).

Start-time fair queueing over accounts: each account's requests come in their order, and between accounts the one goes
first whose work so far, in tokens, is least. An account that was away gets no credit for it: it starts at the present.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from shared.contracts.errors import Overloaded
from shared.contracts.ids import AccountId, RequestId


@dataclass(frozen=True, slots=True)
class Waiting:
    """`cost`: tokens of work, prompt and most of answer alike."""

    request: RequestId
    account: AccountId
    cost: int
    deadline_s: float


class FairQueue:
    """Bounded over all accounts. Every operation is linear in the number of waiting accounts at most."""

    def __init__(self, requests_max: int) -> None:
        self._requests_max = requests_max
        self._accounts: dict[AccountId, OrderedDict[RequestId, Waiting]] = {}
        self._served: dict[AccountId, float] = {}
        self._present = 0.0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, waiting: Waiting) -> None:
        """Raises Overloaded when the queue is full."""
        if self._count >= self._requests_max:
            raise Overloaded("Too many requests are waiting. Please retry after a brief wait.")
        if waiting.account not in self._accounts:
            self._accounts[waiting.account] = OrderedDict()
            self._served[waiting.account] = max(self._served.get(waiting.account, 0.0), self._present)
        self._accounts[waiting.account][waiting.request] = waiting
        self._count += 1

    def pop(self, now_s: float) -> Waiting | None:
        """The next one to go; those whose deadline is over are left for `expired`. None when nobody waits."""
        live = [account for account, line in self._accounts.items() if self._first(line, now_s)]
        if not live:
            return None
        account = min(live, key=lambda name: self._served[name])
        waiting = self._first(self._accounts[account], now_s)
        if waiting is None:
            return None
        self._present = self._served[account]
        self._served[account] += waiting.cost
        self.remove(account, waiting.request)
        return waiting

    def remove(self, account: AccountId, request: RequestId) -> bool:
        """Whether it was waiting."""
        line = self._accounts.get(account)
        if line is None or line.pop(request, None) is None:
            return False
        self._count -= 1
        if not line:
            del self._accounts[account]
            self._forget_idle()
        return True

    @staticmethod
    def _first(line: OrderedDict[RequestId, Waiting], now_s: float) -> Waiting | None:
        return next((waiting for waiting in line.values() if waiting.deadline_s > now_s), None)

    def _forget_idle(self) -> None:
        """Nobody waits: what was served is past. Else only who is ahead of the present is remembered: an account that
        starts again starts at the present anyway."""
        if not self._accounts:
            self._served, self._present = {}, 0.0
            return
        self._served = {
            account: served
            for account, served in self._served.items()
            if account in self._accounts or served > self._present
        }
