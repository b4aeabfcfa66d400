"""Freed memory stays with the process: blocks of the same size are not faulted in again."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import resource, sys
from shared.runtime.memory import keep_freed_memory

assert keep_freed_memory(256 * 2**20)

def hold_and_free():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [b"x" * 1_500_000 for _ in range(20)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(hold_and_free(), hold_and_free(), hold_and_free())
"""


def test_a_second_round_of_blocks_costs_no_page_faults() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    first, _, third = map(int, done.stdout.split())
    assert first > 20 * 1_500_000 / 4096 * 0.9
    assert third < first / 20
