"""How long a crashed service waits before it is started again. Pure: time comes in as an argument."""

from __future__ import annotations

from dataclasses import dataclass

from shared.contracts import limits


@dataclass(frozen=True)
class Backoff:
    """`crashes`: in a row. A service that stayed up for `limits.RESTART_RESET_S` starts again from the first wait."""

    crashes: int = 0

    def crashed(self, uptime_s: float) -> Backoff:
        """After one more crash, `uptime_s` after the service was ready (0 if it never was)."""
        before = 0 if uptime_s >= limits.RESTART_RESET_S else self.crashes
        return Backoff(before + 1)

    @property
    def wait_s(self) -> float:
        """Doubles from `limits.RESTART_FIRST_S` with each crash, up to `limits.RESTART_MAX_S`."""
        if self.crashes == 0:
            return 0.0
        # The exponent is bounded, so that a service that crashes for weeks never overflows a float.
        doublings = min(self.crashes - 1, 32)
        return min(limits.RESTART_FIRST_S * 2.0**doublings, limits.RESTART_MAX_S)
