"""The longest run of known blocks, from rows that a query found: pure (design, sections 3 and 4).

For each position the own namespace's row is taken, else that of a readable shared chain. The first position that no
chain knows ends the run: a later block without its ancestors is of no use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shared.contracts.block import KEY_BYTES
from shared.contracts.errors import InvalidRequest
from shared.contracts.ids import NamespaceId
from shared.contracts.messages import BlockRef, Chain

Rows = Mapping[tuple[NamespaceId, bytes], bytes]
"""(namespace, key) → put id."""


@dataclass(frozen=True, slots=True)
class KeyChain:
    """Keys of one namespace from block 0."""

    namespace: NamespaceId
    keys: tuple[bytes, ...]


def unpack_chains(chains: Sequence[Chain], keys_max: int) -> tuple[KeyChain, ...]:
    """Raises InvalidRequest on torn keys, chains of different length or more than `keys_max` keys in all."""
    total = sum(len(chain.keys) for chain in chains)
    if any(len(chain.keys) % KEY_BYTES for chain in chains) or total > keys_max * KEY_BYTES:
        raise InvalidRequest(f"a lookup takes whole keys, at most {keys_max}")
    if len({len(chain.keys) for chain in chains}) > 1:
        raise InvalidRequest("the chains of one prompt have one length")
    return tuple(
        KeyChain(chain.namespace, tuple(chain.keys[i : i + KEY_BYTES] for i in range(0, len(chain.keys), KEY_BYTES)))
        for chain in chains
    )


def stretches(count: int, first: int) -> Iterator[range]:
    """[0, count) in ranges of `first`, 2·`first`, 4·`first`, … positions: a miss costs one query, a long hit few."""
    start, width = 0, first
    while start < count:
        yield range(start, min(start + width, count))
        start, width = start + width, width * 2


def run_within(chains: Sequence[KeyChain], rows: Rows, positions: range) -> list[BlockRef]:
    """The run from `positions.start`; shorter than `positions` where a block is missing."""
    run: list[BlockRef] = []
    for position in positions:
        ref = _at(chains, rows, position)
        if ref is None:
            break
        run.append(ref)
    return run


def _at(chains: Sequence[KeyChain], rows: Rows, position: int) -> BlockRef | None:
    for chain in chains:
        key = chain.keys[position]
        put_id = rows.get((chain.namespace, key))
        if put_id is not None:
            return BlockRef(source="pool", namespace=chain.namespace, key=key, put_id=put_id)
    return None
