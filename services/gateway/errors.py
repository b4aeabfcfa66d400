"""Every refusal in DeepSeek's body shape, whatever raised it (reference, rows 52 to 58)."""

from __future__ import annotations

import orjson
import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from shared.contracts import errors, limits
from shared.contracts.errors import (
    AuthenticationFailed,
    ClaimRefused,
    DeepServeError,
    InternalError,
    Overloaded,
    UnprocessableRequest,
)

log = structlog.get_logger()


FAILED = "The server had an error while processing your request. Please retry your request after a brief wait."
OVERLOADED = "The server is overloaded or unavailable. Please retry your request after a brief wait."


def note(event: str, error: DeepServeError, request_id: str) -> None:
    """Into the log: what is our own fault with all that is known of it, since the client is not told."""
    kind = type(error).__name__
    if error.status < 500:
        log.info(event, request=request_id, status=error.status, error=kind)
    else:
        level = log.warning if error.retryable else log.error
        level(event, request=request_id, status=error.status, error=f"{kind}: {error.message}")


def public(error: DeepServeError) -> DeepServeError:
    """What the client may read. Our own faults are one plain sentence each: which part failed, and how, is told by
    `note`. A statement that was revoked or ran out on the way is the key's."""
    if isinstance(error, ClaimRefused):
        return AuthenticationFailed("Authentication Fails, Your api key is invalid")
    if error.status >= 500:
        kind, words = (Overloaded, OVERLOADED) if error.retryable else (InternalError, FAILED)
        return kind(words, retry_after_s=error.retry_after_s)
    return error


def body_of(error: DeepServeError) -> bytes:
    return orjson.dumps(errors.http_body(public(error)))


def response_of(error: DeepServeError) -> Response:
    """Retry-After where a retry can help."""
    error = public(error)
    headers = {}
    if error.retryable or error.status >= 500:
        headers["retry-after"] = str(error.retry_after_s or limits.RETRY_AFTER_S)
    body = orjson.dumps(errors.http_body(error))
    return Response(body, status_code=error.status, headers=headers, media_type="application/json")


async def on_tree_error(request: Request, error: Exception) -> Response:
    """Handler of DeepServeError."""
    known = error if isinstance(error, DeepServeError) else InternalError(str(error))
    note("call.refused", known, request.state.request_id)
    return response_of(known)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Handler of the framework's own refusals: no such path, no such method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = str(error.detail) if isinstance(error, HTTPException) else "Internal Server Error"
    headers = getattr(error, "headers", None)
    return Response(_body(detail, status), status_code=status, headers=headers, media_type="application/json")


async def on_validation_error(request: Request, error: Exception) -> Response:
    """Handler of the framework's validation."""
    return response_of(UnprocessableRequest(f"Failed to deserialize the JSON body into the target type: {error}"))


async def on_bug(request: Request, error: Exception) -> Response:
    """Handler of everything else; the server logs it with its traceback. It stands outside of what adds the id."""
    response = response_of(InternalError(type(error).__name__))
    response.headers["x-request-id"] = request.state.request_id
    return response


def _body(message: str, status: int) -> bytes:
    kind = "invalid_request_error" if status < 500 else "internal_error"
    return orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": kind}})
