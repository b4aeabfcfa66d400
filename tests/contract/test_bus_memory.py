"""The suites of the bus on the bus in memory, with the loop of real time: a simulation is not their matter."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.contract.bus_suite import BusSuite, Connect
from tests.contract.tight_bus_suite import TIGHT_STREAMS, TightBusSuite
from tests.fakes.bus import Broker, FakeBus


async def _connections(broker: Broker) -> AsyncIterator[Connect]:
    buses: list[FakeBus] = []

    async def connect() -> FakeBus:
        buses.append(broker.connect())
        return buses[-1]

    yield connect
    for bus in buses:
        await bus.close()


class TestFakeBus(BusSuite):
    @pytest.fixture
    async def connect(self) -> AsyncIterator[Connect]:
        async for connect in _connections(Broker()):
            yield connect


class TestTightFakeBus(TightBusSuite):
    @pytest.fixture
    async def connect(self) -> AsyncIterator[Connect]:
        async for connect in _connections(Broker(streams=TIGHT_STREAMS)):
            yield connect
