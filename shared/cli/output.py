"""Standard output and error of the command line: whoever reads them may leave without changing what a command does.

`deepserve up --detach 2>&1 | head -1` starts an instance like any other call: what nobody reads any more is dropped,
the exit code says how the work went. Other errors of writing (a full disk) stay errors.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_STANDARD: Final = (0, 1, 2)


class LastingFile(io.FileIO):
    """A file descriptor that takes everything, and drops what comes after its reader has left."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def make_lasting() -> None:
    """For the whole process, once, at its start. A standard descriptor that the caller closed becomes /dev/null:
    otherwise the next file that is opened would take its number, and with it what we print."""
    for descriptor in _STANDARD:
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    sys.stdout, sys.stderr = lasting(1, sys.stdout), lasting(2, sys.stderr)


def lasting(descriptor: int, like: TextIO | None) -> TextIO:
    """A text stream over the descriptor, with the encoding of `like`; lines appear at once where a person looks."""
    encoding, errors = (like.encoding, like.errors) if like is not None else ("utf-8", "backslashreplace")
    if like is not None:
        like.flush()
    file = LastingFile(descriptor, "w", closefd=False)
    at_once = descriptor == 2 or file.isatty()
    return io.TextIOWrapper(io.BufferedWriter(file), encoding=encoding, errors=errors, line_buffering=at_once)


def reader_left() -> bool:
    """Whether standard output is a pipe that nobody reads any more."""
    poll = select.poll()
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor, as tests have it
        poll.register(sys.stdout.fileno(), 0)
        return any(events & select.POLLERR for _, events in poll.poll(0))
    return False
