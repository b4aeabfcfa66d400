"""What all benches share: spread of samples, interleaving, the machine's line, tables, aims, JSON.

A number here is a median with its range, since the machines that run this are noisy; a claim is a ratio of medians of
runs that were interleaved, since noise comes in waves.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from shared.cli.instance import write_atomic

C = TypeVar("C")


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Of the samples of one case, in the unit of the column."""

    median: float
    low: float
    high: float
    samples: int


class Aim(msgspec.Struct, frozen=True, kw_only=True):
    """A ratio that the design wants. `reached` is what came out, `bound` what was wanted."""

    says: str
    reached: float
    bound: float
    at_least: bool

    @property
    def met(self) -> bool:
        return self.reached >= self.bound if self.at_least else self.reached <= self.bound


class Table(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """`figures` is what goes to the JSON file beside machine and aims."""

    name: str
    tables: tuple[Table, ...]
    figures: dict[str, Any]
    aims: tuple[Aim, ...] = ()
    notes: tuple[str, ...] = ()


def spread(samples: Sequence[float]) -> Spread:
    """Raises ValueError without samples."""
    if not samples:
        raise ValueError("no samples")
    return Spread(median=statistics.median(samples), low=min(samples), high=max(samples), samples=len(samples))


def interleaved(cases: Sequence[C], repetitions: int) -> Iterable[C]:
    """Every case once in each round, each round beginning with another case: no case always runs first."""
    for number in range(repetitions):
        start = number % len(cases)
        yield from cases[start:]
        yield from cases[:start]


def machine() -> str:
    """One line that names what was measured on."""
    memory_gib = psutil.virtual_memory().total / 2**30
    load = os.getloadavg()[0]
    try:
        torch = f", torch {importlib.metadata.version('torch')}"
    except importlib.metadata.PackageNotFoundError:
        torch = ""
    return (
        f"{_processor()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}{torch}, load {load:.1f} at the end"
    )


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def milliseconds(of: Spread) -> str:
    """A median in seconds, shown in milliseconds with its range."""
    return f"{of.median * 1e3:,.0f} ({of.low * 1e3:,.0f}–{of.high * 1e3:,.0f})"


def render(result: Result, machine_line: str) -> str:
    """The whole result for a person."""
    parts = [f"bench {result.name}", machine_line]
    parts += [_table(table) for table in result.tables]
    parts += [_aim(aim) for aim in result.aims]
    parts += list(result.notes)
    return "\n".join(parts) + "\n"


def _table(table: Table) -> str:
    rows = [table.columns, *table.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.columns))]

    def line(row: tuple[str, ...]) -> str:
        first, *rest = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        return "  ".join([first.strip().ljust(widths[0]), *rest])

    rule = "  ".join("-" * width for width in widths)
    return "\n".join(["", table.title, line(table.columns), rule, *(line(row) for row in table.rows), ""])


def _aim(aim: Aim) -> str:
    wanted = f"at least {aim.bound:g}" if aim.at_least else f"at most {aim.bound:g}"
    return f"{'reached' if aim.met else 'MISSED '}  {aim.reached:.2f} ({wanted})  {aim.says}"


def write_json(path: Path, result: Result, machine_line: str) -> None:
    """The figures, for a program."""
    document = {
        "bench": result.name,
        "machine": machine_line,
        "figures": result.figures,
        "aims": [
            {"says": a.says, "reached": a.reached, "bound": a.bound, "at_least": a.at_least, "met": a.met}
            for a in result.aims
        ],
        "notes": result.notes,
    }
    write_atomic(path, msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n", 0o644)
