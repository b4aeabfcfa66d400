"""What happened, in order, readable: virtual time, who, what. The same seed gives the same text.

Takes the services' own log lines beside what the simulation notes; ids of requests are shortened to their order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, Final, NoReturn, Protocol

import structlog

from tests.sim import process

_UUID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")
_LONG: Final = re.compile(r"\b(acct|key|hold|grant|tag|ns)_[0-9a-f]{32}\b")
_QUIET: Final = frozenset({"level", "event", "log_level"})


class HasTime(Protocol):
    def time(self) -> float: ...


class Timeline:
    """Lines of one simulation."""

    def __init__(self, loop: HasTime) -> None:
        self.lines: list[str] = []
        self.errors: list[str] = []
        """Lines that a service logged as errors."""
        self._loop = loop
        self._names: dict[str, str] = {}

    def note(self, who: str, what: str, **facts: object) -> None:
        told = " ".join(f"{name}={_text(value)}" for name, value in facts.items() if value is not None)
        self.lines.append(f"{self._loop.time():12.6f}  {who:<14} {self._short(f'{what} {told}'.rstrip())}")

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """For the length of the block, structlog writes here."""
        saved = structlog.get_config()
        structlog.configure(
            processors=[structlog.processors.add_log_level, self._hear],
            wrapper_class=structlog.make_filtering_bound_logger(20),
            logger_factory=structlog.ReturnLoggerFactory(),
            cache_logger_on_first_use=False,
        )
        try:
            yield
        finally:
            structlog.configure(**saved)

    def _hear(self, logger: object, method: str, event: MutableMapping[str, Any]) -> NoReturn:
        member = process.current()
        if member is None or member.alive:
            who = member.name if member is not None else "outside"
            self.note(who, str(event["event"]), **_facts(event))
            if method in ("error", "critical"):
                self.errors.append(self.lines[-1])
        raise structlog.DropEvent

    def _short(self, text: str) -> str:
        text = _LONG.sub(lambda found: self._name(found[0], found[1]), text)
        return _UUID.sub(lambda found: self._name(found[0], "r"), text)

    def _name(self, given: str, kind: str) -> str:
        if given not in self._names:
            count = sum(1 for name in self._names.values() if name.startswith(f"{kind}#"))
            self._names[given] = f"{kind}#{count + 1}"
        return self._names[given]

    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


@contextmanager
def silence() -> Iterator[None]:
    """For the length of the block structlog says nothing, until a timeline hears it."""
    saved = structlog.get_config()
    structlog.configure(processors=[_drop], logger_factory=structlog.ReturnLoggerFactory())
    try:
        yield
    finally:
        structlog.configure(**saved)


def _drop(logger: object, method: str, event: MutableMapping[str, Any]) -> NoReturn:
    raise structlog.DropEvent


def _facts(event: Mapping[str, Any]) -> dict[str, object]:
    return {
        ("said" if name in ("who", "what", "self") else name): value
        for name, value in event.items()
        if name not in _QUIET
    }


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, BaseException):
        return f"{type(value).__name__}({value})"
    if isinstance(value, bytes):
        return value.hex()[:12]
    return str(value)
