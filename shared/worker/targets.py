"""Where a sequence's blocks are stored: the account's namespace in the pool, or objects of this request alone.

The order makes crashes harmless: bytes before row. What a crash between the two leaves is an object without a row,
found by its age; never a row without its object.
"""

from __future__ import annotations

from shared.contracts import subjects
from shared.contracts.block import object_name
from shared.contracts.errors import BlockMiss, DeepServeError, Overloaded
from shared.contracts.ids import NamespaceId
from shared.contracts.messages import BlockRef, Commit, CommitBlock, CommitReply
from shared.contracts.tag import GrantClaims
from shared.runtime import rpc
from shared.worker.floor import Floor
from shared.worker.objects import DAMAGED, BlockObjects
from shared.worker.suspects import Suspect


class PoolTarget:
    """Writes under a grant with `cache_write`, into the grant's own namespace: nothing else can be named here."""

    def __init__(self, token: str, grant: GrantClaims, floor: Floor) -> None:
        self._token = token
        self._namespace = grant.namespace
        self._bus = floor.bus
        self._objects = floor.objects
        self._keys = floor.keys
        self._counters = floor.counters
        self._clock = floor.clock

    async def store(self, key: bytes, position: int, payload: bytes, replaces: bytes = b"") -> BlockRef:
        """Object, then row. Where another put of the same block holds the row, ours is deleted and theirs returned;
        the row of the put `replaces` gives way, if it is still that put's.

        Raises Overloaded when the index refused the put as too old; errors of the store and of billing.
        """
        secret = await self._keys.get(self._token, self._namespace)
        put_at_s = self._clock.now_s()
        ref, object_bytes = await self._objects.put("pool", self._namespace, key, secret, payload)
        row = CommitBlock(
            key=key,
            put_id=ref.put_id,
            position=position,
            object_bytes=object_bytes,
            put_at_s=put_at_s,
            replaces=replaces,
        )
        try:
            reply = await rpc.call(
                self._bus, subjects.INDEX_COMMIT, Commit(grant=self._token, blocks=(row,)), CommitReply
            )
        except DeepServeError:
            # The row may have been written all the same, so the object stays: this request can read it by its name.
            self._counters.add("commit.failed")
            return ref
        holder = reply.put_ids[0] if reply.put_ids else b""
        if holder == ref.put_id:
            if replaces:
                self._counters.add("commit.mended")
            return ref
        await self._objects.delete("pool", object_name(key, ref.put_id))
        if not holder:
            raise Overloaded("the index refused the put as too old")
        self._counters.add("commit.lost")
        return BlockRef(source="pool", namespace=self._namespace, key=key, put_id=holder)

    async def reads(self, ref: BlockRef, payload_bytes: int) -> bool:
        """Whether an object of the own namespace is whole; False where it is proven not to be. Raises Overloaded where
        neither can be known now; errors of billing."""
        secret = await self._keys.get(self._token, self._namespace)
        try:
            await self._objects.get(ref, secret, payload_bytes)
        except BlockMiss as miss:
            if miss.reason in DAMAGED:
                return False
            raise Overloaded("the store cannot say whether it has the block") from miss
        return True


class MendTarget:
    """Writes a block again whose object in the pool is of no use, so that the next request finds it."""

    def __init__(self, pool: PoolTarget, suspect: Suspect) -> None:
        self._pool = pool
        self._suspect = suspect

    async def store(self, key: bytes, position: int, payload: bytes) -> BlockRef:
        """As the pool's; where the object turns out to be whole nothing is written. The index deletes the old object
        with its row, so that a lost reply leaves neither."""
        old = self._suspect.ref
        if not self._suspect.proven and await self._pool.reads(old, len(payload)):
            return old
        return await self._pool.store(key, position, payload, replaces=old.put_id)


class HandoffTarget:
    """Writes objects that only this request's handoff key opens; never indexed, deleted when the request ends."""

    def __init__(self, namespace: NamespaceId, handoff_key: bytes, objects: BlockObjects) -> None:
        self._namespace = namespace
        self._handoff_key = handoff_key
        self._objects = objects

    async def store(self, key: bytes, position: int, payload: bytes) -> BlockRef:
        """Raises errors of the store."""
        ref, _ = await self._objects.put("handoff", self._namespace, key, self._handoff_key, payload)
        return ref
