"""The index's three requests. Who may ask what comes from the signed grant alone (invariant 7, its code enforcer).

A lookup reads the grant's own namespace and its shared ones, a commit writes the own namespace, a touch extends what a
lookup may read. Whatever else a message names is refused, so that a worker that was taken over can read nobody's keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence

import structlog

from services.cache_index import lookup, policy
from services.cache_index.repository import BlockRepository, Committer, Put
from shared.contracts import limits, subjects
from shared.contracts.block import KEY_BYTES, PUT_ID_BYTES
from shared.contracts.errors import ClaimRefused, InvalidRequest
from shared.contracts.ids import NamespaceId
from shared.contracts.messages import (
    BlockRef,
    Commit,
    CommitBlock,
    CommitReply,
    Done,
    Lookup,
    LookupReply,
    Touch,
)
from shared.contracts.ports import Bus, Clock
from shared.contracts.tag import GrantClaims
from shared.runtime import rpc

log = structlog.get_logger()

VerifyGrant = Callable[[str, float], GrantClaims]
"""(statement, now) → claims; raises an error of the tree on anything that is not a valid grant."""


class IndexHandlers:
    """`discard` deletes the objects of rows that a commit replaced; it is awaited after the reply's rows are true."""

    def __init__(
        self,
        repository: BlockRepository,
        verify: VerifyGrant,
        discard: Callable[[Sequence[Put]], Awaitable[None]],
        clock: Clock,
    ) -> None:
        self._repository = repository
        self._verify = verify
        self._discard = discard
        self._clock = clock
        self.counts: Counter[str] = Counter()
        """What was asked: blocks wanted and found, committed and refused, touched."""

    async def lookup(self, message: Lookup) -> LookupReply:
        """The longest run. Raises ClaimRefused for a grant that may not read, InvalidRequest for torn chains."""
        now_s = self._clock.now_s()
        grant = self._verify(message.grant, now_s)
        _refuse_unless(grant.cache_read, "this grant may not read the pool")
        _refuse_unless(message.request == grant.request, "the grant is another request's")
        chains = lookup.unpack_chains(message.chains, limits.CHAIN_KEYS_MAX)
        _check_readable(grant, (chain.namespace for chain in chains))
        run: list[BlockRef] = []
        for positions in lookup.stretches(len(chains[0].keys) if chains else 0, limits.LOOKUP_STRETCH_KEYS):
            wanted = {c.namespace: list(c.keys[positions.start : positions.stop]) for c in chains}
            rows = await self._repository.find(wanted, now_s, grant.request)
            found = lookup.run_within(chains, rows, positions)
            run.extend(found)
            if len(found) < len(positions):
                break
        self.counts["lookup.wanted"] += len(chains[0].keys) if chains else 0
        self.counts["lookup.found"] += len(run)
        return LookupReply(blocks=tuple(run))

    async def commit(self, message: Commit) -> CommitReply:
        """Rows in the grant's own namespace. Raises ClaimRefused for a grant that may not write."""
        now_s = self._clock.now_s()
        grant = self._verify(message.grant, now_s)
        _refuse_unless(grant.cache_write, "this grant may not write the pool")
        _check_blocks(message.blocks)
        timely = [block for block in message.blocks if policy.commit_in_time(block.put_at_s, now_s)]
        by = Committer(grant.namespace, grant.account, grant.request, grant.traffic_class)
        holders: dict[bytes, bytes] = {}
        if timely:
            expires_s = policy.expiry_s(now_s, grant.retention_s)
            holders, replaced = await self._repository.commit(by, timely, now_s, expires_s)
            await self._discard(replaced)
        if len(timely) < len(message.blocks):
            log.warning("commit.refused", request=grant.request, late=len(message.blocks) - len(timely))
        accepted = {block.put_id for block in timely}
        self.counts["commit.late"] += len(message.blocks) - len(timely)
        self.counts["commit.lost"] += sum(holders.get(block.key) != block.put_id for block in timely)
        self.counts["commit.rows"] += sum(holders.get(block.key) == block.put_id for block in timely)
        return CommitReply(
            put_ids=tuple(holders.get(b.key, b"") if b.put_id in accepted else b"" for b in message.blocks)
        )

    async def touch(self, message: Touch) -> Done:
        """Extends the rows of a served hit by the retention of this grant's class. Raises ClaimRefused."""
        now_s = self._clock.now_s()
        grant = self._verify(message.grant, now_s)
        _refuse_unless(grant.cache_read, "this grant may not read the pool")
        _check_readable(grant, (ref.namespace for ref in message.blocks))
        if len(message.blocks) > limits.CHAIN_KEYS_MAX:
            raise InvalidRequest(f"a touch takes at most {limits.CHAIN_KEYS_MAX} blocks")
        await self._repository.touch(
            message.blocks,
            now_s,
            policy.expiry_s(now_s, grant.retention_s),
            policy.touch_below_s(now_s, grant.retention_s),
        )
        self.counts["touch.blocks"] += len(message.blocks)
        return Done()


async def serve(bus: Bus, handlers: IndexHandlers) -> list[Callable[[], Awaitable[None]]]:
    """Answers the index's subjects, as one of its queue group. Returns the unsubscribes."""
    queue = subjects.INDEX_QUEUE
    return [
        await rpc.serve(bus, subjects.INDEX_LOOKUP, Lookup, handlers.lookup, queue),
        await rpc.serve(bus, subjects.INDEX_COMMIT, Commit, handlers.commit, queue),
        await rpc.serve(bus, subjects.INDEX_TOUCH, Touch, handlers.touch, queue),
    ]


def _refuse_unless(allowed: bool, why: str) -> None:
    if not allowed:
        raise ClaimRefused(why)


def _check_readable(grant: GrantClaims, namespaces: Iterable[NamespaceId]) -> None:
    readable = {grant.namespace, *grant.shared}
    _refuse_unless(readable.issuperset(namespaces), "the grant does not name this namespace")


def _check_blocks(blocks: Sequence[CommitBlock]) -> None:
    if len(blocks) > limits.COMMIT_BLOCKS_MAX:
        raise InvalidRequest(f"a commit takes at most {limits.COMMIT_BLOCKS_MAX} blocks")
    for block in blocks:
        if len(block.key) != KEY_BYTES or len(block.put_id) != PUT_ID_BYTES or block.position < 0:
            raise InvalidRequest("a block needs a whole key, a whole put id and a position")
        if len(block.replaces) not in (0, PUT_ID_BYTES) or block.replaces == block.put_id:
            raise InvalidRequest("a block replaces a whole put id, and not its own")
        if block.object_bytes <= 0:
            raise InvalidRequest("an object has bytes")
