"""What an instance's processes say of themselves between two moments: processor time, settlements, held event loops."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import msgspec
import psutil

from shared.cli import probe
from shared.cli.failure import CommandFailed
from shared.cli.instance import Instance, running
from shared.contracts import limits

_HELD_MAX: Final = "deepserve_loop_held_max_seconds"
_HELD_COUNT: Final = "deepserve_loop_held_seconds_count"
_HELD_BELOW: Final = f'deepserve_loop_held_seconds_bucket{{le="{limits.LOOP_HELD_S:g}"}}'
_SETTLED: Final = "deepserve_settlement_seconds_count"
_SETTLED_S: Final = "deepserve_settlement_seconds_sum"


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """By process name. `cpu_s`: servers too, their children counted in. `held_over`: callbacks that held the loop for
    more than limits.LOOP_HELD_S. Settlements are those of all workers."""

    at_s: float
    cpu_s: dict[str, float]
    held_max_s: dict[str, float]
    held_over: dict[str, float]
    settlements: float
    settlement_s: float


class Gauges:
    def __init__(self, instance: Instance) -> None:
        self._instance = instance

    def read(self) -> Reading:
        """Raises CommandFailed when a process is gone or does not answer."""
        state = running(self._instance)
        cpu_s = {p.name: _cpu_s(p.pid) for p in (*state.services, *state.servers) if p.pid is not None}
        ports = {p.name: probe.read_port(self._instance.port_file(p.name)) or 0 for p in state.services}
        return reading(cpu_s, asyncio.run(_metrics(ports)), time.perf_counter())


def reading(cpu_s: dict[str, float], metrics: dict[str, dict[str, float]], at_s: float) -> Reading:
    """`metrics`: of each service, its samples by name with labels."""
    return Reading(
        at_s=at_s,
        cpu_s=cpu_s,
        held_max_s={name: found[_HELD_MAX] for name, found in metrics.items()},
        held_over={name: found[_HELD_COUNT] - found[_HELD_BELOW] for name, found in metrics.items()},
        settlements=sum(found.get(_SETTLED, 0.0) for found in metrics.values()),
        settlement_s=sum(found.get(_SETTLED_S, 0.0) for found in metrics.values()),
    )


def parse(text: str) -> dict[str, float]:
    """Prometheus' text: name with labels → value. Ours have no time stamps."""
    lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


async def _metrics(ports: dict[str, int]) -> dict[str, dict[str, float]]:
    found = {}
    for name, port in ports.items():
        answer = await probe.ask(port, "/metrics")
        if answer.status != 200:
            raise CommandFailed(f"{name} does not tell its metrics: {answer.body or 'no answer'}")
        found[name] = parse(answer.body)
    return found


def _cpu_s(pid: int) -> float:
    """Of a process and its children, which Postgres has one of for each connection."""
    try:
        process = psutil.Process(pid)
        return sum(_own_cpu_s(one) for one in (process, *process.children(recursive=True)))
    except psutil.Error as error:
        raise CommandFailed(f"cannot find process {pid}: {error}") from error


def _own_cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0  # A child that ended meanwhile.
    return float(times.user + times.system)
