"""The administrator's HTTP API, `/admin/v1`, on a port of its own: routes and errors, nothing else.

Every call carries the bearer token of the operator, and is refused before its body is read without it. Errors have the
body of the public API: {"error": {"message", "type", "param", "code"}}.
"""

from __future__ import annotations

import hmac
from typing import Annotated, Any, Final

from fastapi import APIRouter, FastAPI, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.billing.admin_schemas import (
    Accounts,
    AccountView,
    CreditView,
    EntriesPage,
    ErrorBody,
    Keys,
    NewAccount,
    NewCredit,
    NewKey,
    NewKeyView,
    Reconciliation,
    UsagePage,
)
from services.billing.administration import Administration
from shared.contracts import limits
from shared.contracts.errors import (
    AuthenticationFailed,
    ClientError,
    DeepServeError,
    InternalError,
    InvalidRequest,
    NotFound,
    UnprocessableRequest,
    http_body,
)

PREFIX: Final = "/admin/v1"
_AUTHORIZATION: Final = b"authorization"
_LENGTH: Final = b"content-length"

IdempotencyKey = Annotated[str | None, Header(alias="Idempotency-Key")]
After = Annotated[int, Query(ge=0, le=2**63 - 1)]
Limit = Annotated[int, Query(ge=1, le=limits.ADMIN_PAGE_ROWS_MAX)]


def create_app(administration: Administration, token: str) -> ASGIApp:
    """`token`: the bearer token that every call needs."""
    app = FastAPI(
        title="DeepServe administration",
        version="1",
        description=__doc__,
        openapi_url=f"{PREFIX}/openapi.json",
        docs_url=None,
        redoc_url=None,
    )
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorBody} for status in (400, 401, 404, 409, 422, 503)
    }
    app.include_router(_accounts(administration), prefix=PREFIX, responses=errors)
    app.include_router(_books(administration), prefix=PREFIX, responses=errors)
    app.add_exception_handler(DeepServeError, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse_body)
    app.add_exception_handler(HTTPException, _refuse_route)
    app.add_exception_handler(Exception, _fail)
    return Guard(app, token)


def _accounts(administration: Administration) -> APIRouter:
    router = APIRouter(tags=["accounts"])

    @router.post("/accounts", status_code=201)
    async def create_account(body: NewAccount, idempotency_key: IdempotencyKey = None) -> AccountView:
        """A new account. With `credit` or `grant` the header Idempotency-Key is mandatory."""
        return await administration.create_account(body, idempotency_key)

    @router.get("/accounts")
    async def list_accounts(after: str | None = None, limit: Limit = limits.ADMIN_PAGE_ROWS_MAX) -> Accounts:
        """All accounts in order of creation, a page at a time."""
        return await administration.accounts(after, limit)

    @router.get("/accounts/{account}")
    async def get_account(account: str) -> AccountView:
        """One account with its balances."""
        return await administration.account(account)

    @router.post("/accounts/{account}/credits", status_code=201)
    async def credit(account: str, body: NewCredit, idempotency_key: IdempotencyKey = None) -> CreditView:
        """Brings money in. The header Idempotency-Key is mandatory: the same call again changes nothing and is
        answered as before, another one under the same key is refused with 409."""
        return await administration.credit(account, body, idempotency_key)

    @router.post("/accounts/{account}/keys", status_code=201)
    async def create_key(account: str, body: NewKey | None = None) -> NewKeyView:
        """A new API key. It is shown in this answer and never again."""
        return await administration.create_key(account, body.traffic_class if body else None)

    @router.get("/accounts/{account}/keys")
    async def list_keys(account: str) -> Keys:
        """The account's keys, without the keys themselves."""
        return await administration.keys(account)

    @router.delete("/keys/{key}", status_code=204)
    async def revoke_key(key: str) -> Response:
        """Revokes a key everywhere, at once. Idempotent."""
        await administration.revoke_key(key)
        return Response(status_code=204)

    return router


def _books(administration: Administration) -> APIRouter:
    router = APIRouter(tags=["books"])

    @router.get("/accounts/{account}/usage")
    async def usage(account: str, after: After = 0, limit: Limit = 100) -> UsagePage:
        """Settled requests, oldest first; `after` is the last `id` seen."""
        return await administration.usage(account, after, limit)

    @router.get("/accounts/{account}/entries")
    async def entries(account: str, after: After = 0, limit: Limit = 100) -> EntriesPage:
        """The ledger entries of the account, oldest first; `after` is the last `id` seen."""
        return await administration.entries(account, after, limit)

    @router.get("/reconciliation")
    async def reconciliation() -> Reconciliation:
        """Checks the books against themselves."""
        return await administration.reconciliation()

    return router


def _answer(error: DeepServeError) -> JSONResponse:
    """The error's body; what is not the caller's fault keeps its details out of it."""
    headers = {"Retry-After": str(error.retry_after_s or 1)} if error.status == 503 else None
    if not isinstance(error, ClientError) and error.status != 503:
        error = DeepServeError("internal error")
    return JSONResponse(http_body(error), status_code=error.status, headers=headers)


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, DeepServeError):
        raise error
    return _answer(error)


async def _fail(request: Request, error: Exception) -> JSONResponse:
    """A bug. The server logs it, since the framework raises it again after the answer."""
    return _answer(InternalError("internal error"))


async def _refuse_body(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, RequestValidationError):
        raise error
    faults = [f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}" for fault in error.errors()]
    return _answer(UnprocessableRequest("; ".join(faults)))


async def _refuse_route(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, HTTPException):
        raise error
    known = NotFound("no such path") if error.status_code == 404 else InvalidRequest(str(error.detail))
    return JSONResponse(http_body(known), status_code=error.status_code, headers=error.headers)


class Guard:
    """Lets nobody in without the token, and no body in that is larger than `limits.ADMIN_BODY_BYTES_MAX`."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if not hmac.compare_digest(headers.get(_AUTHORIZATION, b""), self._expected):
            refusal = _answer(AuthenticationFailed("the administrator's bearer token is missing or wrong"))
            await refusal(scope, receive, send)
            return
        # A body without a length is refused too: nothing that administers needs to stream.
        length = headers.get(_LENGTH, b"" if b"transfer-encoding" in headers else b"0")
        if not length.isdigit() or int(length) > limits.ADMIN_BODY_BYTES_MAX:
            message = f"a body has a Content-Length of at most {limits.ADMIN_BODY_BYTES_MAX} bytes"
            await _answer(InvalidRequest(message))(scope, _nothing, send)
            return
        await self._app(scope, receive, send)


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
