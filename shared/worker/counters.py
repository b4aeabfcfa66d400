"""Named counts of a worker: misses by reason, writes dropped, objects lost in a commit. For logs and tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


class Counters:
    """Names are `what.reason`; a count only rises."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        self._counts[name] += count

    def snapshot(self) -> Mapping[str, int]:
        return dict(self._counts)
