"""What a worker asks of others: claims, settlements, namespace keys; over answers scripted in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from shared.contracts import limits, messages
from shared.contracts.epoch import Epoch, Stage
from shared.contracts.errors import Conflict, DeadlineExceeded, DeepServeError, Overloaded, to_record
from shared.contracts.ids import AccountId, GatewayId, GrantId, HoldId, KeyId, NamespaceId, RequestId, WorkerId
from shared.contracts.messages import (
    ClaimReply,
    Message,
    NamespaceKeyReply,
    Refused,
    Settled,
)
from shared.contracts.tag import GrantClaims
from shared.contracts.usage import Usage
from shared.worker.claims import claim
from shared.worker.namespace_keys import NamespaceKeys
from shared.worker.settlement import Settlement

NAMESPACE = NamespaceId("ns_" + "1" * 32)
EPOCH = Epoch(1, Stage.DECODE, 1)
SETTLED = Settled(amount_nano=5, currency="USD")


class ScriptedBus:
    """Answers requests one after another: a message, or an error (of the bus; `Refused` is the other side's)."""

    def __init__(self, *answers: Message | DeepServeError) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        self.asked.append(subject)
        await asyncio.sleep(0)
        answer = self.answers.pop(0)
        if isinstance(answer, DeepServeError):
            raise answer
        return messages.encode(answer)


class SetClock:
    def __init__(self) -> None:
        self.at_s = 1_000.0

    def now_s(self) -> float:
        return self.at_s

    def monotonic_s(self) -> float:
        return self.at_s


def grant(deadline_s: float) -> GrantClaims:
    return GrantClaims(
        grant_id=GrantId("g"),
        request=RequestId("r"),
        hold=HoldId("h"),
        account=AccountId("a"),
        key_id=KeyId("k"),
        model="m",
        namespace=NAMESPACE,
        shared=(),
        cache_read=True,
        cache_write=True,
        traffic_class="chat",
        retention_s=60,
        prompt_tokens=1,
        max_output_tokens=1,
        issued_at_s=0.0,
        deadline_s=deadline_s,
    )


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SETTLE_RETRY_S", "SETTLE_RETRY_MAX_S", "CLAIM_RETRY_S"):
        monkeypatch.setattr(limits, name, 0.001)


async def settle(bus: ScriptedBus, deadline_s: float = 2_000.0) -> None:
    settlement = Settlement(bus, WorkerId("w"), SetClock())  # type: ignore[arg-type]
    usage = Usage(cached=0, uncached=1, not_eligible=0, output=1)
    async with asyncio.timeout(5):
        await settlement.settle("token", grant(deadline_s), EPOCH, usage, 0.1)


@pytest.mark.parametrize(
    ("answers", "asked"),
    [
        ((SETTLED,), 1),
        ((DeadlineExceeded("silent"), Overloaded("nobody"), SETTLED), 3),
        ((Refused(error=to_record(Overloaded("the database"))), SETTLED), 2),
        # It ended otherwise: asking again would not change that.
        ((Refused(error=to_record(Conflict("released"))),), 1),
    ],
)
async def test_a_settlement_is_told_until_it_is_committed_or_refused(answers: tuple[Any, ...], asked: int) -> None:
    bus = ScriptedBus(*answers)
    await settle(bus)
    assert (len(bus.asked), bus.answers) == (asked, [])


async def test_a_settlement_is_given_up_when_its_grant_is_void() -> None:
    bus = ScriptedBus(*[DeadlineExceeded("silent")] * 3)
    await settle(bus, deadline_s=1_000.0 - limits.SETTLE_ALLOWANCE_S - 1)
    assert len(bus.asked) == 1


async def test_a_claim_is_repeated_while_the_gateway_is_silent() -> None:
    reply = ClaimReply(verdict="go", hit_tokens=64)
    bus = ScriptedBus(DeadlineExceeded("silent"), Overloaded("nobody"), reply)
    assert await claim(bus, GatewayId("g"), RequestId("r"), EPOCH, WorkerId("w")) == reply  # type: ignore[arg-type]


async def test_a_gateway_that_stays_silent_knows_the_request_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PEER_LEASE_S", 0.02)
    bus = ScriptedBus(*[Overloaded("nobody")] * 1_000)
    reply = await claim(bus, GatewayId("g"), RequestId("r"), EPOCH, WorkerId("w"))  # type: ignore[arg-type]
    assert reply.verdict == "unknown"


def keys(bus: ScriptedBus, clock: SetClock, open_sealed: Callable[[bytes], bytes] = lambda sealed: sealed) -> Any:
    return NamespaceKeys(bus, open_sealed, clock)  # type: ignore[arg-type]


async def test_a_namespace_key_is_asked_for_once_and_again_after_minutes() -> None:
    first, second = bytes([1]) * 32, bytes([2]) * 32
    bus, clock = ScriptedBus(NamespaceKeyReply(sealed_key=first), NamespaceKeyReply(sealed_key=second)), SetClock()
    known = keys(bus, clock)
    assert await asyncio.gather(*(known.get("grant", NAMESPACE) for _ in range(5))) == [first] * 5
    clock.at_s += limits.NAMESPACE_KEY_TTL_S - 1
    assert await known.get("grant", NAMESPACE) == first
    clock.at_s += 1
    assert await known.get("grant", NAMESPACE) == second
    assert len(bus.asked) == 2


async def test_a_refused_namespace_key_is_asked_for_again() -> None:
    bus = ScriptedBus(DeadlineExceeded("silent"), NamespaceKeyReply(sealed_key=bytes(32)))
    known = keys(bus, SetClock())
    with pytest.raises(DeadlineExceeded):
        await known.get("grant", NAMESPACE)
    assert await known.get("grant", NAMESPACE) == bytes(32)


async def test_who_stops_waiting_for_a_key_does_not_stop_the_others() -> None:
    known = keys(ScriptedBus(NamespaceKeyReply(sealed_key=bytes(32))), SetClock())
    leaving, staying = (asyncio.create_task(known.get("grant", NAMESPACE)) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying == bytes(32)
