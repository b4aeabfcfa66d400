"""The tree of errors. The class says HTTP status, DeepSeek error type and code, and whether a retry can help.

DeepServeError
├── ClientError          the request is at fault; its message goes to the client
│   ├── InvalidRequest 400    ├── AuthenticationFailed 401   ├── InsufficientBalance 402
│   ├── NotFound 404          ├── Conflict 409               ├── UnprocessableRequest 422
│   ├── RequestTooLarge 413   └── TooManyRequests 429
├── ServiceError         we are at fault
│   ├── InternalError 500     └── Overloaded 503 (retryable, Retry-After)
├── ClaimRefused         an old epoch, a revoked or expired statement: the work is not this worker's
├── BlockMiss            a block cannot be used; a counter, never an error for the client
├── OutOfPages           the engine has no room now
├── DeadlineExceeded     a wait ended by its bound
├── IllegalTransition    a state machine was asked for an edge that it has not: a bug
└── SettingsError        start-up refused: what is wrong and what to do
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class DeepServeError(Exception):
    """Root of the tree."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"
    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class ClientError(DeepServeError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_request_error"


class InvalidRequest(ClientError):
    pass


class AuthenticationFailed(ClientError):
    status = 401
    type = "authentication_error"


class InsufficientBalance(ClientError):
    status = 402
    type = "unknown_error"


class NotFound(ClientError):
    status = 404


class Conflict(ClientError):
    """The same idempotency key with other content (invariant 9)."""

    status = 409


class RequestTooLarge(ClientError):
    status = 413


class UnprocessableRequest(ClientError):
    status = 422


class TooManyRequests(ClientError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_reached"
    retryable = True


class ServiceError(DeepServeError):
    pass


class InternalError(ServiceError):
    pass


class Overloaded(ServiceError):
    status = 503
    type = "service_unavailable_error"
    code = "service_unavailable"
    retryable = True


class ClaimRefused(DeepServeError):
    pass


class BlockMiss(DeepServeError):
    """`reason` is the label of the miss counter."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class OutOfPages(DeepServeError):
    retryable = True


class DeadlineExceeded(DeepServeError):
    status = 503
    type = "service_unavailable_error"
    code = "service_unavailable"
    retryable = True


class IllegalTransition(DeepServeError):
    pass


class SettingsError(DeepServeError):
    pass


class ErrorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An error on the wire: `name` is the class of the tree."""

    name: str
    message: str
    retry_after_s: int | None = None


_BY_NAME: dict[str, type[DeepServeError]] = {
    c.__name__: c
    for c in (
        InvalidRequest,
        AuthenticationFailed,
        InsufficientBalance,
        NotFound,
        Conflict,
        UnprocessableRequest,
        TooManyRequests,
        InternalError,
        Overloaded,
        ClaimRefused,
        OutOfPages,
        DeadlineExceeded,
    )
}


def to_record(error: DeepServeError) -> ErrorRecord:
    """The wire form; a class that is not for the wire becomes InternalError, with its message kept back."""
    name = type(error).__name__
    if name not in _BY_NAME:
        return ErrorRecord(name="InternalError", message="internal error")
    return ErrorRecord(name=name, message=error.message, retry_after_s=error.retry_after_s)


def from_record(record: ErrorRecord) -> DeepServeError:
    """The error again; an unknown name (a newer peer) is an InternalError."""
    return _BY_NAME.get(record.name, InternalError)(record.message, retry_after_s=record.retry_after_s)


def http_body(error: DeepServeError) -> dict[str, object]:
    """DeepSeek's error body (reference, rows 52 to 58)."""
    return {"error": {"message": error.message, "type": error.type, "param": None, "code": error.code}}
