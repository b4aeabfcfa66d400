"""A sample of the sweeps over one scenario: every so many steps, messages and calls."""

from __future__ import annotations

import pytest

from tests.sim import sweeps
from tests.sim.simulation import simulate

STRIDE = 16
WORK = ("publish", "stored", "deliver", "ack", "acked", "nak", "drop", "progress")


def test_the_scenario_is_clean_when_nothing_is_swept() -> None:
    verdict = simulate(sweeps.SCENARIO)
    assert verdict.clean, verdict.faults
    assert verdict.requests == 3


@pytest.mark.parametrize("process", ["billing", "cache_index", "prefill-1", "decode-1", "gateway-1"])
def test_a_process_may_die_at_any_step(process: str) -> None:
    runs = 0
    for verdict in sweeps.crashes(process, STRIDE):
        assert verdict.clean, (verdict.plan.troubles, verdict.faults)
        runs += 1
    assert runs > 1


@pytest.mark.parametrize("kinds", [("core",), ("reply",), WORK], ids=["core", "reply", "work"])
def test_any_message_may_be_lost(kinds: tuple[str, ...]) -> None:
    runs = 0
    for lost, verdict in sweeps.losses(kinds, STRIDE // 2):
        assert verdict.clean, (lost, verdict.faults)
        runs += 1
    assert runs > 1


@pytest.mark.parametrize("server", ["ledger", "index"])
def test_any_call_of_a_database_may_fail(server: str) -> None:
    runs = 0
    for failed, verdict in sweeps.failures(server, STRIDE // 4):
        assert verdict.clean, (failed, verdict.faults)
        runs += 1
    assert runs > 1


def test_a_client_may_leave_at_any_time() -> None:
    for after_s, verdict in sweeps.departures(0.06):
        assert verdict.clean, (after_s, verdict.faults)
