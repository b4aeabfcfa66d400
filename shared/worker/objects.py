"""Blocks as objects in the store: sealed on the way in, opened and checked on the way out, off the event loop.

Feeds the store's breaker: a store that fails or is late again and again is left alone for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from shared.contracts.block import PUT_ID_BYTES, object_name
from shared.contracts.errors import BlockMiss, DeadlineExceeded, Overloaded
from shared.contracts.ids import NamespaceId
from shared.contracts.messages import BlockRef
from shared.contracts.ports import BlockStore, Clock, EngineProfile, Space
from shared.runtime.stores.sealed import BlockForm, BlockName, object_bytes, open_block, seal_block
from shared.worker.breaker import Breaker

_UNWELL = ("late", "unreachable")
"""Reasons that speak against the store, not against one object."""
DAMAGED: Final = frozenset({"absent", "short", "foreign", "version", "corrupt", "key", "dtype", "shape", "decrypt"})
"""Reasons that prove an object gone or damaged: no later read will do better."""


class BlockObjects:
    """`entropy(n)`: n random bytes, for put ids."""

    def __init__(
        self,
        store: BlockStore,
        profile: EngineProfile,
        breaker: Breaker,
        clock: Clock,
        entropy: Callable[[int], bytes],
    ) -> None:
        self._store = store
        self._profile = profile
        self._breaker = breaker
        self._clock = clock
        self._entropy = entropy

    async def put(
        self, space: Space, namespace: NamespaceId, key: bytes, secret: bytes, payload: bytes
    ) -> tuple[BlockRef, int]:
        """A new object; returns where it is and its size in bytes. Raises Overloaded, DeadlineExceeded."""
        name = BlockName(key, self._entropy(PUT_ID_BYTES))
        form = self._form(len(payload))
        parts = await asyncio.to_thread(seal_block, secret, name, form, payload)
        try:
            await self._store.put(space, object_name(key, name.put_id), parts)
        except (Overloaded, DeadlineExceeded):
            self._breaker.failed(self._clock.monotonic_s())
            raise
        self._breaker.succeeded()
        return BlockRef(source=space, namespace=namespace, key=key, put_id=name.put_id), object_bytes(form)

    async def get(self, ref: BlockRef, secret: bytes, payload_bytes: int) -> bytes:
        """The payload, exactly as it was put. Raises BlockMiss, with the reason."""
        try:
            data = await self._store.get(ref.source, object_name(ref.key, ref.put_id))
        except BlockMiss as miss:
            if miss.reason in _UNWELL:
                self._breaker.failed(self._clock.monotonic_s())
            raise
        self._breaker.succeeded()
        name = BlockName(ref.key, ref.put_id)
        return await asyncio.to_thread(open_block, secret, name, self._form(payload_bytes), data)

    async def delete(self, space: Space, name: str) -> None:
        """Idempotent. Raises Overloaded, DeadlineExceeded."""
        await self._store.delete(space, name)

    def _form(self, payload_bytes: int) -> BlockForm:
        """Of a whole block; a tail is a row of bytes whose meaning only this request knows."""
        profile = self._profile
        whole = payload_bytes == profile.kv_bytes_token * profile.block_tokens
        return BlockForm(profile.block_dtype, profile.block_shape if whole else (payload_bytes,), payload_bytes)
