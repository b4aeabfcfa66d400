"""What `deepserve bench` can measure. Names only: a bench is imported when it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

BENCHES: Final[Mapping[str, str]] = {
    "prefix": "time to first token of a prefix miss against a hit, with the hit's parts",
    "plane": "requests/s, added latency and where it goes, without a model's work",
    "memory": "memory of each process at rest and after traffic",
}
