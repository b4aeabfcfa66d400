"""The secrets of an instance: made once, kept in files that only the owner can read, never on a command line.

Files that exist are never made anew: another cluster key could not open the work that is queued, another master key
none of the namespace keys, another signing seed would void every grant under way.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
from nacl.signing import SigningKey

from shared.cli.failure import CommandFailed
from shared.cli.instance import write_atomic

SECRET_BYTES: Final = 32


class DemoAccount(msgspec.Struct, frozen=True, kw_only=True):
    """The account that `up` creates. `api_key` is None between the account's creation and the key's."""

    account: str
    api_key: str | None = None


class Secrets:
    """Paths of the secrets in one folder of mode 0700."""

    def __init__(self, folder: Path) -> None:
        self.cluster_key = folder / "cluster.key"
        self.signing_seed = folder / "signing.seed"
        self.verify_key = folder / "verify.key"
        self.master_key = folder / "master.key"
        self.admin_token = folder / "admin.token"
        self.postgres_password = folder / "postgres.password"
        self.demo = folder / "demo.json"

    def create_missing(self) -> None:
        """Makes what does not exist yet. The verify key is public, and derived from the seed each time.

        Raises CommandFailed when a file is there and is not what it should be.
        """
        for path in (self.cluster_key, self.signing_seed, self.master_key):
            _create(path, lambda: secrets.token_bytes(SECRET_BYTES))
            if path.stat().st_size != SECRET_BYTES:
                raise CommandFailed(f"{path} has not {SECRET_BYTES} bytes; restore it, the data depends on it")
        seed = self.signing_seed.read_bytes()
        write_atomic(self.verify_key, bytes(SigningKey(seed).verify_key), 0o600)
        for path in (self.admin_token, self.postgres_password):
            _create(path, lambda: secrets.token_urlsafe(SECRET_BYTES).encode())

    def read_text(self, path: Path) -> str | None:
        """The text of a secret; None when it does not exist or the caller may not read it."""
        try:
            return path.read_text().strip()
        except (FileNotFoundError, PermissionError):
            return None

    def read_demo(self) -> DemoAccount | None:
        text = self.read_text(self.demo)
        if text is None:
            return None
        try:
            return msgspec.json.decode(text, type=DemoAccount)
        except msgspec.DecodeError as error:
            raise CommandFailed(f"cannot read {self.demo}: {error}") from error

    def write_demo(self, demo: DemoAccount) -> None:
        write_atomic(self.demo, msgspec.json.encode(demo), 0o600)


def _create(path: Path, content: Callable[[], bytes]) -> None:
    if path.exists():
        os.chmod(path, 0o600)
        return
    write_atomic(path, content(), 0o600)
