"""Refusals in DeepSeek's body shape with the right status; what they leave behind is nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import structlog.testing

from services.gateway.errors import FAILED, OVERLOADED
from shared.contracts import limits, messages, subjects
from shared.contracts.errors import InsufficientBalance, InternalError, Overloaded
from shared.contracts.ids import AccountId
from shared.contracts.messages import Authorize, Revoked
from shared.runtime.clock import SystemClock
from tests.contract.gateway_world import CONTEXT, KEY, MODEL, WAIT_S, World, world

pytestmark = pytest.mark.servers

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
BODY = {"model": MODEL, "messages": HELLO}


@pytest.fixture
async def place(nats_url: str, tmp_path: Path) -> AsyncIterator[World]:
    async with world(nats_url, tmp_path, queued_requests_max=2) as made:
        yield made


def error_of(reply: httpx2.Response, status: int) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    error: dict[str, Any] = reply.json()["error"]
    assert set(reply.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] is None
    assert reply.headers["x-request-id"]
    return error


async def test_a_wrong_key_is_named_by_its_end(place: World) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        await place.sdk("sk-00000000wxyz").chat.completions.create(model=MODEL, messages=HELLO)
    assert "Authentication Fails, Your api key: ****wxyz is invalid" in str(caught.value)
    reply = await place.http.post("/chat/completions", json=BODY, headers={"Authorization": "Bearer sk-1"})
    assert error_of(reply, 401) == {
        "message": "Authentication Fails, Your api key: ****sk-1 is invalid",
        "type": "authentication_error",
        "param": None,
        "code": "invalid_request_error",
    }


@pytest.mark.parametrize("header", ["", "Basic abc", "Bearer", "sk-abc"])
async def test_a_malformed_header_has_its_own_words(place: World, header: str) -> None:
    reply = await place.http.post("/chat/completions", json=BODY, headers={"Authorization": header})
    assert error_of(reply, 401)["message"] == "Authentication Fails (auth header format should be Bearer sk-...)"
    assert place.billing.asked == [], "billing was not asked"


async def test_no_money(place: World) -> None:
    place.billing.refuse[subjects.BILLING_HOLD] = InsufficientBalance("Insufficient Balance")
    with pytest.raises(openai.APIStatusError) as caught:
        await place.sdk().chat.completions.create(model=MODEL, messages=HELLO)
    assert caught.value.status_code == 402
    reply = await place.http.post("/chat/completions", json=BODY)
    assert error_of(reply, 402) == {
        "message": "Insufficient Balance",
        "type": "unknown_error",
        "param": None,
        "code": "invalid_request_error",
    }
    assert place.prefill.jobs.empty()


async def test_bad_requests(place: World) -> None:
    for content, status in (
        (b"{", 400),
        (b'{"model":"small"}', 422),
        (b'{"model":"nope","messages":[{"role":"user","content":"x"}]}', 400),
    ):
        reply = await place.http.post("/v1/chat/completions", content=content)
        assert error_of(reply, status)["type"] == "invalid_request_error"
    assert place.billing.holds() == []


async def test_paths_and_methods(place: World) -> None:
    assert error_of(await place.http.get("/nowhere"), 404)["message"] == "Not Found"
    assert error_of(await place.http.get("/v1/chat/completions"), 405)["message"] == "Method Not Allowed"


async def test_a_body_beyond_the_bound(place: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_BYTES_MAX", 1_000)
    reply = await place.http.post("/v1/chat/completions", content=b" " * 1_001)
    assert "larger than 1000 bytes" in error_of(reply, 413)["message"]


async def test_an_account_at_its_limit(place: World) -> None:
    place.billing.concurrency = 1
    first = asyncio.create_task(place.http.post("/chat/completions", json=BODY))
    job = await place.prefill.job()
    reply = await place.http.post("/chat/completions", json=BODY)
    error = error_of(reply, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_reached")
    assert reply.headers["retry-after"] == str(limits.RETRY_AFTER_S)
    await job.claim()
    await job.send(0, [place.stop()], hit=0, finish="stop")
    assert (await first).status_code == 200
    second = asyncio.create_task(place.answer([place.stop()]))
    assert (await place.http.post("/chat/completions", json=BODY)).status_code == 200
    await second


async def test_a_full_queue_and_its_fair_order(place: World) -> None:
    place.prefill.capacity = place.decode.capacity = 1
    await settled_capacity(place)
    asking = [asyncio.create_task(place.http.post("/chat/completions", json=BODY)) for _ in range(2)]
    jobs = [await place.prefill.job() for _ in range(2)]  # one running, one waiting at the workers
    asking += [asyncio.create_task(place.http.post("/chat/completions", json=BODY)) for _ in range(3)]
    done, asking_ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_S)
    refused = done.pop().result()
    assert error_of(refused, 503)["type"] == "service_unavailable_error"
    assert int(refused.headers["retry-after"]) >= 1
    for _ in range(4):
        job = jobs.pop() if jobs else await place.prefill.job()
        await job.claim()
        await job.send(0, [place.stop()], hit=0, finish="stop")
    assert {(await task).status_code for task in asking_} == {200}


async def settled_capacity(place: World) -> None:
    """The gateway has heard the workers' new capacity."""
    await place.prefill.beat()
    await place.decode.beat()
    async with asyncio.timeout(WAIT_S):
        now_s = SystemClock().monotonic_s
        while place.gateway.edge.workers.capacity("prefill", MODEL, now_s()) != place.prefill.capacity or (
            place.gateway.edge.workers.capacity("decode", MODEL, now_s()) != place.decode.capacity
        ):
            await place.http.get("/healthz")


async def test_no_workers(nats_url: str, tmp_path: Path) -> None:
    async with world(nats_url, tmp_path) as place:
        place.gateway.edge.workers._heard.clear()
        reply = await place.http.post("/chat/completions", json=BODY)
        assert error_of(reply, 503)["message"] == OVERLOADED
        assert reply.headers["retry-after"] == str(limits.RETRY_AFTER_S)
        assert place.billing.holds() == []


async def test_billing_down_is_a_503_and_its_bug_a_500(place: World) -> None:
    place.billing.refuse[subjects.BILLING_AUTHORIZE] = InternalError("a secret of billing")
    reply = await place.http.post("/chat/completions", json=BODY)
    assert error_of(reply, 500)["message"] == FAILED
    assert reply.headers["retry-after"] == str(limits.RETRY_AFTER_S)
    del place.billing.refuse[subjects.BILLING_AUTHORIZE]
    for stop in place.billing.stops:
        await stop()
    for reply in (await place.http.post("/chat/completions", json=BODY), await place.http.get("/user/balance")):
        error = error_of(reply, 503)
        assert (error["message"], error["code"]) == (OVERLOADED, "service_unavailable")
        assert reply.headers["retry-after"] == str(limits.RETRY_AFTER_S)


async def test_a_database_that_is_away_is_named_in_the_log_alone(place: World) -> None:
    place.billing.refuse[subjects.BILLING_HOLD] = Overloaded("the database does not answer: 57P03", retry_after_s=7)
    with structlog.testing.capture_logs() as logs:
        reply = await place.http.post("/chat/completions", json=BODY)
    assert error_of(reply, 503)["message"] == OVERLOADED
    assert reply.headers["retry-after"] == "7"
    (entry,) = [entry for entry in logs if entry["event"] == "request.refused"]
    assert entry["error"] == "Overloaded: the database does not answer: 57P03"
    assert entry["request"] == reply.headers["x-request-id"]


async def test_an_account_without_money_is_refused_before_any_work_until_it_has_some(place: World) -> None:
    place.billing.funded = False
    reply = await place.http.post("/chat/completions", content=b"{ this is not even JSON")
    assert error_of(reply, 402)["message"] == "Insufficient Balance"
    assert (await place.http.get("/user/balance")).json()["balance_infos"][0]["currency"] == "USD"
    assert (await place.http.get("/models")).status_code == 200
    place.billing.funded = True
    serving = asyncio.create_task(place.answer([place.stop()]))
    assert (await place.http.post("/chat/completions", json=BODY)).status_code == 200
    await serving


async def test_a_prompt_of_six_megabytes_is_refused_without_being_encoded(
    place: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model,) = place.gateway.edge.models._models.values()
    monkeypatch.setattr(model.text.tokenizer, "_plain", None)  # whoever encodes fails
    for role in ("user", "assistant"):  # the first by the body, the other by its rendered prompt
        long = {"model": MODEL, "messages": [*HELLO, {"role": role, "content": "word " * 1_200_000}]}
        asking = asyncio.create_task(place.http.post("/chat/completions", json=long))
        assert (await place.http.get("/healthz")).status_code == 200
        words = error_of(await asking, 400)["message"]
        assert words.startswith(
            f"This model's maximum context length is {CONTEXT} tokens. However, you requested at least "
        )
        assert words.endswith("Please reduce the length of the messages or completion.")
    assert place.billing.holds() == []


async def test_an_image_is_refused(place: World) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": [image]}]}
    assert (
        "`image_url` is not supported"
        in error_of(await place.http.post("/chat/completions", json=body), 400)["message"]
    )


async def test_models_and_balance_at_both_places(place: World) -> None:
    for prefix in ("", "/v1"):
        assert (await place.http.get(f"{prefix}/models")).json() == {
            "object": "list",
            "data": [{"id": MODEL, "object": "model", "owned_by": "deepserve"}],
        }
        assert (await place.http.get(f"{prefix}/user/balance")).json() == {
            "is_available": True,
            "balance_infos": [
                {
                    "currency": "USD",
                    "total_balance": "12.50",
                    "granted_balance": "2.50",
                    "topped_up_balance": "10.00",
                }
            ],
        }
    assert [model.id async for model in place.sdk().models.list()] == [MODEL]
    for path in ("/models", "/user/balance"):
        assert error_of(await place.http.get(path, headers={"Authorization": ""}), 401)


async def test_health(place: World) -> None:
    assert (await place.http.get("/healthz")).json() == {"status": "ok"}
    assert (await place.http.get("/readyz")).json() == {"status": "ready"}
    place.gateway.edge.workers._heard.clear()
    reply = await place.http.get("/readyz")
    assert reply.status_code == 503
    assert reply.json()["missing"] == [f"no prefill worker for {MODEL}", f"no decode worker for {MODEL}"]


def authorizations(place: World) -> int:
    return sum(isinstance(message, Authorize) for message in place.billing.asked)


async def test_billing_is_asked_once_for_a_key_until_it_is_revoked(place: World) -> None:
    await asyncio.gather(*(place.http.get("/models") for _ in range(5)))
    assert authorizations(place) == 1
    await place.http.get("/models")
    assert authorizations(place) == 1
    digest = next(m.key_digest for m in place.billing.asked if isinstance(m, Authorize))
    assert KEY.encode() not in digest
    revoked = Revoked(account=AccountId("account"), key_id=None, at_s=SystemClock().now_s())
    await place.bus.send(subjects.REVOKED, messages.encode(revoked))
    async with asyncio.timeout(WAIT_S):
        while authorizations(place) == 1:
            await place.http.get("/models")


async def test_an_old_tag_is_renewed(place: World) -> None:
    place.billing.tag_ttl_s = limits.TAG_RENEW_S
    await place.http.get("/models")
    await place.http.get("/models")
    assert authorizations(place) == 2


async def test_nobody_may_call_from_a_browser_unless_configured(place: World) -> None:
    reply = await place.http.get("/healthz", headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in reply.headers
