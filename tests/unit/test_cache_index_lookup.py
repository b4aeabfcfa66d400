"""Runs of known blocks, worked out by hand."""

from __future__ import annotations

import pytest

from services.cache_index import lookup
from shared.contracts.errors import InvalidRequest
from shared.contracts.ids import NamespaceId
from shared.contracts.messages import BlockRef, Chain

OWN = NamespaceId("ns_" + "0" * 32)
SHARED = NamespaceId("ns_" + "f" * 32)


def keys(letter: str, count: int) -> bytes:
    return b"".join(f"{letter}{i}".encode().ljust(32, b".") for i in range(count))


def key(letter: str, i: int) -> bytes:
    return f"{letter}{i}".encode().ljust(32, b".")


def ref(namespace: NamespaceId, letter: str, i: int) -> BlockRef:
    return BlockRef(source="pool", namespace=namespace, key=key(letter, i), put_id=f"{letter}{i}".encode())


def found(*rows: tuple[NamespaceId, str, int]) -> dict[tuple[NamespaceId, bytes], bytes]:
    return {(namespace, key(letter, i)): f"{letter}{i}".encode() for namespace, letter, i in rows}


CHAINS = lookup.unpack_chains((Chain(namespace=OWN, keys=keys("o", 4)), Chain(namespace=SHARED, keys=keys("s", 4))), 8)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ({}, []),
        (found((OWN, "o", 1)), []),
        (found((OWN, "o", 0), (OWN, "o", 1), (OWN, "o", 3)), [(OWN, "o", 0), (OWN, "o", 1)]),
        (found((SHARED, "s", 0), (OWN, "o", 0)), [(OWN, "o", 0)]),
        (
            found((SHARED, "s", 0), (SHARED, "s", 1), (OWN, "o", 1), (OWN, "o", 2), (SHARED, "s", 3)),
            [(SHARED, "s", 0), (OWN, "o", 1), (OWN, "o", 2), (SHARED, "s", 3)],
        ),
        # The right key under the wrong namespace is no row of ours.
        ({(SHARED, key("o", 0)): b"x"}, []),
    ],
)
def test_the_run_ends_at_the_first_missing_block_and_takes_own_rows_first(
    rows: lookup.Rows, expected: list[tuple[NamespaceId, str, int]]
) -> None:
    assert lookup.run_within(CHAINS, rows, range(4)) == [ref(*row) for row in expected]


def test_a_run_goes_on_where_the_last_stretch_ended() -> None:
    rows = found((OWN, "o", 2), (SHARED, "s", 3))
    assert lookup.run_within(CHAINS, rows, range(2, 4)) == [ref(OWN, "o", 2), ref(SHARED, "s", 3)]


def test_stretches_cover_every_position_once_and_double() -> None:
    assert list(lookup.stretches(200, 32)) == [range(32), range(32, 96), range(96, 200)]
    assert list(lookup.stretches(0, 32)) == []
    assert list(lookup.stretches(32, 32)) == [range(32)]


@pytest.mark.parametrize(
    "chains",
    [
        (Chain(namespace=OWN, keys=b"x" * 33),),
        (Chain(namespace=OWN, keys=keys("o", 9)),),
        (Chain(namespace=OWN, keys=keys("o", 2)), Chain(namespace=SHARED, keys=keys("s", 1))),
    ],
)
def test_torn_uneven_and_endless_chains_are_refused(chains: tuple[Chain, ...]) -> None:
    with pytest.raises(InvalidRequest):
        lookup.unpack_chains(chains, 8)
