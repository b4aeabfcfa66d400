"""Requests between services over the bus: a message in, a message out, errors of the tree across the wire."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
import structlog

from shared.contracts import limits
from shared.contracts.errors import DeepServeError, InternalError, InvalidRequest, from_record, to_record
from shared.contracts.messages import Message, Refused, encode
from shared.contracts.ports import Bus
from shared.runtime.service import as_internal_error

_log = structlog.get_logger()
Request = TypeVar("Request", bound=Message)
Reply = TypeVar("Reply", bound=Message)


async def call(
    bus: Bus, subject: str, message: Message, reply_type: type[Reply], timeout_s: float = limits.RPC_TIMEOUT_S
) -> Reply:
    """The reply of whoever serves `subject`.

    Raises the error that the other side refused with; Overloaded when nobody serves, DeadlineExceeded when no reply
    came in time (the other side may have acted), InternalError when it cannot be read.
    """
    data = await bus.request(subject, encode(message), timeout_s)
    try:
        reply = _decoder(reply_type).decode(data)
    except msgspec.DecodeError as error:
        raise InternalError(f"unreadable reply from {subject}") from error
    if isinstance(reply, reply_type):
        return reply
    if isinstance(reply, Refused):
        raise from_record(reply.error)
    raise InternalError(f"{subject} replied with {type(reply).__name__}")


async def serve(
    bus: Bus,
    subject: str,
    request_type: type[Request],
    handler: Callable[[Request], Awaitable[Message]],
    queue: str | None,
) -> Callable[[], Awaitable[None]]:
    """Answers requests on `subject`; returns the unsubscribe. Members of one `queue` share them.

    What the handler raises is the refusal; an exception outside of the tree is a bug, logged here, an InternalError
    there. A message that cannot be read is refused as InvalidRequest.
    """
    decoder = msgspec.msgpack.Decoder(request_type)

    async def answer(subject: str, payload: bytes) -> bytes:
        try:
            message = decoder.decode(payload)
            return encode(await as_internal_error(handler(message)))
        except msgspec.DecodeError as error:
            _log.warning("message.unreadable", subject=subject, error=str(error))
            return _refusal(InvalidRequest("unreadable message"))
        except DeepServeError as error:
            return _refusal(error)

    return await bus.subscribe(subject, answer, queue)


@functools.cache
def _decoder(reply_type: type[Message]) -> msgspec.msgpack.Decoder[Message]:
    """As many as there are kinds of reply; making one costs more than using it."""
    return msgspec.msgpack.Decoder(reply_type | Refused)


def _refusal(error: DeepServeError) -> bytes:
    return encode(Refused(error=to_record(error)))
