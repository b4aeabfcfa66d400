"""The instance that a bench measures: the one that runs in the data directory, else one of its own for the time."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from shared.cli import up
from shared.cli.down import down
from shared.cli.failure import CommandFailed
from shared.cli.instance import Instance, running
from shared.cli.status import Report, report
from shared.cli.supervisor import Options

_OWN_START_TIMEOUT_S: Final = 600.0


@dataclass(frozen=True)
class Own:
    """How an instance of our own is started. `variables` of its processes."""

    engine: str = "torch"
    variables: Mapping[str, str] = field(default_factory=dict)


class Target:
    """A ready instance, seen as its owner."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        found = self.look()
        if found.gateway_url is None or found.api_key is None:
            raise CommandFailed(f"the instance in {instance.data} is not ready, or its secrets are not yours to read")
        self.gateway_url = found.gateway_url
        self.api_key = found.api_key

    def look(self) -> Report:
        return asyncio.run(report(self.instance, running(self.instance)))


@contextmanager
def target(instance: Instance, how: Own) -> Iterator[Target]:
    """The caller's running instance is measured as it is; one of our own is stopped and removed afterwards."""
    if instance.holder() is not None:
        yield Target(instance)
        return
    sys.stderr.write(f"no instance runs in {instance.data}: measuring one of our own\n")
    with tempfile.TemporaryDirectory(prefix="deepserve-bench-") as folder:
        own = Instance(Path(folder) / "data")
        variables = {**how.variables, "DEEPSERVE_PORT": "0", "DEEPSERVE_ENGINE": how.engine}
        up.detach(
            own, Options(prefill=1, decode=1, engine=how.engine, variables=variables), timeout_s=_OWN_START_TIMEOUT_S
        )
        try:
            yield Target(own)
        finally:
            down(own)
