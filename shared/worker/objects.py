"""Blocks as objects in the store: sealed on the way in, opened and checked on the way out, off the event loop.

Feeds the store's breaker: a store that fails or is late again and again is left alone for a while.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from shared.contracts.block import HEADER_BYTES, PUT_ID_BYTES, BlockHeader, digest, object_name, unpack_header
from shared.contracts.errors import BlockMiss, DeadlineExceeded, Overloaded
from shared.contracts.ids import NamespaceId
from shared.contracts.messages import BlockRef
from shared.contracts.ports import BlockStore, Clock, EngineProfile, Space
from shared.worker.breaker import Breaker

_UNWELL = ("late", "unreachable")
"""Reasons that speak against the store, not against one object."""


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
        put_id = self._entropy(PUT_ID_BYTES)
        parts = await asyncio.to_thread(_seal, secret, key, put_id, payload, self._profile)
        try:
            await self._store.put(space, object_name(key, put_id), parts)
        except (Overloaded, DeadlineExceeded):
            self._breaker.failed(self._clock.monotonic_s())
            raise
        self._breaker.succeeded()
        ref = BlockRef(source=space, namespace=namespace, key=key, put_id=put_id)
        return ref, sum(len(part) for part in parts)

    async def get(self, ref: BlockRef, secret: bytes, payload_bytes: int) -> bytes:
        """The payload, exactly as it was put. Raises BlockMiss, with the reason."""
        try:
            data = await self._store.get(ref.source, object_name(ref.key, ref.put_id))
        except BlockMiss as miss:
            if miss.reason in _UNWELL:
                self._breaker.failed(self._clock.monotonic_s())
            raise
        self._breaker.succeeded()
        return await asyncio.to_thread(_open, secret, ref, payload_bytes, data)

    async def delete(self, space: Space, name: str) -> None:
        """Idempotent. Raises Overloaded, DeadlineExceeded."""
        await self._store.delete(space, name)


def _seal(secret: bytes, key: bytes, put_id: bytes, payload: bytes, profile: EngineProfile) -> list[bytes]:
    header = BlockHeader(
        key=key,
        put_id=put_id,
        dtype=profile.block_dtype,
        shape=(len(payload),),
        payload_bytes=len(payload),
        checksum=zlib.crc32(payload),
    ).pack()
    return [header, AESGCM(digest("tmp", secret, put_id)).encrypt(bytes(12), payload, header)]


def _open(secret: bytes, ref: BlockRef, payload_bytes: int, data: bytes) -> bytes:
    header = unpack_header(data)
    if header.key != ref.key or header.put_id != ref.put_id or header.payload_bytes != payload_bytes:
        raise BlockMiss("foreign", "no")
    try:
        return AESGCM(digest("tmp", secret, ref.put_id)).decrypt(bytes(12), data[HEADER_BYTES:], data[:HEADER_BYTES])
    except InvalidTag as error:
        raise BlockMiss("corrupt", "no") from error
