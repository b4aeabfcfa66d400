"""The real clock behind the port; everything that decides by time takes it as an argument."""

from __future__ import annotations

import time


class SystemClock:
    """Implements `ports.Clock`."""

    def now_s(self) -> float:
        return time.time()

    def monotonic_s(self) -> float:
        return time.monotonic()
