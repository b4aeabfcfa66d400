"""Keys of namespaces, asked of billing with a grant and kept in memory for minutes (design, section 3).

The caller has verified that the grant names the namespace; the key of a namespace is the same for all its grants.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.contracts import limits, subjects
from shared.contracts.errors import InternalError
from shared.contracts.ids import NamespaceId
from shared.contracts.messages import NamespaceKeyQuery, NamespaceKeyReply
from shared.contracts.ports import Bus, Clock
from shared.runtime import rpc

NAMESPACE_KEY_BYTES = 32


class NamespaceKeys:
    """`open_sealed` opens what was sealed with the cluster key. One question at a time for each namespace."""

    def __init__(self, bus: Bus, open_sealed: Callable[[bytes], bytes], clock: Clock) -> None:
        self._bus = bus
        self._open_sealed = open_sealed
        self._clock = clock
        self._known: dict[NamespaceId, tuple[bytes, float]] = {}
        self._asking: dict[NamespaceId, asyncio.Task[bytes]] = {}

    async def get(self, grant: str, namespace: NamespaceId) -> bytes:
        """32 bytes. Raises what billing refuses with, DeadlineExceeded when it is silent."""
        known = self._known.get(namespace)
        if known is not None and self._clock.monotonic_s() < known[1]:
            return known[0]
        asking = self._asking.get(namespace)
        if asking is None:
            asking = asyncio.create_task(self._ask(grant, namespace), name="namespace key")
            self._asking[namespace] = asking
            asking.add_done_callback(lambda task: self._answered(namespace, task))
        return await asyncio.shield(asking)

    async def close(self) -> None:
        """Forgets every key; questions under way are given up."""
        self._known.clear()
        asking = set(self._asking.values())
        for task in asking:
            task.cancel()
        if asking:
            await asyncio.wait(asking)

    async def _ask(self, grant: str, namespace: NamespaceId) -> bytes:
        query = NamespaceKeyQuery(grant=grant, namespace=namespace)
        reply = await rpc.call(self._bus, subjects.BILLING_NAMESPACE_KEY, query, NamespaceKeyReply)
        key = self._open_sealed(reply.sealed_key)
        if len(key) != NAMESPACE_KEY_BYTES:
            raise InternalError("a namespace key of a wrong size")
        return key

    def _answered(self, namespace: NamespaceId, task: asyncio.Task[bytes]) -> None:
        del self._asking[namespace]
        if task.cancelled() or task.exception() is not None:
            return
        while len(self._known) >= limits.NAMESPACE_KEYS_MAX:
            del self._known[next(iter(self._known))]
        self._known[namespace] = (task.result(), self._clock.monotonic_s() + limits.NAMESPACE_KEY_TTL_S)
