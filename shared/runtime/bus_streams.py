"""Streams and consumers made from the one table, and the client library's errors turned into ours.

Part of the bus; like it, one of the few files that know the NATS library.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import nats.errors
from nats.js import JetStreamContext, api
from nats.js.errors import APIError, BadRequestError, ServiceUnavailableError

from shared.contracts import limits, subjects
from shared.contracts.errors import DeadlineExceeded, InvalidRequest, Overloaded
from shared.contracts.subjects import Stream

_STREAM_NAME_IN_USE: Final = 10_058
_CONSUMER_EXISTS: Final = (10_105, 10_148)


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Raises the tree's errors in place of the library's. `what` names the operation in them."""
    try:
        yield
    except nats.errors.MaxPayloadError as error:
        raise InvalidRequest(f"{what}: the message is larger than {limits.MESSAGE_BYTES_MAX} bytes") from error
    except nats.errors.NoRespondersError as error:
        raise Overloaded(f"{what}: nobody listens") from error
    except (nats.errors.TimeoutError, TimeoutError) as error:
        raise DeadlineExceeded(f"{what}: no answer in time") from error
    except nats.errors.Error as error:
        raise Overloaded(f"{what}: {error}") from error


async def ensure_streams(jetstream: JetStreamContext) -> None:
    """Makes or updates every stream of the table. Idempotent, and safe in many processes that start at once.

    Raises DeadlineExceeded when JetStream is not there within limits.STREAM_SETUP_TIMEOUT_S.
    """
    with translated("making the streams"):
        async with asyncio.timeout(limits.STREAM_SETUP_TIMEOUT_S):
            for stream in subjects.STREAMS:
                await _ensure_stream(jetstream, _stream_config(stream))


async def _ensure_stream(jetstream: JetStreamContext, config: api.StreamConfig) -> None:
    while True:
        try:
            await jetstream.add_stream(config)
            return
        except BadRequestError as error:
            if error.err_code != _STREAM_NAME_IN_USE:
                raise
            # Made by an older version of the table; the server refuses what it cannot change in place.
            await jetstream.update_stream(config)
            return
        except (ServiceUnavailableError, nats.errors.TimeoutError):
            await asyncio.sleep(limits.PULL_RETRY_S)  # A server that has only just started; bounded by the caller.


async def ensure_consumer(jetstream: JetStreamContext, subject: str) -> tuple[str, str]:
    """The names of the stream and of the durable pull consumer of `subject`, which exists afterwards. Idempotent."""
    stream = subjects.stream_of(subject)
    config = consumer_config(stream, subject)
    name = str(config.durable_name)
    with translated(f"making the consumer of {subject}"):
        try:
            await jetstream.add_consumer(stream.name, config)
        except APIError as error:
            if error.err_code not in _CONSUMER_EXISTS:
                raise
    return stream.name, name


def consumer_config(stream: Stream, subject: str) -> api.ConsumerConfig:
    """`subject` may be a wildcard of the stream. A worker's own consumer goes some time after its worker."""
    return api.ConsumerConfig(
        durable_name=consumer_name(subject),
        filter_subject=subject,
        ack_policy=api.AckPolicy.EXPLICIT,
        ack_wait=stream.ack_wait_s,
        max_deliver=stream.deliveries_max,
        max_ack_pending=stream.messages_max,
        inactive_threshold=limits.AT_CONSUMER_IDLE_S if ".at." in subject else None,
    )


def consumer_name(subject: str) -> str:
    """Derived from the subject, so that all who pull from it share one consumer. Names may hold no dot or wildcard."""
    return subject.removeprefix("$").replace(".", "=").replace("*", "ANY").replace(">", "ALL")


def _stream_config(stream: Stream) -> api.StreamConfig:
    return api.StreamConfig(
        name=stream.name,
        subjects=list(stream.subjects),
        retention=api.RetentionPolicy(stream.retention),
        storage=api.StorageType.FILE,
        # A full stream refuses: the gateway answers 503 instead of losing accepted work.
        discard=api.DiscardPolicy.NEW,
        max_msgs=stream.messages_max,
        max_bytes=stream.bytes_max,
        max_age=stream.age_max_s,
        max_msg_size=limits.MESSAGE_BYTES_MAX,
        duplicate_window=stream.duplicate_window_s,
    )
