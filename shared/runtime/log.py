"""Logs: one JSON object a line on standard error, with the service's name. A line is never an interface.

Owns the format of our own lines (structlog) and of the libraries' (the standard library's logging). Secrets and token
text are never logged; that is the caller's duty.
"""

from __future__ import annotations

import logging
import sys
from typing import Final

import orjson
import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, Processor, WrappedLogger

_LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_LIBRARY_LEVEL: Final = logging.WARNING
"""Libraries tell what they do at info; that is not what an operator wants to know about a service."""


def configure(service: str, level: str, **bound: str) -> None:
    """Sets up logging of the whole process; the last call counts. `bound` goes into each line, as the service does.

    `level` is debug, info, warning or error.
    """
    threshold = _LEVELS[level]
    # Local variables of a frame may be secrets or a client's text: a traceback shows lines only.
    tracebacks = structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False))
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        _add({"service": service, **bound}),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        tracebacks,
    ]
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer(serializer=_json)],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared[:-1], structlog.stdlib.add_logger_name],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                tracebacks,
                structlog.processors.JSONRenderer(serializer=_json),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(threshold, _LIBRARY_LEVEL))


def _add(fields: dict[str, str]) -> Processor:
    def add(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        return {**fields, **event}

    return add


def _json(event: EventDict, **options: object) -> str:
    """Bytes that a log line may carry (keys, put ids) as hexadecimal digits; anything else by its own text."""
    return orjson.dumps(event, default=_text, option=orjson.OPT_NON_STR_KEYS).decode()


def _text(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
