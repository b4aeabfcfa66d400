"""Who may enter, and how much may be under way: pure counting (design, section 5; reference, row 48).

An account's concurrency counts from the request's arrival to its end, over all its keys, in this gateway. What is under
way is bounded by what workers advertise, divided by the living gateways: JetStream holds a short backlog at most.
"""

from __future__ import annotations

from collections import Counter

from shared.contracts.errors import TooManyRequests
from shared.contracts.ids import AccountId


class Accounts:
    """Requests of each account between arrival and end."""

    def __init__(self) -> None:
        self._running: Counter[AccountId] = Counter()

    def enter(self, account: AccountId, concurrency: int) -> None:
        """Raises TooManyRequests at the account's limit."""
        if self._running[account] >= concurrency:
            raise TooManyRequests(
                f"Your account has reached its limit of {concurrency} concurrent requests. "
                "Please retry when one of them has ended."
            )
        self._running[account] += 1

    def leave(self, account: AccountId) -> None:
        self._running[account] -= 1
        if self._running[account] <= 0:
            del self._running[account]

    def running(self, account: AccountId) -> int:
        return self._running.get(account, 0)


class Capacity:
    """Requests that this gateway has under way, against what the workers take."""

    def __init__(self) -> None:
        self.prefilling = 0
        self.decoding = 0

    def admits(self, *, prefill: int, decode: int, gateways: int) -> bool:
        """Whether one more may be published. `prefill`, `decode`: capacities of the living workers; both stages need
        one. Prefill may have as much waiting as running, so that a worker that finishes finds the next one; answers
        may exceed the decode slots by no more than prefill can finish meanwhile."""
        if not prefill or not decode:
            return False
        share = max(gateways, 1)
        prefill_share, decode_share = -(-prefill // share), -(-decode // share)
        return self.prefilling < 2 * prefill_share and self.prefilling + self.decoding < decode_share + prefill_share

    def started(self) -> None:
        self.prefilling += 1

    def handed_off(self) -> None:
        self.prefilling -= 1
        self.decoding += 1

    def ended(self, *, handed_off: bool) -> None:
        if handed_off:
            self.decoding -= 1
        else:
            self.prefilling -= 1
