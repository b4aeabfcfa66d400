"""Retention, touch and commit rules against times worked out by hand."""

from __future__ import annotations

import pytest

from services.cache_index import policy

DAY_S = 86_400


def test_expiry_slides_from_the_use() -> None:
    assert policy.expiry_s(1_000.0, 3 * DAY_S) == 1_000.0 + 259_200


def test_a_touch_must_gain_more_than_four_minutes() -> None:
    now_s, retention_s = 10_000.0, 7 * DAY_S
    used_three_minutes_ago_s = now_s - 180 + retention_s
    used_five_minutes_ago_s = now_s - 300 + retention_s
    assert used_five_minutes_ago_s < policy.touch_below_s(now_s, retention_s) < used_three_minutes_ago_s


@pytest.mark.parametrize(("age_s", "allowed"), [(0, True), (1_800, True), (1_801, False), (-5, True), (-6, False)])
def test_commits_older_than_half_an_hour_or_from_the_future_are_refused(age_s: float, allowed: bool) -> None:
    assert policy.commit_in_time(5_000.0 - age_s, 5_000.0) is allowed


@pytest.mark.parametrize(("age_s", "outlived"), [(0, False), (4_200, False), (4_201, True)])
def test_handoff_objects_outlive_deadline_and_settlement_and_no_more(age_s: float, outlived: bool) -> None:
    assert policy.handoff_outlived(100_000.0 - age_s, 100_000.0) is outlived
