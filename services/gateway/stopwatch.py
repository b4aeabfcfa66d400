"""The parts of the time to a first token, for benches (`X-DeepServe-Timing: 1`); never for decisions."""

from __future__ import annotations

from shared.contracts.messages import PrefillTiming


class Stopwatch:
    """Times are monotonic seconds and come in as arguments.

    Parts: `tag`, `prepare` (convert, render, encode), `queue` (the account's fair queue), `hold`; then from the
    worker `worker_queue` (published to claimed with room), `lookup`, `read`, `compute`; `delivery` is the rest up to
    the first token at the gateway (the way back); `handoff`, told later, is from the first to the second token.
    Beside them, in `worker_queue` already, `publish`: until JetStream said that it has the work.
    """

    def __init__(self, now_s: float) -> None:
        self._at_s = now_s
        self._parts: dict[str, float] = {}
        self._first_s: float | None = None
        self._second = False

    def lap(self, part: str, now_s: float) -> None:
        """`part` lasted from the last lap to now."""
        self._parts[f"{part}_s"] = now_s - self._at_s
        self._at_s = now_s

    def published(self, began_s: float, now_s: float) -> None:
        """No lap: the worker's parts begin with it."""
        self._parts.setdefault("publish_s", now_s - began_s)

    def first_token(self, timing: PrefillTiming | None, now_s: float) -> dict[str, float]:
        """All parts up to the first token."""
        self._first_s = now_s
        if timing is not None:
            parts = {
                "worker_queue_s": timing.queued_s,
                "lookup_s": timing.lookup_s,
                "read_s": timing.read_s,
                "compute_s": timing.compute_s,
            }
            self._parts |= parts
            self._parts["delivery_s"] = max(now_s - self._at_s - sum(parts.values()), 0.0)
        return dict(self._parts)

    def second_token(self, now_s: float) -> dict[str, float] | None:
        """The handoff's part, once."""
        if self._first_s is None or self._second:
            return None
        self._second = True
        return {"handoff_s": now_s - self._first_s}
