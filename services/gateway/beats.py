"""Heartbeats: the gateway's own lease, each second, and what workers and other gateways say of themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog
from msgspec import MsgspecError

from services.gateway.edge import Edge
from shared.contracts import limits, messages, subjects
from shared.contracts.errors import DeepServeError
from shared.contracts.ids import GatewayId
from shared.contracts.messages import GatewayHeartbeat, WorkerHeartbeat

log = structlog.get_logger()


class Beats:
    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._gateways: dict[GatewayId, float] = {}
        self._unsubscribe: list[Callable[[], Awaitable[None]]] = []

    async def start(self) -> None:
        bus = self._edge.bus
        self._unsubscribe.append(await bus.subscribe(subjects.WORKER_HEARTBEATS, self._on_worker))
        self._unsubscribe.append(await bus.subscribe(subjects.GATEWAY_HEARTBEATS, self._on_gateway))

    async def stop(self) -> None:
        for unsubscribe in self._unsubscribe:
            await unsubscribe()
        self._unsubscribe.clear()

    async def run(self) -> None:
        """Says that this gateway lives, until cancelled: its silence ends the work for its requests."""
        edge = self._edge
        subject = subjects.gateway_heartbeat(edge.gateway)
        while True:
            beat = GatewayHeartbeat(gateway=edge.gateway, sent_at_s=edge.clock.now_s())
            try:
                await edge.bus.send(subject, messages.encode(beat))
            except DeepServeError as error:
                log.warning("heartbeat.unsent", error=error.message)
            await asyncio.sleep(limits.HEARTBEAT_S)

    async def _on_worker(self, subject: str, payload: bytes) -> None:
        try:
            beat = messages.decode(WorkerHeartbeat, payload)
        except MsgspecError as error:
            log.warning("heartbeat.unreadable", subject=subject, error=str(error))
            return
        self._edge.workers.hear(beat, self._edge.clock.monotonic_s())
        gate = self._edge.gates.get(beat.model)
        if gate is not None:
            gate.pump()

    async def _on_gateway(self, subject: str, payload: bytes) -> None:
        try:
            beat = messages.decode(GatewayHeartbeat, payload)
        except MsgspecError as error:
            log.warning("heartbeat.unreadable", subject=subject, error=str(error))
            return
        now_s = self._edge.clock.monotonic_s()
        self._gateways[beat.gateway] = now_s
        oldest_s = now_s - limits.PEER_LEASE_S
        self._gateways = {gateway: at_s for gateway, at_s in self._gateways.items() if at_s >= oldest_s}
        for gate in self._edge.gates.values():
            gate.gateways = max(len(self._gateways), 1)
