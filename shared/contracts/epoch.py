"""The epoch of a try at a request: (gateway attempt, stage, delivery), ordered (design, section 5; invariant 4)."""

from __future__ import annotations

from enum import IntEnum

import msgspec


class Stage(IntEnum):
    """Where a request is worked on; later stages are greater, so a late prefill cannot undo a decode."""

    PREFILL = 0
    DECODE = 1


class Epoch(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """`attempt` from 1, raised by the gateway at each publish; `delivery` from 1, raised by JetStream."""

    attempt: int
    stage: Stage
    delivery: int

    def __str__(self) -> str:
        return f"{self.attempt}/{self.stage.name.lower()}/{self.delivery}"
