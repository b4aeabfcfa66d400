"""State machines, usage classes, errors on the wire, subjects."""

from __future__ import annotations

import itertools

import pytest

from shared.contracts import errors, lifecycle, messages, subjects
from shared.contracts.epoch import Epoch, Stage
from shared.contracts.errors import IllegalTransition
from shared.contracts.ids import RequestId, WorkerId
from shared.contracts.usage import Usage, of_request

ENDS = {
    lifecycle.RequestState.SETTLED,
    lifecycle.BlockState.GONE,
    lifecycle.HandoffState.ABANDONED,
    lifecycle.HoldState.SETTLED,
    lifecycle.HoldState.RELEASED,
    lifecycle.HoldState.EXPIRED,
}


@pytest.mark.parametrize("table", [lifecycle.REQUEST, lifecycle.BLOCK, lifecycle.HANDOFF, lifecycle.HOLD])
def test_every_state_can_end_and_no_end_has_a_way_out(table: dict) -> None:  # type: ignore[type-arg]
    states = {state for state, _ in table} | set(table.values())
    for state in states:
        reached, frontier = {state}, {state}
        while frontier:
            frontier = {to for (start, _), to in table.items() if start in frontier} - reached
            reached |= frontier
        assert reached & ENDS, state
    assert not {state for state, _ in table} & ENDS


def test_a_hold_ends_once() -> None:
    state = lifecycle.advance(lifecycle.HOLD, lifecycle.HoldState.PENDING, lifecycle.HoldEvent.SETTLE)
    for event in lifecycle.HoldEvent:
        with pytest.raises(IllegalTransition):
            lifecycle.advance(lifecycle.HOLD, state, event)


def test_epochs_order_by_attempt_then_stage_then_delivery() -> None:
    ordered = [
        Epoch(1, Stage.PREFILL, 1),
        Epoch(1, Stage.PREFILL, 2),
        Epoch(1, Stage.DECODE, 1),
        Epoch(1, Stage.DECODE, 3),
        Epoch(2, Stage.PREFILL, 1),
    ]
    for earlier, later in itertools.combinations(ordered, 2):
        assert earlier < later


def test_usage_classes_sum_to_the_prompt() -> None:
    paid = of_request(prompt_tokens=100, hit_tokens=64, pool_open=True, output=7)
    assert (paid.cached, paid.uncached, paid.not_eligible, paid.prompt_tokens) == (64, 36, 0, 100)
    trial = of_request(prompt_tokens=100, hit_tokens=0, pool_open=False, output=7)
    assert (trial.cached, trial.uncached, trial.not_eligible) == (0, 0, 100)
    with pytest.raises(ValueError):
        of_request(prompt_tokens=100, hit_tokens=64, pool_open=False, output=7)
    with pytest.raises(ValueError):
        of_request(prompt_tokens=63, hit_tokens=64, pool_open=True, output=7)
    with pytest.raises(ValueError):
        Usage(cached=0, uncached=1, not_eligible=0, output=1, reasoning=2)


def test_errors_survive_the_wire_and_internals_do_not_leak() -> None:
    again = errors.from_record(errors.to_record(errors.Overloaded("full", retry_after_s=3)))
    assert (type(again), again.message, again.retry_after_s) == (errors.Overloaded, "full", 3)
    hidden = errors.to_record(errors.SettingsError("secret path"))
    assert (hidden.name, "secret" in hidden.message) == ("InternalError", False)


def test_error_body_is_deepseeks() -> None:
    assert errors.http_body(errors.InsufficientBalance("Insufficient Balance")) == {
        "error": {
            "message": "Insufficient Balance",
            "type": "unknown_error",
            "param": None,
            "code": "invalid_request_error",
        }
    }


def test_subjects_are_single_tokens_inside_their_streams() -> None:
    at = subjects.work_at("prefill", "deepseek-v4.1 flash", WorkerId("w.1"))
    assert at == "prefill.deepseek-v4-1-flash.at.w-1"
    assert subjects.work_any("decode", "m") == "decode.m.any"
    assert subjects.message_id(RequestId("r"), 2, "prefill") == "r:2:prefill"


def test_hostile_messages_are_refused_by_type() -> None:
    with pytest.raises(Exception, match=r"Invalid|Expected|truncated"):
        messages.decode(messages.Settle, messages.encode(messages.Done()))
