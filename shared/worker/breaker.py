"""A circuit breaker: after enough failures in a row the store is left alone for a while. Pure, time is an argument.

While it is open, reads are misses and writes are dropped: slower and correct. After limits.STORE_BREAKER_OPEN_S one
call is let through; its success closes the breaker, its failure opens it again.
"""

from __future__ import annotations

from shared.contracts import limits


class Breaker:
    def __init__(
        self, failures_max: int = limits.STORE_BREAKER_FAILURES, open_s: float = limits.STORE_BREAKER_OPEN_S
    ) -> None:
        self._failures_max = failures_max
        self._open_s = open_s
        self._failures = 0
        self._retry_at_s: float | None = None

    def allows(self, now_s: float) -> bool:
        """Whether a call may be made. Where the breaker is open and its time is over, this admits one probe."""
        if self._retry_at_s is None:
            return True
        if now_s < self._retry_at_s:
            return False
        self._retry_at_s = now_s + self._open_s
        return True

    def is_open(self) -> bool:
        return self._retry_at_s is not None

    def succeeded(self) -> None:
        self._failures = 0
        self._retry_at_s = None

    def failed(self, now_s: float) -> None:
        self._failures += 1
        if self._failures >= self._failures_max:
            self._retry_at_s = now_s + self._open_s
