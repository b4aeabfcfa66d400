"""Which blocks of a known run are written again: those that a read proved useless, and those behind them, unread."""

from __future__ import annotations

import pytest

from shared.contracts.ids import NamespaceId
from shared.contracts.messages import BlockRef
from shared.worker.block_reader import Run
from shared.worker.suspects import Suspect, suspects

OWN, SHARED = NamespaceId("ns_" + "1" * 32), NamespaceId("ns_" + "2" * 32)


def ref(i: int, namespace: NamespaceId = OWN, source: str = "pool") -> BlockRef:
    return BlockRef(source=source, namespace=namespace, key=bytes([i]) * 32, put_id=bytes([i]) * 16)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "reason", ["absent", "short", "foreign", "version", "corrupt", "key", "dtype", "shape", "decrypt"]
)
def test_a_useless_block_is_proven_and_what_lies_unread_behind_it_is_not(reason: str) -> None:
    run = Run([b"0", b"1"], {2: reason}, frozenset({0, 1, 4}))
    refs = [ref(i) for i in range(6)]
    assert suspects(OWN, refs, run) == {
        2: Suspect(ref(2), proven=True),
        3: Suspect(ref(3), proven=False),
        5: Suspect(ref(5), proven=False),
    }


@pytest.mark.parametrize("missed", [{}, {1: "late"}, {1: "unreachable", 2: "late"}])
def test_a_store_that_is_unwell_makes_nothing_suspect(missed: dict[int, str]) -> None:
    assert suspects(OWN, [ref(i) for i in range(4)], Run([b"0"], missed, frozenset({0}))) == {}


def test_a_late_block_beside_a_useless_one_is_left_alone() -> None:
    run = Run([], {0: "late", 1: "absent"}, frozenset({2}))
    assert suspects(OWN, [ref(i) for i in range(3)], run) == {1: Suspect(ref(1), proven=True)}


def test_only_pool_objects_of_the_own_namespace_are_suspects() -> None:
    run = Run([], dict.fromkeys(range(3), "absent"), frozenset())
    refs = [ref(0, SHARED), ref(1, source="handoff"), ref(2)]
    assert suspects(OWN, refs, run) == {2: Suspect(ref(2), proven=True)}
