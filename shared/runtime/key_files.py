"""Secrets from files: a clear error for one that is missing, of a wrong length, or readable by everybody."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from shared.contracts.errors import SettingsError

KEY_BYTES: Final = 32
_TEXT_BYTES_MAX: Final = 4_096
_OTHERS: Final = 0o007


def read_key(path: Path, what: str) -> bytes:
    """The 32 bytes of a secret key, raw or as 64 hexadecimal digits. `what` names it in errors."""
    return _key(_read(path, what, secret=True), path, what)


def read_public_key(path: Path, what: str) -> bytes:
    """As `read_key`, for a file that anybody may read."""
    return _key(_read(path, what, secret=False), path, what)


def read_token(path: Path, what: str) -> str:
    """A secret text without the white space around it."""
    try:
        text = _read(path, what, secret=True).decode("ascii").strip()
    except UnicodeDecodeError as error:
        raise SettingsError(f"{what}: {path} is not a text") from error
    if not text:
        raise SettingsError(f"{what}: {path} is empty")
    return text


def _read(path: Path, what: str, *, secret: bool) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_TEXT_BYTES_MAX + 1)
            # Group access stays legal: that is how container platforms mount a secret for one user.
            mode = path.stat().st_mode
    except OSError as error:
        raise SettingsError(f"{what}: cannot read {path}: {error.strerror or error}") from error
    if len(data) > _TEXT_BYTES_MAX:
        raise SettingsError(f"{what}: {path} is larger than {_TEXT_BYTES_MAX} bytes")
    if secret and mode & _OTHERS:
        raise SettingsError(f"{what}: everybody may open {path}; make it 0600")
    return data


def _key(data: bytes, path: Path, what: str) -> bytes:
    if len(data) == KEY_BYTES:
        return data
    try:
        key = bytes.fromhex(data.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise SettingsError(f"{what}: {path} must hold {KEY_BYTES} bytes, or them as hexadecimal digits")
    return key
