"""The longest prefix of a prompt that the pool has: looked up, read, verified; whatever goes wrong is a miss.

A trial request asks nothing of the index. A dead index or store costs one time-out and then nothing (breakers). The hit
is what was really loaded; at least one prompt token is always computed, so that there are logits to draw from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from shared.contracts import limits, subjects
from shared.contracts.errors import DeepServeError
from shared.contracts.ids import NamespaceId
from shared.contracts.messages import BlockRef, Chain, Lookup, LookupReply, PrefillWork
from shared.runtime import rpc
from shared.worker.attempt import Attempt
from shared.worker.block_reader import Wanted
from shared.worker.breaker import Breaker
from shared.worker.chain import KeyChain
from shared.worker.floor import Floor
from shared.worker.suspects import Suspect, suspects

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Prefix:
    """`payloads`: of blocks [0, n), to be loaded. `known`: position → where the pool has that block, as the index says
    and no read denied. `suspects`: blocks of the own namespace whose pool object is of no use, or may be. `unreadable`:
    positions of all others whose pool object could not be read."""

    payloads: Sequence[bytes]
    known: Mapping[int, BlockRef]
    suspects: Mapping[int, Suspect]
    unreadable: frozenset[int]
    lookup_s: float
    read_s: float


def loadable_blocks(prompt_tokens: int, block_tokens: int) -> int:
    """Whole blocks that may be loaded: at least one prompt token is left to compute."""
    return (prompt_tokens - 1) // block_tokens


class PrefixFinder:
    """One for each worker; its breaker is the cache index's."""

    def __init__(self, floor: Floor) -> None:
        self._floor = floor
        self._index = Breaker()

    async def find(self, attempt: Attempt[PrefillWork], chain: KeyChain) -> Prefix:
        """Extends `chain`, the own namespace's, over the prompt. Never raises for what the pool lacks."""
        clock = self._floor.clock
        started_s = clock.monotonic_s()
        warming = self._warm_key(attempt)
        try:
            await chain.extend_far(attempt.prompt)
            refs = await self._look_up(attempt, chain)
            looked_up_s = clock.monotonic_s()
            loadable = refs[: loadable_blocks(len(attempt.prompt), self._floor.block_tokens)]
            run = await self._floor.reader.read(await self._wanted(attempt, loadable))
        finally:
            if warming is not None:
                warming.cancel()
        suspected = suspects(attempt.grant.namespace, refs, run) if attempt.grant.cache_write else {}
        unreadable = frozenset(run.missed).difference(suspected)
        return Prefix(
            payloads=run.payloads,
            known={i: ref for i, ref in enumerate(refs) if i not in unreadable and i not in suspected},
            suspects=suspected,
            unreadable=unreadable,
            lookup_s=looked_up_s - started_s,
            read_s=clock.monotonic_s() - looked_up_s,
        )

    def _warm_key(self, attempt: Attempt[PrefillWork]) -> asyncio.Task[None] | None:
        """Asks for the own namespace's key while the index is asked: most hits will need it."""
        if not attempt.grant.cache_read:
            return None
        return self._floor.spawn(self._get_key_quietly(attempt))

    async def _get_key_quietly(self, attempt: Attempt[PrefillWork]) -> None:
        try:
            await self._floor.keys.get(attempt.work.grant, attempt.grant.namespace)
        except DeepServeError:
            return

    async def _look_up(self, attempt: Attempt[PrefillWork], chain: KeyChain) -> list[BlockRef]:
        grant, now_s = attempt.grant, self._floor.clock.monotonic_s()
        if not grant.cache_read or not chain.keys or len(chain.keys) > limits.CHAIN_KEYS_MAX:
            return []
        if not self._index.allows(now_s):
            self._floor.counters.add("lookup.breaker_open")
            return []
        chains = [chain, *[await self._shared_chain(ns, attempt.prompt) for ns in grant.shared]]
        message = Lookup(
            grant=attempt.work.grant,
            request=attempt.work.request,
            chains=tuple(Chain(namespace=c.namespace, keys=b"".join(c.keys)) for c in chains),
        )
        try:
            reply = await rpc.call(
                self._floor.bus, subjects.INDEX_LOOKUP, message, LookupReply, timeout_s=limits.LOOKUP_TIMEOUT_S
            )
        except DeepServeError as error:
            self._index.failed(self._floor.clock.monotonic_s())
            self._floor.counters.add("lookup.failed")
            log.warning("lookup.failed", request=grant.request, error=error.message)
            return []
        self._index.succeeded()
        return _of_chains(reply.blocks, chains)

    async def _shared_chain(self, namespace: NamespaceId, prompt: Sequence[int]) -> KeyChain:
        chain = KeyChain(namespace, self._floor.fingerprint, self._floor.block_tokens)
        await chain.extend_far(prompt)
        return chain

    async def _wanted(self, attempt: Attempt[PrefillWork], refs: Sequence[BlockRef]) -> list[Wanted]:
        """What to read, with the secrets that open it; cut where a namespace's key cannot be had."""
        secrets: dict[NamespaceId, bytes] = {}
        wanted: list[Wanted] = []
        for ref in refs:
            if ref.namespace not in secrets:
                try:
                    secrets[ref.namespace] = await self._floor.keys.get(attempt.work.grant, ref.namespace)
                except DeepServeError as error:
                    self._floor.counters.add("miss.no_key", len(refs) - len(wanted))
                    log.warning("namespace_key.missed", request=attempt.grant.request, error=error.message)
                    break
            wanted.append(Wanted(ref, secrets[ref.namespace], self._floor.block_bytes))
        return wanted


def _of_chains(blocks: Sequence[BlockRef], chains: Sequence[KeyChain]) -> list[BlockRef]:
    """The answer as far as it is one: blocks of our own chains, at their own positions."""
    run: list[BlockRef] = []
    for position, ref in enumerate(blocks[: len(chains[0].keys)]):
        if not any(c.namespace == ref.namespace and c.keys[position] == ref.key for c in chains):
            break
        run.append(ref)
    return run
