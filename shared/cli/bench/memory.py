"""`deepserve bench memory`: what each process holds at rest and after traffic, in MiB.

RSS counts shared pages in full, PSS divides them among those who map them (the weights are mapped by all workers), and
the peak is the kernel's own high-water mark of RSS.
"""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec
import psutil

from shared.cli.bench.client import ChatClient
from shared.cli.bench.document import document
from shared.cli.bench.harness import Result, Table
from shared.cli.bench.target import Target
from shared.cli.failure import CommandFailed
from shared.cli.instance import running
from shared.cli.up import MODEL

_MIB: Final = 1024
_CLIENTS: Final = 4


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """In MiB."""

    rss_mib: float
    pss_mib: float
    peak_rss_mib: float


def measure(target: Target, quick: bool) -> Result:
    """Traffic: four clients at once, each with prompts of its own, then the same again from the pool."""
    state = running(target.instance)
    pids = {p.name: p.pid for p in (*state.services, *state.servers) if p.pid is not None}
    rest = {name: read(pid) for name, pid in pids.items()}
    _traffic(target, rounds=1 if quick else 3, prompt_words=300 if quick else 1_500)
    after = {name: read(pid) for name, pid in pids.items()}
    rows = tuple(_row(name, rest[name], after[name]) for name in pids)
    total = sum(m.pss_mib for m in after.values())
    return Result(
        name="memory",
        tables=(
            Table(
                title="MiB of each process",
                columns=(
                    "process",
                    "RSS rest",
                    "RSS after",
                    "PSS rest",
                    "PSS after",
                    "peak rest",
                    "peak after",
                ),
                rows=rows,
            ),
        ),
        figures={name: {"rest": rest[name], "after": after[name]} for name in pids},
        notes=(f"all processes together, shared pages counted once: {total:,.0f} MiB after traffic",),
    )


def read(pid: int) -> Memory:
    """Of a process and its children (Postgres has one for each connection), added up. Raises CommandFailed when the
    process is gone or not ours."""
    try:
        children = [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error as error:
        raise CommandFailed(f"cannot find process {pid}: {error}") from error
    own = [_read(one) for one in (pid, *children)]
    return Memory(
        rss_mib=sum(m.rss_mib for m in own),
        pss_mib=sum(m.pss_mib for m in own),
        peak_rss_mib=sum(m.peak_rss_mib for m in own),
    )


def _read(pid: int) -> Memory:
    """From the kernel's books."""
    try:
        status = _fields(Path(f"/proc/{pid}/status"))
        rollup = _fields(Path(f"/proc/{pid}/smaps_rollup"))
        return Memory(rss_mib=status["VmRSS"] / _MIB, pss_mib=rollup["Pss"] / _MIB, peak_rss_mib=status["VmHWM"] / _MIB)
    except (OSError, KeyError) as error:
        raise CommandFailed(f"cannot read the memory of process {pid}: {error}") from error


def _fields(path: Path) -> dict[str, int]:
    """Lines of the form "Name:  123 kB"."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) == 3 and words[2] == "kB"}


def _traffic(target: Target, *, rounds: int, prompt_words: int) -> None:
    # A word of this vocabulary is one to two tokens; the exact length does not matter here.
    text = document(prompt_words, lambda words: len(words.split()))

    def one_client(number: int) -> None:
        client = ChatClient(target.gateway_url, target.api_key, MODEL)
        try:
            for turn in range(rounds):
                user = f"memory-{number}-{turn}-{uuid.uuid4()}"
                for _ in ("miss", "hit"):
                    client.ask(f"Client {number}. {text}", max_tokens=32, user_id=user)
        finally:
            client.close()

    with ThreadPoolExecutor(_CLIENTS) as pool:
        list(pool.map(one_client, range(_CLIENTS)))


def _row(name: str, rest: Memory, after: Memory) -> tuple[str, ...]:
    numbers = (rest.rss_mib, after.rss_mib, rest.pss_mib, after.pss_mib, rest.peak_rss_mib, after.peak_rss_mib)
    return (name, *(f"{number:,.0f}" for number in numbers))
