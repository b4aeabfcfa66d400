"""`deepserve logs`: the last lines of the processes' logs, and what follows."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from shared.cli import output
from shared.cli.failure import EXIT_OK, CommandFailed, UsageError
from shared.cli.instance import Instance
from shared.cli.process import tail

_FOLLOW_S = 0.2


def logs(instance: Instance, service: str | None, *, lines: int, follow: bool) -> int:
    """`service` is a log's name ("prefill-1") or its beginning ("prefill"). Following ends with Ctrl-C, or when nobody
    reads any more."""
    if not instance.logs.is_dir():
        raise CommandFailed(f"{instance.data} has no logs; nothing was ever started there")
    found = instance.all_logs()
    chosen = {n: path for n, path in found.items() if service is None or service in (n, n.split("-")[0])}
    if not chosen:
        raise UsageError(f"no log of {service!r}; there are: {', '.join(found) or 'none yet'}")
    prefixes = {name: f"{name}: " if len(chosen) > 1 else "" for name in chosen}
    offsets = {name: path.stat().st_size for name, path in chosen.items()}
    for name, path in chosen.items():
        _show(prefixes[name], tail(path, lines))
    while follow and not output.reader_left():
        time.sleep(_FOLLOW_S)
        for name, path in chosen.items():
            offsets[name] = _show_news(prefixes[name], path, offsets[name])
    return EXIT_OK


def _show(prefix: str, text: str) -> None:
    for line in text.splitlines():
        sys.stdout.write(f"{prefix}{line}\n")
    sys.stdout.flush()


def _show_news(prefix: str, path: Path, offset: int) -> int:
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
    _show(prefix, whole.decode(errors="replace"))
    return offset + len(whole) + len(newline)
