"""The handoff: everything decode needs, gathered when it is stored, published once (design, sections 2 and 5).

A block that is not stored in time is not listed, nor any after it, nor the tail: decode computes them. What is listed
can be read. The message id makes a repeated publish of the same attempt one message.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from services.prefill.prompt import Prompt
from shared.contracts import limits, messages, subjects
from shared.contracts.errors import DeadlineExceeded, Overloaded
from shared.contracts.messages import BlockRef, DecodeWork, PrefillWork
from shared.worker.attempt import Attempt
from shared.worker.block_writer import SequenceWrites, Target
from shared.worker.chain import KeyChain
from shared.worker.floor import Floor


@dataclass(frozen=True, slots=True)
class Stored:
    """What decode may read."""

    blocks: tuple[BlockRef, ...]
    tail: BlockRef | None


async def gather(
    floor: Floor, attempt: Attempt[PrefillWork], prompt: Prompt, chain: KeyChain, writes: SequenceWrites, tail: Target
) -> Stored:
    """Writes the tail beside what is on its way, waits for all of it within limits.HANDOFF_WAIT_S."""
    full = prompt.full_blocks
    tail_tokens = len(attempt.prompt) - full * floor.block_tokens
    if tail_tokens:
        writes.begin(full, chain.tail_key(), (tail,), tail_tokens)
    await writes.wait(min(limits.HANDOFF_WAIT_S, attempt.seconds_left(floor.clock.now_s())))
    blocks: list[BlockRef] = []
    for position in range(full):
        ref = prompt.ref(position)
        if ref is None:
            floor.counters.add("handoff.shortened")
            break
        blocks.append(ref)
    whole = len(blocks) == full
    return Stored(tuple(blocks), writes.ref(full) if whole and tail_tokens else None)


async def publish(floor: Floor, attempt: Attempt[PrefillWork], work: DecodeWork) -> None:
    """Raises Overloaded or DeadlineExceeded after limits.PUBLISH_ATTEMPTS_MAX tries."""
    subject = subjects.work_any("decode", work.model)
    message_id = subjects.message_id(work.request, work.attempt, "decode")
    payload = messages.encode(work)
    for number in range(1, limits.PUBLISH_ATTEMPTS_MAX + 1):
        try:
            await floor.bus.publish(subject, payload, message_id)
            return
        except (Overloaded, DeadlineExceeded):
            if number == limits.PUBLISH_ATTEMPTS_MAX or not attempt.seconds_left(floor.clock.now_s()):
                raise
        await asyncio.sleep(limits.PUBLISH_RETRY_S * number)
