"""Reading a handoff: the blocks and the tail that prefill stored, as far as they can be read. The rest is computed.

With the store down nothing is read and the whole prompt is computed from its token ids: slower, and the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from shared.contracts.errors import DeepServeError
from shared.contracts.ids import NamespaceId
from shared.contracts.messages import BlockRef, DecodeWork
from shared.worker.attempt import Attempt
from shared.worker.block_reader import Wanted
from shared.worker.floor import Floor
from shared.worker.suspects import Suspect, suspects

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Adopted:
    """`prefix`: payloads of blocks [0, n). `tail`: payload and tokens of the partial block after them, only where all
    full blocks of the prompt were read. `suspects`: blocks of the own namespace whose pool object is of no use, or may
    be."""

    prefix: Sequence[bytes]
    tail: tuple[bytes, int] | None
    loaded_tokens: int
    suspects: Mapping[int, Suspect]


async def adopt(floor: Floor, attempt: Attempt[DecodeWork]) -> Adopted:
    """Never raises for what cannot be read."""
    block_tokens = floor.block_tokens
    full = len(attempt.prompt) // block_tokens
    tail_tokens = len(attempt.prompt) - full * block_tokens
    blocks = list(attempt.work.blocks[:full])
    sizes = [floor.block_bytes] * len(blocks)
    if attempt.work.tail is not None and tail_tokens and len(blocks) == full:
        blocks.append(attempt.work.tail)
        sizes.append(floor.profile.kv_bytes_token * tail_tokens)
    run = await floor.reader.read(await _wanted(floor, attempt, blocks, sizes))
    prefix, tail = run.payloads[:full], run.payloads[full:]
    loaded_tokens = len(prefix) * block_tokens + (tail_tokens if tail else 0)
    suspected = suspects(attempt.grant.namespace, blocks[:full], run)
    return Adopted(prefix, (tail[0], tail_tokens) if tail else None, loaded_tokens, suspected)


async def _wanted(
    floor: Floor, attempt: Attempt[DecodeWork], blocks: Sequence[BlockRef], sizes: Sequence[int]
) -> list[Wanted]:
    """With the secrets that open them: the handoff's own, or a namespace's; cut where one cannot be had."""
    secrets: dict[NamespaceId, bytes] = {}
    readable = {attempt.grant.namespace, *attempt.grant.shared} if attempt.grant.cache_read else set()
    wanted: list[Wanted] = []
    for ref, payload_bytes in zip(blocks, sizes, strict=True):
        if ref.source == "handoff":
            wanted.append(Wanted(ref, attempt.work.handoff_key, payload_bytes))
            continue
        if ref.namespace not in readable:
            log.warning("handoff.foreign", request=attempt.grant.request, namespace=ref.namespace)
            break
        try:
            if ref.namespace not in secrets:
                secrets[ref.namespace] = await floor.keys.get(attempt.work.grant, ref.namespace)
        except DeepServeError as error:
            floor.counters.add("miss.no_key", len(blocks) - len(wanted))
            log.warning("namespace_key.missed", request=attempt.grant.request, error=error.message)
            break
        wanted.append(Wanted(ref, secrets[ref.namespace], payload_bytes))
    return wanted
