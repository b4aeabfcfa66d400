"""`deepserve down`: asks the supervisor to drain, waits for it, and names what did not end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

from shared.cli.failure import EXIT_OK, CommandFailed
from shared.cli.instance import Instance, InstanceState, left_over
from shared.cli.process import alive, end_orphan
from shared.contracts import limits


def down(instance: Instance, timeout_s: float = limits.DOWN_TIMEOUT_S) -> int:
    """Idempotent: nothing to stop is no failure. Raises CommandFailed when something still runs at the deadline."""
    pid = instance.holder()
    state = instance.read_state()
    if pid is None:
        return _after_a_killed_supervisor(instance, state)
    if pid == 0:
        raise CommandFailed(f"the instance in {instance.data} has only just begun to start; try again in a moment")
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        pass
    except PermissionError as error:
        raise CommandFailed(f"the instance in {instance.data} belongs to another user (process {pid})") from error
    begun_s = time.monotonic()
    while instance.holder() == pid:
        if time.monotonic() - begun_s > timeout_s:
            left = ", ".join(f"{p.name} ({p.pid})" for p in left_over(state))
            still = f"still running: {left or 'nothing else'}"
            raise CommandFailed(f"the supervisor (process {pid}) did not end within {timeout_s:.0f} s; {still}")
        time.sleep(limits.READY_POLL_S)
    if survivors := left_over(state):
        names = ", ".join(f"{p.name} ({p.pid})" for p in survivors)
        raise CommandFailed(f"the supervisor ended, but these did not: {names}")
    sys.stdout.write(f"stopped the instance in {instance.data} in {time.monotonic() - begun_s:.1f} s\n")
    return EXIT_OK


async def end_left_over(state: InstanceState | None) -> list[str]:
    """Ends what a killed supervisor left behind, services before servers. Returns the names."""
    if state is None:
        return []
    ended = []
    for processes, first in ((state.services, signal.SIGTERM), (state.servers, signal.SIGINT)):
        for process in processes:
            if process.pid is not None and process.born_s is not None and alive(process.pid, process.born_s):
                await end_orphan(process.pid, process.born_s, first, limits.SERVER_STOP_TIMEOUT_S)
                ended.append(process.name)
    return ended


def _after_a_killed_supervisor(instance: Instance, state: InstanceState | None) -> int:
    ended = asyncio.run(end_left_over(state))
    if ended:
        sys.stdout.write(f"the supervisor was gone already; ended what it left behind: {', '.join(ended)}\n")
    else:
        sys.stdout.write(f"no instance is running in {instance.data}\n")
    return EXIT_OK
