"""`make sim SEED=17` replays one seed with its timeline; `make sim SEEDS=0:2000` runs a range on all cores.

A failing seed is shrunk before it is shown. Exit code 1 when any seed was not clean.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from tests.sim.plan import draw
from tests.sim.shrink import shrink
from tests.sim.simulation import Verdict, simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="make sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this seed and print its timeline")
    parser.add_argument("--seeds", default="0:200", help="FIRST:END, a range of seeds (default 0:200)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="seeds run at once")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return replay(arguments.seed)
    first, _, end = arguments.seeds.partition(":")
    return sweep(range(int(first), int(end)), arguments.processes)


def replay(seed: int) -> int:
    verdict = simulate(draw(seed))
    if not verdict.clean:
        print(f"seed {seed}: {len(verdict.faults)} faults; shrinking", file=sys.stderr)
        verdict = shrink(verdict)
    show(verdict)
    return 0 if verdict.clean else 1


def show(verdict: Verdict) -> None:
    print(verdict.timeline)
    for trouble in verdict.plan.troubles:
        print("trouble", trouble)
    for fault in verdict.faults:
        print("FAULT", fault)
    print(f"{verdict.requests} requests, {verdict.steps} steps, {verdict.virtual_s:.0f} virtual seconds")
    print("clean" if verdict.clean else "not clean")


def faults_of(seed: int) -> tuple[int, list[str], int]:
    verdict = simulate(draw(seed))
    return seed, verdict.faults, verdict.requests


def sweep(seeds: range, processes: int) -> int:
    started_s, bad, requests = time.monotonic(), [], 0
    with ProcessPoolExecutor(processes) as pool:
        for seed, faults, served in pool.map(faults_of, seeds, chunksize=4):
            requests += served
            if faults:
                bad.append(seed)
                print(f"seed {seed}: {faults[0]}", flush=True)
    took_s = time.monotonic() - started_s
    print(f"{len(seeds)} seeds, {requests} requests, {len(bad)} not clean, {took_s:.0f} s")
    if bad:
        replay(bad[0])
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
