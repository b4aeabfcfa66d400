"""From a store's address in the settings to the store."""

from __future__ import annotations

from pathlib import Path

from shared.contracts.errors import SettingsError
from shared.contracts.ports import BlockStore
from shared.runtime.stores.directory import open_directory


def open_store(address: str) -> BlockStore:
    """`dir:PATH`. Blocks for a moment; raises SettingsError when the store cannot be used."""
    scheme, _, place = address.partition(":")
    if scheme != "dir" or not place:
        raise SettingsError(f"no block store is known by {address!r}; use dir:PATH")
    return open_directory(Path(place).absolute())
