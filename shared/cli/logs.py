"""`deepserve logs`: the last lines of the processes' logs, and what follows."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from shared.cli.failure import EXIT_OK, CommandFailed, UsageError
from shared.cli.instance import Instance
from shared.cli.process import tail

_FOLLOW_S = 0.2


def logs(instance: Instance, service: str | None, *, lines: int, follow: bool) -> int:
    """`service` is a log's name ("prefill-1") or its beginning ("prefill"). Following ends with Ctrl-C."""
    if not instance.logs.is_dir():
        raise CommandFailed(f"{instance.data} has no logs; nothing was ever started there")
    found = sorted(instance.logs.glob("*.log"))
    chosen = [p for p in found if service is None or p.stem == service or p.stem.split("-")[0] == service]
    if not chosen:
        known = ", ".join(p.stem for p in found) or "none yet"
        raise UsageError(f"no log of {service!r}; there are: {known}")
    offsets = {path: path.stat().st_size for path in chosen}
    for path in chosen:
        _show(path, tail(path, lines), many=len(chosen) > 1)
    while follow:
        for path in chosen:
            offsets[path] = _show_news(path, offsets[path], many=len(chosen) > 1)
        time.sleep(_FOLLOW_S)
    return EXIT_OK


def _show(path: Path, text: str, *, many: bool) -> None:
    prefix = f"{path.stem}: " if many else ""
    for line in text.splitlines():
        sys.stdout.write(f"{prefix}{line}\n")
    sys.stdout.flush()


def _show_news(path: Path, offset: int, *, many: bool) -> int:
    """Prints whole lines after `offset`; a log that became shorter was rotated and is read from its start."""
    size = path.stat().st_size
    if size < offset:
        offset = 0
    if size == offset:
        return offset
    with path.open("rb") as file:
        file.seek(offset)
        fresh = file.read(size - offset)
    whole, newline, _ = fresh.rpartition(b"\n")
    _show(path, whole.decode(errors="replace"), many=many)
    return offset + len(whole) + len(newline)
