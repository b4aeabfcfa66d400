"""The suite of the bus on a real NATS."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from shared.runtime.bus import NatsBus
from tests.contract.bus_suite import BusSuite, Connect

KEY = bytes(range(32))


@pytest.mark.servers
class TestNatsBus(BusSuite):
    @pytest.fixture
    async def connect(self, nats_url: str) -> AsyncIterator[Connect]:
        buses: list[NatsBus] = []

        async def connect() -> NatsBus:
            buses.append(await NatsBus.connect(nats_url, KEY, "test"))
            return buses[-1]

        yield connect
        for bus in buses:
            await bus.close()
