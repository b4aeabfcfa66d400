"""Dead letters: work that used up its deliveries goes to the stream of the dead, and out of its own.

Part of the bus; like it, one of the few files that know the NATS library. JetStream only announces such a message, and
a work-queue stream would keep it until its age. Copy, delete, acknowledge, in this order and each idempotent: whoever
dies in between leaves the rest to the next one.
"""

from __future__ import annotations

import contextlib
from typing import Final

import msgspec
import structlog
from nats.js import JetStreamContext
from nats.js.api import Header
from nats.js.errors import NotFoundError

from shared.contracts import limits, subjects
from shared.contracts.errors import DeadlineExceeded, Overloaded
from shared.runtime.bus_pull import Puller
from shared.runtime.bus_streams import translated

_log = structlog.get_logger()
SUBJECT: Final = subjects.ADVISORIES.subjects[0]


class _Advisory(msgspec.Struct, frozen=True):
    """What JetStream says when a message used up its deliveries; other fields are ignored."""

    stream: str
    consumer: str
    stream_seq: int
    deliveries: int


async def bury(jetstream: JetStreamContext, puller: Puller) -> None:
    """Until the bus closes. Any number of processes may do it at once; each announcement goes to one of them."""
    async with contextlib.aclosing(puller.deliveries(lambda: limits.DEAD_LETTER_BATCH)) as deliveries:
        async for delivery in deliveries:
            try:
                await _bury(jetstream, delivery.payload)
                await delivery.ack()
            except msgspec.DecodeError as error:
                _log.error("advisory.unreadable", error=str(error))
                await delivery.drop()
            except (Overloaded, DeadlineExceeded) as error:
                _log.warning("work.unburied", error=error.message)


async def _bury(jetstream: JetStreamContext, advisory_json: bytes) -> None:
    advisory = msgspec.json.decode(advisory_json, type=_Advisory)
    stream, sequence = advisory.stream, advisory.stream_seq
    with translated(f"burying {stream} {sequence}"):
        try:
            message = await jetstream.get_msg(stream, sequence)
        except NotFoundError:
            return  # Acknowledged after all, expired, or buried by somebody who died before the acknowledgement.
        headers = {
            Header.MSG_ID: f"{stream}:{sequence}",
            "Deepserve-Subject": str(message.subject),
            "Deepserve-Message-Id": (message.headers or {}).get(Header.MSG_ID, ""),
            "Deepserve-Deliveries": str(advisory.deliveries),
        }
        await jetstream.publish(
            subjects.dead(stream, sequence), message.data or b"", timeout=limits.PUBLISH_TIMEOUT_S, headers=headers
        )
        with contextlib.suppress(NotFoundError):
            await jetstream.delete_msg(stream, sequence)
    _log.error(
        "work.buried",
        subject=message.subject,
        message_id=headers["Deepserve-Message-Id"],
        deliveries=advisory.deliveries,
        sequence=sequence,
    )
