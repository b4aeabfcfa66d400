"""The one table of subjects and streams: ack wait, deliveries, deduplication key, dead end (design, section 5)."""

from __future__ import annotations

import re
from typing import Final

import msgspec

from shared.contracts import limits
from shared.contracts.ids import GatewayId, RequestId, WorkerId
from shared.contracts.messages import Role


def token(name: str) -> str:
    """`name` as one subject token: dots, blanks and wildcards become '-'."""
    safe = re.sub(r"[^A-Za-z0-9_-]", "-", name)
    if not safe:
        raise ValueError("an empty name has no subject")
    return safe


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """A JetStream stream. Work-queue retention, file storage, DiscardNew: a full stream refuses, and the gateway
    answers 503. `dedup`: what the message id is made of. `dead_end`: where a message goes after its deliveries."""

    name: str
    subjects: tuple[str, ...]
    retention: str
    messages_max: int
    bytes_max: int
    age_max_s: float
    duplicate_window_s: float
    ack_wait_s: float
    deliveries_max: int
    dedup: str
    dead_end: str | None


PREFILL: Final = Stream(
    name="PREFILL",
    subjects=("prefill.>",),
    retention="workqueue",
    messages_max=limits.WORK_MESSAGES_MAX,
    bytes_max=limits.WORK_BYTES_MAX,
    age_max_s=limits.WORK_AGE_MAX_S,
    duplicate_window_s=limits.WORK_DUPLICATE_WINDOW_S,
    ack_wait_s=limits.WORK_ACK_WAIT_S,
    deliveries_max=limits.WORK_DELIVERIES_MAX,
    dedup="request:attempt:prefill",
    dead_end="DEAD",
)
DECODE: Final = Stream(
    name="DECODE",
    subjects=("decode.>",),
    retention="workqueue",
    messages_max=limits.WORK_MESSAGES_MAX,
    bytes_max=limits.WORK_BYTES_MAX,
    age_max_s=limits.WORK_AGE_MAX_S,
    duplicate_window_s=limits.WORK_DUPLICATE_WINDOW_S,
    ack_wait_s=limits.WORK_ACK_WAIT_S,
    deliveries_max=limits.WORK_DELIVERIES_MAX,
    dedup="request:attempt:decode",
    dead_end="DEAD",
)
DEAD: Final = Stream(
    name="DEAD",
    subjects=("dead.>",),
    retention="limits",
    messages_max=10_000,
    bytes_max=256 * 2**20,
    age_max_s=7 * 86_400,
    duplicate_window_s=limits.WORK_DUPLICATE_WINDOW_S,
    ack_wait_s=limits.WORK_ACK_WAIT_S,
    deliveries_max=1,
    dedup="stream:sequence",
    dead_end=None,
)
ADVISORIES: Final = Stream(
    name="ADVISORIES",
    subjects=("$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.>",),
    retention="workqueue",
    messages_max=10_000,
    bytes_max=16 * 2**20,
    age_max_s=7 * 86_400,
    duplicate_window_s=limits.WORK_DUPLICATE_WINDOW_S,
    ack_wait_s=limits.WORK_ACK_WAIT_S,
    deliveries_max=limits.ADVISORY_DELIVERIES_MAX,
    dedup="published by JetStream itself",
    dead_end=None,
)
"""JetStream's word that a message used up its deliveries: a core message, lost unless a stream captures it."""
STREAMS: Final = (PREFILL, DECODE, DEAD, ADVISORIES)


def stream_of(subject: str) -> Stream:
    """The stream that holds `subject`, which has no wildcards. Raises ValueError when none does."""
    for stream in STREAMS:
        if any(subject.startswith(pattern.removesuffix(">")) for pattern in stream.subjects):
            return stream
    raise ValueError(f"no stream holds {subject}")


def dead(stream: str, sequence: int) -> str:
    """Where the message with this number of a work stream lies when nobody could finish it."""
    return f"dead.{token(stream)}.{sequence}"


def work_any(role: Role, model: str) -> str:
    return f"{role}.{token(model)}.any"


def work_at(role: Role, model: str, worker: WorkerId) -> str:
    return f"{role}.{token(model)}.at.{token(worker)}"


def message_id(request: RequestId, attempt: int, role: Role) -> str:
    """The deduplication key of a work message."""
    return f"{request}:{attempt}:{role}"


def tokens_of(gateway: GatewayId) -> str:
    """TokenBatch, worker to gateway."""
    return f"tokens.{token(gateway)}"


def claims_of(gateway: GatewayId) -> str:
    """Claim → ClaimReply, worker to gateway."""
    return f"claims.{token(gateway)}"


def control_of(worker: WorkerId) -> str:
    """Acknowledge, Resend, Finalize, gateway to worker."""
    return f"control.{token(worker)}"


WORKER_HEARTBEATS: Final = "heartbeat.worker.*"
GATEWAY_HEARTBEATS: Final = "heartbeat.gateway.*"


def worker_heartbeat(worker: WorkerId) -> str:
    return f"heartbeat.worker.{token(worker)}"


def gateway_heartbeat(gateway: GatewayId) -> str:
    return f"heartbeat.gateway.{token(gateway)}"


REVOKED: Final = "revoked"

BILLING_AUTHORIZE: Final = "billing.authorize"
BILLING_HOLD: Final = "billing.hold"
BILLING_SETTLE: Final = "billing.settle"
BILLING_RELEASE: Final = "billing.release"
BILLING_BALANCE: Final = "billing.balance"
BILLING_NAMESPACE_KEY: Final = "billing.namespace_key"
BILLING_QUEUE: Final = "billing"

INDEX_LOOKUP: Final = "index.lookup"
INDEX_COMMIT: Final = "index.commit"
INDEX_TOUCH: Final = "index.touch"
INDEX_QUEUE: Final = "cache_index"
