"""`deepserve bench [NAME]`: runs one bench and shows its result."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from shared.cli.bench import memory, plane, prefix
from shared.cli.bench.catalogue import BENCHES
from shared.cli.bench.harness import Result, machine, render, write_json
from shared.cli.bench.target import Own, Target, target
from shared.cli.failure import EXIT_OK, CommandFailed
from shared.cli.instance import Instance

RUNS: Final[Mapping[str, Callable[[Target, bool], Result]]] = {
    "prefix": prefix.measure,
    "plane": plane.measure,
    "memory": memory.measure,
}
OWN: Final[Mapping[str, Own]] = {"plane": Own(engine="hash", variables=plane.VARIABLES)}


def bench(instance: Instance, name: str | None, json_file: Path | None, *, quick: bool) -> int:
    """Exit code 0 when it could be measured, whatever came out: aims are printed, not enforced."""
    if name is None:
        for known, says in BENCHES.items():
            sys.stdout.write(f"{known:10s} {says}\n")
        return EXIT_OK
    with target(instance, OWN.get(name, Own())) as measured:
        result = RUNS[name](measured, quick)
    line = machine()
    sys.stdout.write(render(result, line))
    if json_file is not None:
        try:
            write_json(json_file, result, line)
        except OSError as error:
            raise CommandFailed(f"cannot write {json_file}: {error.strerror}") from error
    return EXIT_OK
