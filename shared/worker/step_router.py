"""Brings the news of each step to the sequences that made it, then lets the tokens leave in one message a gateway."""

from __future__ import annotations

from collections.abc import Callable

from shared.contracts.ids import RequestId
from shared.contracts.ports import Produced
from shared.worker.emitter import Emitter
from shared.worker.engine_loop import EngineLoop, Step

OnProduced = Callable[[Produced, float], None]
"""(news, seconds of the device that the step spent on this sequence)."""


class StepRouter:
    """A sequence is routed from `attach` to `detach`; news of others (removed meanwhile) are dropped."""

    def __init__(self, engine: EngineLoop, emitter: Emitter) -> None:
        self._engine = engine
        self._emitter = emitter
        self._sinks: dict[RequestId, OnProduced] = {}
        self._computed: dict[RequestId, int] = {}
        self.busy_s = 0.0

    def attach(self, request: RequestId, computed: int, sink: OnProduced) -> None:
        """`computed`: positions whose KV is loaded already."""
        self._sinks[request] = sink
        self._computed[request] = computed

    def detach(self, request: RequestId) -> None:
        self._sinks.pop(request, None)
        self._computed.pop(request, None)

    async def run(self) -> None:
        async for step in self._engine.steps():
            self.busy_s += step.device_s
            self._route(step)
            await self._emitter.flush()

    def _route(self, step: Step) -> None:
        """The step's time is split over its sequences by the rows that each of them ran."""
        rows = {p.request: max(p.computed - self._computed.get(p.request, p.computed), 1) for p in step.produced}
        total = sum(rows.values())
        for produced in step.produced:
            sink = self._sinks.get(produced.request)
            if sink is None:
                continue
            self._computed[produced.request] = produced.computed
            sink(produced, step.device_s * rows[produced.request] / total)
