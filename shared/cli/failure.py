"""What the command line says when it cannot do what was asked: one line for a person, and an exit code."""

from __future__ import annotations

from typing import Final

from shared.contracts.errors import DeepServeError

EXIT_OK: Final = 0
EXIT_FAILURE: Final = 1
EXIT_USAGE: Final = 2
EXIT_SIGNAL: Final = 128
"""Plus the signal's number: the command was ended by it."""
EXIT_INTERRUPTED: Final = 130


class CommandFailed(DeepServeError):
    """The command did not do its work. `detail`: lines that help (a log's tail), printed after the message."""

    exit_code = EXIT_FAILURE

    def __init__(self, message: str, *, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class UsageError(CommandFailed):
    """The command was called wrongly."""

    exit_code = EXIT_USAGE
