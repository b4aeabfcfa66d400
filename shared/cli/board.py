"""The supervisor's record of who runs, written to `state.json` at each change."""

from __future__ import annotations

import os

from shared.cli.instance import Instance, InstanceState, Phase, ProcessState


class Board:
    """Used from one event loop."""

    def __init__(self, instance: Instance, engine: str) -> None:
        self._instance = instance
        self._engine = engine
        self._services: dict[str, ProcessState] = {}
        self._servers: dict[str, ProcessState] = {}
        self._phase: Phase = "starting"
        self._gateway_url: str | None = None
        self._admin_url: str | None = None

    def expect(self, names: tuple[str, ...]) -> None:
        """Fixes the order of the services; all wait."""
        self._services = {name: ProcessState(name=name) for name in names}
        self._write()

    def service(self, state: ProcessState) -> None:
        self._services[state.name] = state
        self._write()

    def server(self, state: ProcessState) -> None:
        self._servers[state.name] = state
        self._write()

    def ready(self, gateway_url: str, admin_url: str) -> None:
        self._gateway_url, self._admin_url = gateway_url, admin_url
        self._phase = "ready"
        self._write()

    def draining(self) -> None:
        self._phase = "draining"
        self._write()

    @property
    def starting(self) -> bool:
        return self._phase == "starting"

    def unready(self) -> list[str]:
        return [s.name for s in self._services.values() if s.state != "ready"]

    def _write(self) -> None:
        self._instance.write_state(
            InstanceState(
                phase=self._phase,
                pid=os.getpid(),
                engine=self._engine,
                gateway_url=self._gateway_url,
                admin_url=self._admin_url,
                services=tuple(self._services.values()),
                servers=tuple(self._servers.values()),
            )
        )
