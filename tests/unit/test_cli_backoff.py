"""Back-off of crashed services: the waits by hand."""

from __future__ import annotations

from shared.cli.backoff import Backoff
from shared.cli.process import describe_exit


def test_waits_double_from_half_a_second_to_half_a_minute() -> None:
    backoff, waits = Backoff(), []
    for _ in range(9):
        backoff = backoff.crashed(uptime_s=0.0)
        waits.append(backoff.wait_s)
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_service_that_was_well_for_a_minute_starts_from_the_first_wait() -> None:
    backoff = Backoff(crashes=7)
    assert backoff.crashed(uptime_s=59.9).wait_s == 30
    assert backoff.crashed(uptime_s=60.0) == Backoff(crashes=1)


def test_weeks_of_crashes_do_not_overflow() -> None:
    assert Backoff(crashes=1_000_000).wait_s == 30
    assert Backoff().wait_s == 0


def test_exits_are_named() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-9).startswith("killed by SIGKILL")
    assert describe_exit(-11) == "killed by SIGSEGV"
