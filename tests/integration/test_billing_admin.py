"""The administrator's API over HTTP, on real books."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any

import httpx2
import pytest

from services.billing.accounts import key_digest
from services.billing.admin import create_app
from shared.contracts.messages import Revoked
from tests.integration.billing_books import Books, Customer, open_books, usage

pytestmark = pytest.mark.servers

TOKEN = "a-token-of-the-operator"


@pytest.fixture
async def books(fresh_database: str) -> AsyncIterator[Books]:
    async with open_books(fresh_database) as opened:
        yield opened
        assert await opened.faults() == {}


@pytest.fixture
async def client(books: Books) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(create_app(books.administration, TOKEN))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx2.AsyncClient(transport=transport, base_url="http://admin/admin/v1", headers=headers) as client:
        yield client


async def post(
    client: httpx2.AsyncClient, path: str, body: dict[str, Any], key: str | None = None, status: int = 201
) -> Any:
    headers = {} if key is None else {"Idempotency-Key": key}
    reply = await client.post(path, json=body, headers=headers)
    assert reply.status_code == status, reply.text
    return reply.json()


def error(reply: Any) -> tuple[str, str]:
    """(type, message); the body has DeepSeek's shape."""
    assert set(reply) == {"error"}
    assert set(reply["error"]) == {"message", "type", "param", "code"}
    return reply["error"]["type"], reply["error"]["message"]


async def test_an_account_is_created_credited_and_listed(client: httpx2.AsyncClient) -> None:
    paid = await post(client, "/accounts", {"name": "Acme", "credit": "10", "grant": "0.5"}, "k1")
    assert paid["id"].startswith("acct_")
    assert {name: paid[name] for name in ("name", "currency", "paid", "concurrency")} == {
        "name": "Acme",
        "currency": "USD",
        "paid": True,
        "concurrency": 500,
    }
    assert (paid["total_balance"], paid["granted_balance"], paid["topped_up_balance"]) == ("10.50", "0.50", "10.00")
    trial = await post(client, "/accounts", {"name": "Trial", "grant": "1", "currency": "CNY", "concurrency": 3}, "k2")
    assert (trial["paid"], trial["currency"], trial["concurrency"]) == (False, "CNY", 3)
    plain = await post(client, "/accounts", {"name": "Plain"})
    assert (plain["paid"], plain["total_balance"]) == (False, "0.00")

    credited = await post(client, f"/accounts/{trial['id']}/credits", {"amount": "2.25", "kind": "topped_up"}, "k3")
    assert (credited["amount"], credited["kind"], credited["paid"]) == ("2.25", "topped_up", True)
    assert (credited["total_balance"], credited["topped_up_balance"]) == ("3.25", "2.25")

    listed = (await client.get("/accounts")).json()
    assert [account["name"] for account in listed["accounts"]] == ["Acme", "Trial", "Plain"]
    assert listed["next"] is None
    assert (await client.get(f"/accounts/{paid['id']}")).json() == paid


async def test_accounts_come_in_pages(client: httpx2.AsyncClient) -> None:
    for number in range(5):
        await post(client, "/accounts", {"name": f"account {number}"})
    names: list[str] = []
    after: dict[str, str] = {}
    for _ in range(3):
        page = (await client.get("/accounts", params={"limit": 2, **after})).json()
        names += [account["name"] for account in page["accounts"]]
        after = {"after": page["next"]}
    assert names == [f"account {number}" for number in range(5)]
    assert page["next"] is None


async def test_money_moves_once_for_each_idempotency_key(client: httpx2.AsyncClient) -> None:
    wanted = {"name": "Acme", "credit": "10"}
    first = await post(client, "/accounts", wanted, "k1")
    assert await post(client, "/accounts", wanted, "k1") == first
    credits = f"/accounts/{first['id']}/credits"
    body = {"amount": "5", "kind": "topped_up"}
    replies = await asyncio.gather(*(post(client, credits, body, "k2") for _ in range(8)))
    assert all(reply == replies[0] for reply in replies)
    assert await post(client, credits, {"amount": "5.00", "kind": "topped_up"}, "k2") == replies[0]
    assert (await client.get(f"/accounts/{first['id']}")).json()["total_balance"] == "15.00"

    other = await post(client, "/accounts", {"name": "Other"})
    for path, changed in (
        (credits, {"amount": "6", "kind": "topped_up"}),
        (credits, {"amount": "5", "kind": "granted"}),
        (f"/accounts/{other['id']}/credits", body),
        ("/accounts", wanted),
    ):
        refused = await post(client, path, changed, "k2", status=409)
        assert error(refused)[1] == "this Idempotency-Key was used for another call"
    for path, unkeyed in ((credits, body), ("/accounts", wanted), ("/accounts", {"name": "x", "grant": "1"})):
        assert "Idempotency-Key" in error(await post(client, path, unkeyed, status=400))[1]
    assert (await client.get(f"/accounts/{first['id']}")).json()["total_balance"] == "15.00"
    assert len((await client.get("/accounts")).json()["accounts"]) == 2


async def test_amounts_that_are_none_move_nothing(client: httpx2.AsyncClient) -> None:
    account = await post(client, "/accounts", {"name": "Acme"})
    wrong: list[tuple[dict[str, Any], int]] = [
        ({"amount": 5, "kind": "topped_up"}, 422),
        ({"amount": "5", "kind": "other"}, 422),
        ({"amount": "5"}, 422),
        ({"amount": "5", "kind": "granted", "more": 1}, 422),
        *(({"amount": amount, "kind": "granted"}, 400) for amount in ("-5", "0", "1e9", "1e-10", "1000000001")),
    ]
    for body, status in wrong:
        error(await post(client, f"/accounts/{account['id']}/credits", body, "k", status=status))
    assert (await client.get(f"/accounts/{account['id']}")).json()["total_balance"] == "0.00"


async def test_no_balance_grows_past_its_bound(client: httpx2.AsyncClient) -> None:
    account = await post(client, "/accounts", {"name": "Acme", "credit": "1000000000"}, "k1")
    assert account["total_balance"] == "1000000000.00"
    body = {"amount": "0.000000001", "kind": "granted"}
    error(await post(client, f"/accounts/{account['id']}/credits", body, "k2", status=400))


async def test_a_key_is_shown_once_and_revoked_everywhere(books: Books, client: httpx2.AsyncClient) -> None:
    account = await post(client, "/accounts", {"name": "Acme"})
    made = await post(client, f"/accounts/{account['id']}/keys", {"traffic_class": "agent"})
    books.clock.time_s += 1
    plain = await client.post(f"/accounts/{account['id']}/keys")
    assert plain.status_code == 201
    assert made["key"].startswith("sk-")
    assert (made["hint"], made["traffic_class"], made["revoked"]) == (made["key"][-4:], "agent", False)
    listed = (await client.get(f"/accounts/{account['id']}/keys")).json()
    assert listed["keys"][0] == {name: value for name, value in made.items() if name != "key"}
    assert [key["id"] for key in listed["keys"]] == [made["id"], plain.json()["id"]]
    [stored] = await books.rows("SELECT * FROM billing.api_keys WHERE id = $1", made["id"])
    assert stored["digest"] == key_digest(made["key"])
    assert made["key"] not in str(dict(stored))

    books.clock.time_s += 5
    for _ in range(2):
        reply = await client.delete(f"/keys/{made['id']}")
        assert (reply.status_code, reply.content) == (204, b"")
    assert books.heard == [Revoked(account=account["id"], key_id=made["id"], at_s=books.clock.now_s())] * 2
    listed = (await client.get(f"/accounts/{account['id']}/keys")).json()
    assert [key["revoked"] for key in listed["keys"]] == [True, False]


async def test_usage_and_entries_are_shown(books: Books, client: httpx2.AsyncClient) -> None:
    customer: Customer = await books.customer(credit="1")
    for number in range(3):
        await customer.settle(await customer.hold(f"r{number}"), usage(cached=960, uncached=40, output=number))
    first = (await client.get(f"/accounts/{customer.account}/usage", params={"limit": 2})).json()
    rest = (await client.get(f"/accounts/{customer.account}/usage", params={"after": first["next"]})).json()
    rows = first["usage"] + rest["usage"]
    assert rest["next"] is None
    assert [(row["request"], row["cached"], row["uncached"], row["output"]) for row in rows] == [
        (f"r{number}", 960, 40, number) for number in range(3)
    ]
    # 960 × 3 + 40 × 150 + n × 600 nano-units
    assert [row["amount"] for row in rows] == ["0.00000888", "0.00000948", "0.00001008"]
    spent = sum(Decimal(row["amount"]) for row in rows)
    account = (await client.get(f"/accounts/{customer.account}")).json()
    assert Decimal(account["spent"]) == spent
    assert Decimal(account["total_balance"]) == 1 - spent

    entries = (await client.get(f"/accounts/{customer.account}/entries", params={"limit": 4})).json()["entries"]
    assert [(entry["act"], entry["debit"], entry["credit"], entry["amount"]) for entry in entries] == [
        ("topped_up", "funding", "topped_up", "1.00"),
        ("hold", "topped_up", "held", "0.00021"),
        ("settle", "held", "revenue", "0.00000888"),
        ("settle", "held", "topped_up", "0.00020112"),
    ]
    assert [entry["request"] for entry in entries] == [None, "r0", "r0", "r0"]


async def test_reconciliation_is_sound_and_names_its_checks(client: httpx2.AsyncClient) -> None:
    found = (await client.get("/reconciliation")).json()
    assert found["sound"] is True
    assert len(found["checks"]) == 8
    assert all(check["says"] and check["count"] == 0 for check in found["checks"])


async def test_what_is_not_there_is_not_found(client: httpx2.AsyncClient) -> None:
    nobody = "/accounts/acct_" + "0" * 32
    for method, path in (
        ("GET", nobody),
        ("GET", "/accounts/acct_x%00y"),
        ("GET", f"{nobody}/usage"),
        ("GET", f"{nobody}/entries"),
        ("GET", f"{nobody}/keys"),
        ("POST", f"{nobody}/keys"),
        ("DELETE", "/keys/key_" + "0" * 32),
        ("DELETE", "/keys/x"),
        ("GET", "/nowhere"),
    ):
        reply = await client.request(method, path)
        assert reply.status_code == 404
        error(reply.json())


async def test_credits_to_nobody_leave_their_key_unused(client: httpx2.AsyncClient) -> None:
    body = {"amount": "5", "kind": "topped_up"}
    await post(client, f"/accounts/acct_{'0' * 32}/credits", body, "k1", status=404)
    account = await post(client, "/accounts", {"name": "Acme"})
    assert (await post(client, f"/accounts/{account['id']}/credits", body, "k1"))["total_balance"] == "5.00"


async def test_nobody_enters_without_the_token(client: httpx2.AsyncClient) -> None:
    del client.headers["Authorization"]
    for header in (None, "Bearer wrong", f"Basic {TOKEN}", TOKEN, "Bearer "):
        headers = {} if header is None else {"Authorization": header}
        for method, path in (("GET", "/accounts"), ("POST", "/accounts"), ("GET", "/openapi.json"), ("GET", "/x")):
            reply = await client.request(method, path, headers=headers)
            assert reply.status_code == 401
            assert error(reply.json())[0] == "authentication_error"


async def test_bodies_are_bounded(client: httpx2.AsyncClient) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"{}"

    for reply in (
        await client.post("/accounts", content=b"x" * (64 * 1024 + 1)),
        await client.post("/accounts", content=pieces()),
        await client.post("/accounts", content=b"{", headers={"Content-Type": "application/json"}),
    ):
        assert reply.status_code in (400, 422)
        error(reply.json())
    assert (await client.put("/accounts")).status_code == 405


async def test_the_api_describes_itself(client: httpx2.AsyncClient) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    assert set(paths) == {
        "/admin/v1/accounts",
        "/admin/v1/accounts/{account}",
        "/admin/v1/accounts/{account}/credits",
        "/admin/v1/accounts/{account}/keys",
        "/admin/v1/accounts/{account}/usage",
        "/admin/v1/accounts/{account}/entries",
        "/admin/v1/keys/{key}",
        "/admin/v1/reconciliation",
    }
