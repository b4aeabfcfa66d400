"""What to keep and what to believe: pure, time is an argument (design, section 4).

Retention slides: a row's expiry is the latest of (use time + the retention of that use's class) over all its uses.
"""

from __future__ import annotations

from shared.contracts import limits


def expiry_s(now_s: float, retention_s: int) -> float:
    """When a block that is used now, by a request of this retention, expires by that use."""
    return now_s + retention_s


def touch_below_s(now_s: float, retention_s: int) -> float:
    """Only rows that expire before this are extended: a touch must gain more than limits.TOUCH_INTERVAL_S, since
    each touched row costs up to 3 kB of write-ahead log."""
    return expiry_s(now_s, retention_s) - limits.TOUCH_INTERVAL_S


def commit_in_time(put_at_s: float, now_s: float) -> bool:
    """Whether an object stored at `put_at_s` may still get its row. Beyond half the orphan grace the sweeper may soon
    take the object for an orphan; a time ahead of the clock by more than the allowed skew is not believed."""
    return -limits.CLOCK_SKEW_S <= now_s - put_at_s <= limits.ORPHAN_GRACE_S / 2


def handoff_outlived(stored_at_s: float, now_s: float) -> bool:
    """Whether no request can still want this handoff object."""
    return now_s - stored_at_s > limits.HANDOFF_TTL_S
