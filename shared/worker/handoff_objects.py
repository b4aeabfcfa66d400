"""Handoff objects at the end of their request."""

from __future__ import annotations

from collections.abc import Iterable

from shared.contracts.block import object_name
from shared.contracts.errors import DeepServeError
from shared.contracts.messages import BlockRef
from shared.worker.floor import Floor


async def forget(floor: Floor, refs: Iterable[BlockRef]) -> None:
    """Deletes those of `refs` that are handoff objects. What cannot be deleted now is swept by its age."""
    for ref in refs:
        if ref.source == "handoff":
            try:
                await floor.objects.delete("handoff", object_name(ref.key, ref.put_id))
            except DeepServeError:
                floor.counters.add("handoff.left")
