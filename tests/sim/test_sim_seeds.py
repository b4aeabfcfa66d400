"""Whole services in simulated worlds: calm ones, troubled ones, found ones, and the same seed twice."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.sim.found import FOUND, Found
from tests.sim.plan import draw
from tests.sim.simulation import Verdict, simulate

PROGRAM = """
import hashlib, sys
from tests.sim.plan import draw
from tests.sim.simulation import simulate
for seed in sys.argv[1:]:
    print(seed, hashlib.sha256(simulate(draw(int(seed))).timeline.encode()).hexdigest())
"""


def clean(verdict: Verdict) -> None:
    assert verdict.clean, "\n".join([*verdict.faults, verdict.timeline])


@pytest.mark.parametrize("seed", range(8))
def test_nothing_goes_wrong_where_nothing_is_wrong(seed: int) -> None:
    verdict = simulate(draw(seed, troubles=False))
    clean(verdict)
    assert verdict.requests >= 2


@pytest.mark.parametrize("seed", range(2, 18))
def test_troubles_cost_time_and_nothing_else(seed: int) -> None:
    clean(simulate(draw(seed)))


@pytest.mark.parametrize("found", FOUND, ids=lambda found: found.name)
def test_what_was_found_stays_fixed(found: Found) -> None:
    clean(simulate(found.plan))


def test_a_seed_is_one_run_whatever_the_process_hashes() -> None:
    seeds = ("3", "7", "12")
    runs = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM, *order],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        for hash_seed, order in (("0", seeds), ("4242", seeds[::-1]))
    ]
    first, second = (sorted(run.stdout.splitlines()) for run in runs)
    assert len(first) == len(seeds)
    assert first == second
