"""The client of billing's administration API (`/admin/v1`)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any, Final, Self
from urllib.parse import quote

import httpx2

from shared.cli.failure import CommandFailed
from shared.contracts import limits

_RETRY_S: Final = 0.5


class AdminClient:
    """Blocking; a context manager. Every call that moves money carries an idempotency key made before its first try."""

    def __init__(self, admin_url: str, token: str) -> None:
        self._http = httpx2.Client(
            base_url=f"{admin_url.rstrip('/')}/admin/v1",
            headers={"Authorization": f"Bearer {token}"},
            timeout=limits.ADMIN_TIMEOUT_S,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def create_account(self, name: str, money: dict[str, str], *, idempotency_key: str | None = None) -> dict[str, Any]:
        """`money`: any of currency, credit, grant, as decimal strings of whole units."""
        return dict(self._send("POST", "/accounts", {"name": name, **money}, idempotency_key=idempotency_key))

    def accounts(self) -> Iterator[dict[str, Any]]:
        """All of them in order of creation, page by page."""
        query = ""
        while True:
            page = self._send("GET", f"/accounts{query}", None)
            yield from page["accounts"]
            if page["next"] is None:
                return
            query = f"?after={quote(page['next'])}"

    def knows(self, account: str) -> bool:
        """Whether the books have this account."""
        return self._reply("GET", f"/accounts/{quote(account)}", None, {}, also=(404,)).status_code != 404

    def credit(self, account: str, amount: str, kind: str) -> dict[str, Any]:
        """`kind`: topped_up (makes the account paid) or granted."""
        return dict(self._send("POST", f"/accounts/{quote(account)}/credits", {"amount": amount, "kind": kind}))

    def create_key(self, account: str, traffic_class: str | None) -> dict[str, Any]:
        body = {"traffic_class": traffic_class} if traffic_class else {}
        return dict(self._send("POST", f"/accounts/{quote(account)}/keys", body))

    def keys(self, account: str) -> list[dict[str, Any]]:
        return list(self._send("GET", f"/accounts/{quote(account)}/keys", None)["keys"])

    def revoke_key(self, key: str) -> None:
        self._send("DELETE", f"/keys/{quote(key)}", None)

    def _send(self, method: str, path: str, body: dict[str, Any] | None, *, idempotency_key: str | None = None) -> Any:
        """The JSON of the answer, {} without one."""
        headers = {"Idempotency-Key": idempotency_key or str(uuid.uuid4())} if method == "POST" else {}
        reply = self._reply(method, path, body, headers)
        return reply.json() if reply.content else {}

    def _reply(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        headers: dict[str, str],
        *,
        also: tuple[int, ...] = (),
    ) -> httpx2.Response:
        """The first answer that is neither a refusal (but `also`) nor "try again". Raises CommandFailed."""
        last = ""
        for attempt in range(limits.ADMIN_ATTEMPTS_MAX):
            if attempt:
                time.sleep(_RETRY_S * attempt)
            try:
                reply = self._http.request(method, path, json=body, headers=headers)
            except httpx2.TransportError as error:
                last = str(error)
                continue
            if reply.status_code == 503:
                last = _message(reply)
                continue
            if reply.status_code >= 400 and reply.status_code not in also:
                raise CommandFailed(_message(reply))
            return reply
        raise CommandFailed(f"billing did not answer: {last}")


def _message(reply: httpx2.Response) -> str:
    """The message of DeepSeek's error body, else the status line."""
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"billing answered {reply.status_code} {reply.reason_phrase}"
