"""The gateway process: HTTP in front, billing and workers behind the bus. The only place that builds its adapters."""

from __future__ import annotations

import asyncio
import os
import sys

from services.gateway.gateway import Gateway
from services.gateway.prepare import load_model
from shared.contracts import limits
from shared.contracts.ids import GatewayId
from shared.runtime.bus import NatsBus
from shared.runtime.config import GatewaySettings
from shared.runtime.health import write_port
from shared.runtime.key_files import read_key, read_public_key
from shared.runtime.service import Service, run
from shared.runtime.signing import Verifier


async def start(service: Service, settings: GatewaySettings) -> None:
    """Ready when the bus is there and workers for both halves of an answer are heard."""
    cluster_key = read_key(settings.cluster_key_file, "the cluster key")
    verify_key = read_public_key(settings.verify_key_file, "billing's verify key")
    service.waiting_for("the model's tokenizer")
    model = await asyncio.to_thread(load_model, settings.model, settings.model_dir)
    service.waiting_for("NATS")
    bus = await NatsBus.connect(settings.nats_url, cluster_key, settings.gateway_id)
    service.on_stop("bus", bus.close)
    gateway = Gateway(
        GatewayId(settings.gateway_id),
        bus,
        service.clock,
        Verifier(verify_key),
        os.urandom,
        [model],
        host=settings.host,
        port=settings.port,
        request_deadline_s=settings.request_deadline_s,
        queued_requests_max=settings.queued_requests_max,
        keep_alive_s=settings.keep_alive_s,
        owned_by=settings.owned_by,
        cors_origins=settings.cors_origins,
    )
    service.on_stop("gateway", gateway.close)
    _watch(service, gateway)
    await gateway.start()
    service.spawn(_serve(service, gateway, settings.drain_timeout_s), "http", drains=True)
    await gateway.up()
    if settings.port_file is not None:
        write_port(settings.port_file, gateway.port)
    service.require(lambda: None if bus.connected else "NATS is not connected")
    service.require(lambda: next(iter(gateway.missing()), None))
    service.ready()


async def _serve(service: Service, gateway: Gateway, drain_timeout_s: float) -> None:
    """Serves until the process drains; requests under way then have the time that the server's own end leaves."""
    serving = asyncio.create_task(gateway.run(), name="serve")
    draining = asyncio.create_task(service.draining.wait(), name="draining")
    try:
        await asyncio.wait({serving, draining}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            await gateway.drain(max(drain_timeout_s - 2 * limits.DRAIN_TIMEOUT_S, 0.0))
        gateway.stop()
        await serving
    finally:
        draining.cancel()
        serving.cancel()
        await asyncio.wait({serving, draining})


def _watch(service: Service, gateway: Gateway) -> None:
    metrics, edge = service.metrics, gateway.edge
    metrics.watch("gateway_requests", "Requests under way, by where they are.", "state", gateway.under_way)
    metrics.watch_counts(
        "gateway_requests_ended", "Requests with a hold that ended, by how.", "state", edge.inbox.ended_by_state
    )


if __name__ == "__main__":
    sys.exit(run(GatewaySettings, start))
