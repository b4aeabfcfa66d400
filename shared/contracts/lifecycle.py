"""State machines as tables, and `advance`, the only way to change state (design, section 10)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final, TypeVar

from shared.contracts.errors import IllegalTransition


class RequestState(Enum):
    RECEIVED = "received"
    HELD = "held"
    PREFILLING = "prefilling"
    HANDED_OFF = "handed_off"
    DECODING = "decoding"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"
    SETTLED = "settled"


class RequestEvent(Enum):
    HOLD = "hold"
    CLAIM_PREFILL = "claim_prefill"
    FIRST_TOKEN = "first_token"
    CLAIM_DECODE = "claim_decode"
    FINISH = "finish"
    CANCEL = "cancel"
    FAIL = "fail"
    SETTLE = "settle"


class BlockState(Enum):
    COMPUTING = "computing"
    FULL = "full"
    STORED = "stored"
    INDEXED = "indexed"
    EVICTING = "evicting"
    GONE = "gone"


class BlockEvent(Enum):
    FILL = "fill"
    STORE = "store"
    INDEX = "index"
    EVICT = "evict"
    DELETE = "delete"
    DROP = "drop"


class HandoffState(Enum):
    OFFERED = "offered"
    CLAIMED = "claimed"
    ADOPTED = "adopted"
    ABANDONED = "abandoned"


class HandoffEvent(Enum):
    CLAIM = "claim"
    ADOPT = "adopt"
    ABANDON = "abandon"


class HoldState(Enum):
    PENDING = "pending"
    SETTLED = "settled"
    RELEASED = "released"
    EXPIRED = "expired"


class HoldEvent(Enum):
    SETTLE = "settle"
    RELEASE = "release"
    EXPIRE = "expire"


_R, _RE = RequestState, RequestEvent
_open = (_R.HELD, _R.PREFILLING, _R.HANDED_OFF, _R.DECODING)
REQUEST: Final[Mapping[tuple[RequestState, RequestEvent], RequestState]] = {
    (_R.RECEIVED, _RE.HOLD): _R.HELD,
    (_R.RECEIVED, _RE.FAIL): _R.FAILED,
    (_R.RECEIVED, _RE.CANCEL): _R.CANCELLED,
    (_R.HELD, _RE.CLAIM_PREFILL): _R.PREFILLING,
    (_R.PREFILLING, _RE.CLAIM_PREFILL): _R.PREFILLING,
    (_R.HANDED_OFF, _RE.CLAIM_PREFILL): _R.PREFILLING,
    (_R.PREFILLING, _RE.FIRST_TOKEN): _R.HANDED_OFF,
    # The decode's claim may overtake the first token, which travels by another subject.
    (_R.PREFILLING, _RE.CLAIM_DECODE): _R.DECODING,
    (_R.HANDED_OFF, _RE.CLAIM_DECODE): _R.DECODING,
    (_R.DECODING, _RE.CLAIM_DECODE): _R.DECODING,
    # A new attempt starts from prefill again.
    (_R.DECODING, _RE.CLAIM_PREFILL): _R.PREFILLING,
    **{(state, _RE.FINISH): _R.FINISHED for state in _open},
    **{(state, _RE.CANCEL): _R.CANCELLED for state in _open},
    **{(state, _RE.FAIL): _R.FAILED for state in _open},
    (_R.FINISHED, _RE.SETTLE): _R.SETTLED,
    (_R.CANCELLED, _RE.SETTLE): _R.SETTLED,
    (_R.FAILED, _RE.SETTLE): _R.SETTLED,
}

_B, _BE = BlockState, BlockEvent
BLOCK: Final[Mapping[tuple[BlockState, BlockEvent], BlockState]] = {
    (_B.COMPUTING, _BE.FILL): _B.FULL,
    (_B.COMPUTING, _BE.DROP): _B.GONE,
    (_B.FULL, _BE.STORE): _B.STORED,
    (_B.FULL, _BE.DROP): _B.GONE,
    (_B.STORED, _BE.INDEX): _B.INDEXED,
    (_B.STORED, _BE.DELETE): _B.GONE,
    (_B.INDEXED, _BE.EVICT): _B.EVICTING,
    (_B.EVICTING, _BE.DELETE): _B.GONE,
}

_H, _HE = HandoffState, HandoffEvent
HANDOFF: Final[Mapping[tuple[HandoffState, HandoffEvent], HandoffState]] = {
    (_H.OFFERED, _HE.CLAIM): _H.CLAIMED,
    (_H.CLAIMED, _HE.CLAIM): _H.CLAIMED,
    (_H.CLAIMED, _HE.ADOPT): _H.ADOPTED,
    (_H.ADOPTED, _HE.CLAIM): _H.CLAIMED,
    (_H.OFFERED, _HE.ABANDON): _H.ABANDONED,
    (_H.CLAIMED, _HE.ABANDON): _H.ABANDONED,
    (_H.ADOPTED, _HE.ABANDON): _H.ABANDONED,
}

HOLD: Final[Mapping[tuple[HoldState, HoldEvent], HoldState]] = {
    (HoldState.PENDING, HoldEvent.SETTLE): HoldState.SETTLED,
    (HoldState.PENDING, HoldEvent.RELEASE): HoldState.RELEASED,
    (HoldState.PENDING, HoldEvent.EXPIRE): HoldState.EXPIRED,
}

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


def advance(table: Mapping[tuple[S, E], S], state: S, event: E) -> S:
    """The next state. Raises IllegalTransition for an edge that the table has not."""
    following = table.get((state, event))
    if following is None:
        raise IllegalTransition(f"{type(state).__name__}: no {event.value} from {state.value}")
    return following
