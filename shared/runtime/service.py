from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

import structlog

from shared.contracts.errors import DeepServeError, InternalError

_log = structlog.get_logger()
T = TypeVar("T")


async def as_internal_error(work: Awaitable[T]) -> T:
    """The supervision of one message: an exception outside of the tree is a bug, logged with its place, and becomes
    InternalError. It costs its message, not the process with everybody else's requests."""
    try:
        return await work
    except DeepServeError:
        raise
    except Exception as error:
        _log.error("handler.failed", exc_info=error)
        raise InternalError("internal error") from error
