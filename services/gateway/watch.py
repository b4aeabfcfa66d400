"""Patience with one request under way: when to ask again, when to publish again, when to give up. Pure.

Two clocks run. Silence: a claimed request without news is asked for “from n” every limits.RESEND_AFTER_S. Loss: a work
message that nobody claims for limits.CLAIM_PATIENCE_S, though a worker had room all the while, is lost, and so is the
work of a worker that fell silent and was not replaced; both are published again as a new attempt.
"""

from __future__ import annotations

from typing import Literal

from shared.contracts import limits

Act = Literal["wait", "resend", "to_any", "again", "give_up"]


class Watch:
    """All times monotonic, in seconds. `preferred`: the message went to one worker, which has a short bound."""

    def __init__(self, now_s: float) -> None:
        self._progress_s = now_s
        self._asked_s = now_s
        self._unclaimed_since_s: float | None = now_s
        self._preferred = False
        self._attempts = 0

    def published(self, now_s: float, *, preferred: bool) -> None:
        self._attempts += 1
        self._preferred = preferred
        self._unclaimed_since_s = now_s

    def progressed(self, now_s: float) -> None:
        """News came: tokens, a claim, the ready fields."""
        self._progress_s = self._asked_s = now_s

    def act(self, now_s: float, *, held: bool, room: bool, prefill: bool) -> Act:
        """What to do now. `held`: a living worker has the request. `room`: some worker that could take it has room,
        so that the message would be claimed if it still existed. `prefill`: the stage that it waits for, or is in."""
        if held:
            self._unclaimed_since_s = None
            return self._ask(now_s)
        if self._unclaimed_since_s is None:
            self._unclaimed_since_s = now_s
        waited_s = now_s - self._unclaimed_since_s
        if self._preferred and prefill and waited_s >= limits.AT_PATIENCE_S:
            return "to_any"
        if not room:
            # Everybody is busy: the message waits its turn. The deadline of the request bounds this.
            self._unclaimed_since_s = max(self._unclaimed_since_s, now_s - limits.AT_PATIENCE_S)
        elif waited_s >= limits.CLAIM_PATIENCE_S:
            return "give_up" if self._attempts >= limits.ATTEMPTS_MAX else "again"
        return "wait"

    def next_look_s(self) -> float:
        """How long nothing needs to be looked at, as long as no news comes."""
        return min(limits.RESEND_AFTER_S, limits.AT_PATIENCE_S)

    def _ask(self, now_s: float) -> Act:
        if now_s - self._asked_s < limits.RESEND_AFTER_S:
            return "wait"
        self._asked_s = now_s
        return "resend"
