"""Requests between services: replies, refusals and rubbish, over the bus in memory."""

from __future__ import annotations

import pytest

from shared.contracts.errors import (
    DeadlineExceeded,
    DeepServeError,
    IllegalTransition,
    InsufficientBalance,
    InternalError,
    InvalidRequest,
    Overloaded,
    TooManyRequests,
)
from shared.contracts.messages import Authorize, AuthorizeReply, Done, Message, encode
from shared.runtime import rpc
from tests.fakes.bus import Broker, FakeBus

QUESTION = Authorize(key_digest=bytes(32), key_hint="abcd")


@pytest.fixture
def bus() -> FakeBus:
    return Broker().connect()


async def test_a_question_gets_its_answer(bus: FakeBus) -> None:
    async def answer(message: Authorize) -> Message:
        return AuthorizeReply(tag=message.key_hint)

    unsubscribe = await rpc.serve(bus, "billing.authorize", Authorize, answer, "billing")
    assert await rpc.call(bus, "billing.authorize", QUESTION, AuthorizeReply) == AuthorizeReply(tag="abcd")
    await unsubscribe()
    with pytest.raises(Overloaded):
        await rpc.call(bus, "billing.authorize", QUESTION, AuthorizeReply)


@pytest.mark.parametrize(
    ("raised", "arrives", "says"),
    [
        (InsufficientBalance("top up"), InsufficientBalance, "top up"),
        (TooManyRequests("slow down", retry_after_s=7), TooManyRequests, "slow down"),
        (IllegalTransition("internals"), InternalError, "internal error"),
        (KeyError("secret"), InternalError, "internal error"),
    ],
)
async def test_what_the_handler_raises_is_raised_at_the_caller(
    bus: FakeBus, raised: Exception, arrives: type[DeepServeError], says: str
) -> None:
    async def refuse(message: Authorize) -> Message:
        raise raised

    await rpc.serve(bus, "s", Authorize, refuse, "q")
    with pytest.raises(arrives, match=f"^{says}$") as error:
        await rpc.call(bus, "s", QUESTION, AuthorizeReply)
    assert error.value.retry_after_s == getattr(raised, "retry_after_s", None)


async def test_a_question_that_cannot_be_read_is_refused_and_never_handled(bus: FakeBus) -> None:
    async def never(message: Authorize) -> Message:
        raise AssertionError("handled")

    await rpc.serve(bus, "s", Authorize, never, "q")
    with pytest.raises(InvalidRequest):
        await rpc.call(bus, "s", Done(), AuthorizeReply)


@pytest.mark.parametrize("reply", [b"", b"\xc1rubbish", encode(QUESTION)])
async def test_a_reply_that_cannot_be_read_is_an_internal_error(bus: FakeBus, reply: bytes) -> None:
    async def answer(subject: str, payload: bytes) -> bytes:
        return reply

    await bus.subscribe("s", answer)
    with pytest.raises(InternalError):
        await rpc.call(bus, "s", QUESTION, AuthorizeReply)


async def test_silence_has_an_end(bus: FakeBus) -> None:
    async def silent(subject: str, payload: bytes) -> None:
        return None

    await bus.subscribe("s", silent)
    with pytest.raises(DeadlineExceeded):
        await rpc.call(bus, "s", QUESTION, AuthorizeReply, timeout_s=0.01)
