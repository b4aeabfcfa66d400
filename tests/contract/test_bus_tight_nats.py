"""The suite of the bus's bounds on a real NATS whose streams have near bounds."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from shared.contracts import subjects
from shared.runtime.bus import NatsBus
from tests.contract.bus_suite import Connect
from tests.contract.tight_bus_suite import TIGHT_STREAMS, TightBusSuite

KEY = bytes(range(32))


@pytest.mark.servers
class TestTightNatsBus(TightBusSuite):
    @pytest.fixture
    async def connect(  # type: ignore[override]
        self, nats_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[Connect]:
        monkeypatch.setattr(subjects, "STREAMS", TIGHT_STREAMS)
        buses: list[NatsBus] = []

        async def connect() -> NatsBus:
            buses.append(await NatsBus.connect(nats_url, KEY, "test"))
            return buses[-1]

        yield connect
        for bus in buses:
            await bus.close()
