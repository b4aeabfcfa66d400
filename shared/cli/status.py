"""`deepserve status`: who runs, where, and whether it is ready now."""

from __future__ import annotations

import asyncio
import sys

import msgspec

from shared.cli import probe
from shared.cli.failure import EXIT_OK, CommandFailed
from shared.cli.instance import Instance, InstanceState, ProcessState, left_over, running, without_supervisor
from shared.cli.process import alive
from shared.cli.secrets import Secrets


class ServiceReport(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    pid: int | None
    state: str
    port: int | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `status --json` prints. The token and the key are None for whoever may not read the secrets."""

    gateway_url: str | None
    admin_url: str | None
    admin_token: str | None
    api_key: str | None
    data: str
    services: tuple[ServiceReport, ...]


async def report(instance: Instance, state: InstanceState, *, supervised: bool = True) -> Report:
    """What is true now of the state that the supervisor wrote last. `supervised`: it still lives."""
    secrets = Secrets(instance.secrets)
    services = await asyncio.gather(*(_look(service, supervised) for service in state.services))
    try:
        demo = secrets.read_demo()
    except PermissionError:
        demo = None
    return Report(
        gateway_url=state.gateway_url,
        admin_url=state.admin_url,
        admin_token=secrets.read_text(secrets.admin_token),
        api_key=demo.api_key if demo else None,
        data=str(instance.data),
        services=tuple(services),
    )


async def _look(service: ProcessState, supervised: bool) -> ServiceReport:
    """The state now: a service that the supervisor saw ready may have lost what it needs since."""
    state: str = service.state
    if not supervised:
        state = "left over" if alive(service.pid, service.born_s) else "stopped"
    elif service.pid is not None and not alive(service.pid, service.born_s):
        state = "stopped"
    elif state == "ready" and service.port is not None and not (await probe.ask(service.port)).ready:
        state = "not ready"
    return ServiceReport(name=service.name, pid=service.pid, state=state, port=service.port)


def status(instance: Instance, *, as_json: bool) -> int:
    """Exit code 0 when an instance runs, in whatever state. Raises CommandFailed when none does; where a killed
    supervisor left processes behind, it shows them first."""
    if instance.holder() is None:
        state = instance.read_state()
        left = left_over(state)
        if state is not None and left:
            _show(state, asyncio.run(report(instance, state, supervised=False)), as_json=as_json, supervised=False)
            raise CommandFailed(without_supervisor(instance, left))
    state = running(instance)
    _show(state, asyncio.run(report(instance, state)), as_json=as_json, supervised=True)
    return EXIT_OK


def _show(state: InstanceState, found: Report, *, as_json: bool, supervised: bool) -> None:
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
    else:
        sys.stdout.write(_table(state, found, supervised))
    sys.stdout.flush()


def _table(state: InstanceState, found: Report, supervised: bool) -> str:
    rows = [("name", "state", "pid", "port", "restarts")]
    restarts = {s.name: s.restarts for s in state.services}
    rows += [(s.name, s.state, _text(s.pid), _text(s.port), str(restarts[s.name])) for s in found.services]
    left = {p.name for p in left_over(state)}
    for s in state.servers:
        now = s.state if supervised else "left over" if s.name in left else "stopped"
        rows.append((s.name, now, _text(s.pid), _text(s.port), str(s.restarts)))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    phase = f"{state.phase}, supervisor {state.pid}" if supervised else f"supervisor {state.pid} was killed"
    head = [
        f"instance  {found.data} ({phase}, engine {state.engine})",
        f"gateway   {found.gateway_url or 'not up yet'}",
        f"API key   {found.api_key or 'only for the owner of the data directory'}",
    ]
    return "\n".join([*head, "", *lines, ""])


def _text(number: int | None) -> str:
    return "-" if number is None else str(number)
