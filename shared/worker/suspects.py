"""Pool objects that a read found gone or damaged, and those that may be: pure.

Reads end at the first miss, so that what lies behind a damaged block is unknown; where one object is gone (a disk that
was emptied) the next ones often are. A block is replaced in the own namespace alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared.contracts.ids import NamespaceId
from shared.contracts.messages import BlockRef
from shared.worker.block_reader import Run
from shared.worker.objects import DAMAGED


@dataclass(frozen=True, slots=True)
class Suspect:
    """`proven`: a read showed that the object is of no use; else it is read before it is replaced."""

    ref: BlockRef
    proven: bool


def suspects(own: NamespaceId, refs: Sequence[BlockRef], run: Run) -> Mapping[int, Suspect]:
    """Position → suspect, among `refs` (of positions 0, 1, …), whose first ones `run` read. Empty where nothing was
    proven: a store that is late or away says nothing about its objects."""
    if not DAMAGED.intersection(run.missed.values()):
        return {}
    return {
        i: Suspect(ref, proven=i in run.missed)
        for i, ref in enumerate(refs)
        if ref.source == "pool" and ref.namespace == own and _useless_or_unread(i, run)
    }


def _useless_or_unread(position: int, run: Run) -> bool:
    reason = run.missed.get(position)
    return position not in run.intact if reason is None else reason in DAMAGED
