"""What a person sees while an instance starts, runs and stops: a line for each event, with its second."""

from __future__ import annotations

import sys
import time


class Reporter:
    """Writes to standard error, so that standard output stays for what a program may read."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    def say(self, line: str) -> None:
        sys.stderr.write(f"{self.elapsed_s:7.1f} s  {line}\n")
        sys.stderr.flush()
