"""All parts of a gateway put together: made from adapters, started, drained, stopped. No settings, no process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from services.gateway.admission import Accounts
from services.gateway.app import create_app
from services.gateway.auth import Tags
from services.gateway.background import Background
from services.gateway.beats import Beats
from services.gateway.edge import Edge
from services.gateway.gate import Gate
from services.gateway.holds import Holds
from services.gateway.prepare import Models, ServedModel
from services.gateway.token_inbox import TokenInbox
from services.gateway.workers import Affinity, Workers
from shared.contracts import limits, messages, subjects
from shared.contracts.ids import GatewayId
from shared.contracts.messages import Revoked
from shared.contracts.ports import Bus, Clock
from shared.runtime.http_server import HttpServer
from shared.runtime.signing import Verifier

log = structlog.get_logger()


class Gateway:
    """`start`, then `run` until cancelled or `stop`; `drain` before that, to let requests end."""

    def __init__(
        self,
        gateway: GatewayId,
        bus: Bus,
        clock: Clock,
        verifier: Verifier,
        entropy: Callable[[int], bytes],
        models: Sequence[ServedModel],
        *,
        host: str,
        port: int,
        request_deadline_s: float = limits.REQUEST_DEADLINE_S,
        queued_requests_max: int = limits.QUEUED_REQUESTS_MAX,
        keep_alive_s: float = limits.KEEP_ALIVE_S,
        owned_by: str = "deepserve",
        cors_origins: Sequence[str] = (),
    ) -> None:
        """Binds the port. Raises SettingsError."""
        self._draining = False
        self._unsubscribe: Callable[[], Awaitable[None]] | None = None
        self._bus = bus
        self._clock = clock
        self._verifier = verifier
        background, workers = Background(), Workers()
        self.edge = Edge(
            gateway=gateway,
            bus=bus,
            clock=clock,
            verifier=verifier,
            entropy=entropy,
            background=background,
            tags=Tags(bus, verifier, clock, background),
            holds=Holds(bus, background),
            models=Models(models),
            accounts=Accounts(),
            gates={model.name: Gate(model.name, workers, clock, queued_requests_max) for model in models},
            inbox=TokenInbox(bus, gateway, clock, background),
            workers=workers,
            affinity=Affinity(),
            draining=lambda: self._draining,
            request_deadline_s=request_deadline_s,
            keep_alive_s=keep_alive_s,
            owned_by=owned_by,
        )
        self._beats = Beats(self.edge)
        self._http = HttpServer(create_app(self.edge, self.missing, cors_origins), host, port)
        self.port = self._http.port

    async def start(self) -> None:
        """Listens to workers and billing; nothing is served yet."""
        self._unsubscribe = await self._bus.subscribe(subjects.REVOKED, self._on_revoked)
        await self.edge.inbox.start()
        await self._beats.start()

    async def run(self) -> None:
        """Serves HTTP and says that this gateway lives, until `stop`."""
        beating = asyncio.create_task(self._beats.run(), name="heartbeat")
        try:
            await self._http.run()
        finally:
            beating.cancel()
            await asyncio.wait({beating})

    async def up(self) -> None:
        """Returns when connections are accepted."""
        await self._http.up()

    def missing(self) -> list[str]:
        """What this gateway lacks to serve its models; empty when it is ready."""
        now_s, workers = self._clock.monotonic_s(), self.edge.workers
        lacks = ["draining"] if self._draining else []
        for model in self.edge.models.names:
            lacks += [f"no prefill worker for {model}"] if not workers.capacity("prefill", model, now_s) else []
            lacks += [f"no decode worker for {model}"] if not workers.capacity("decode", model, now_s) else []
        return lacks

    def under_way(self) -> dict[str, float]:
        """Requests by where they are."""
        gates = self.edge.gates.values()
        return {
            "waiting": float(sum(gate.waiting for gate in gates)),
            "prefilling": float(sum(gate.capacity.prefilling for gate in gates)),
            "decoding": float(sum(gate.capacity.decoding for gate in gates)),
        }

    async def drain(self, timeout_s: float) -> None:
        """Takes no new requests and lets those under way end, for `timeout_s` at most."""
        self._draining = True
        for gate in self.edge.gates.values():
            gate.close()
        try:
            async with asyncio.timeout(timeout_s):
                await self.edge.inbox.idle()
        except TimeoutError:
            log.warning("requests.cut", count=self.edge.inbox.under_way)

    def stop(self) -> None:
        """Ends what still runs: clients are cut off, workers are told."""
        self._draining = True
        self._http.stop()

    async def close(self) -> None:
        """After `run` has returned: the last messages go out, then the subscriptions end."""
        self.edge.models.close()
        await self.edge.background.close(limits.DRAIN_TIMEOUT_S)
        await self._beats.stop()
        await self.edge.inbox.stop()
        if self._unsubscribe is not None:
            await self._unsubscribe()

    async def _on_revoked(self, subject: str, payload: bytes) -> None:
        self._verifier.revocations.apply(messages.decode(Revoked, payload), self._clock.now_s())
