"""The world outside a simulation, pinned: entropy comes from the seed, clocks show virtual time, nobody sleeps.

Parts take time and randomness through ports; this catches what a library or a part reads by itself. It patches names in
the standard library for the length of one simulation, and nothing else may run meanwhile.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol
from unittest import mock

from tests.sim import threads


class HasTime(Protocol):
    seed: int

    def time(self) -> float: ...


@contextmanager
def world(loop: HasTime, epoch_s: float) -> Iterator[None]:
    """Everything that could tell two runs of one seed apart, for the length of the block."""
    entropy = random.Random(f"{loop.seed}/entropy")
    names: list[tuple[Any, str, Callable[..., Any]]] = [
        (os, "urandom", entropy.randbytes),
        (random, "_urandom", entropy.randbytes),
        (time, "time", lambda: epoch_s + loop.time()),
        (time, "time_ns", lambda: int((epoch_s + loop.time()) * 1e9)),
        (time, "sleep", threads.sleep),
    ]
    for name in ("monotonic", "perf_counter", "thread_time", "process_time"):
        names.append((time, name, loop.time))
        names.append((time, f"{name}_ns", lambda: int(loop.time() * 1e9)))
    state = random.getstate()
    with ExitStack() as patches:
        for owner, name, call in names:
            patches.enter_context(mock.patch.object(owner, name, call))
        random.seed(f"{loop.seed}/global")
        try:
            yield
        finally:
            random.setstate(state)
