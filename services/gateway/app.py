"""The HTTP application: routes at `/v1/…` and at `/…`, one shape for every error, a request id on every response.

Owns what is the same for all calls; what a call does is in its routes' file.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway import errors
from services.gateway.edge import Edge
from services.gateway.routes_balance import balance_routes
from services.gateway.routes_chat import chat_routes
from services.gateway.routes_health import health_routes
from services.gateway.routes_models import model_routes
from shared.contracts import limits
from shared.contracts.errors import DeepServeError, Overloaded

REQUEST_ID_HEADER = b"x-request-id"


class Calls:
    """Pure ASGI: numbers each call, bounds how many are under way, puts the request id on the response."""

    def __init__(self, app: ASGIApp, entropy: Callable[[int], bytes], calls_max: int = limits.CALLS_MAX) -> None:
        self._app = app
        self._entropy = entropy
        self._calls_max = calls_max
        self._under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = str(uuid.UUID(bytes=self._entropy(16), version=4))
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID_HEADER, request_id.encode())]
            await send(message)

        if self._under_way >= self._calls_max:
            full = Overloaded("This server has too many open requests. Please retry after a brief wait.")
            await errors.response_of(full)(scope, receive, send_with_id)
            return
        self._under_way += 1
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._under_way -= 1


def create_app(edge: Edge, ready: Callable[[], list[str]], cors_origins: Sequence[str] = ()) -> FastAPI:
    """`ready()`: what is missing for service, empty when nothing is. `cors_origins`: who may call from a browser;
    nobody by default."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    for router in (chat_routes(edge), model_routes(edge), balance_routes(edge), health_routes(ready)):
        app.include_router(router)
        app.include_router(router, prefix="/v1")
    app.add_exception_handler(DeepServeError, errors.on_tree_error)
    app.add_exception_handler(HTTPException, errors.on_http_error)
    app.add_exception_handler(RequestValidationError, errors.on_validation_error)
    app.add_exception_handler(Exception, errors.on_bug)
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    app.add_middleware(Calls, entropy=edge.entropy)
    return app
