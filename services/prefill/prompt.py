"""One prompt in the engine: what is computed, what of it is on its way to the store, its first token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.prefill.prefix import Prefix
from shared.contracts.ids import RequestId
from shared.contracts.messages import BlockRef, FinishReason, TokenLogprob
from shared.contracts.ports import Produced
from shared.worker.block_writer import SequenceWrites, Target
from shared.worker.chain import KeyChain
from shared.worker.targets import MendTarget, PoolTarget


@dataclass(frozen=True, slots=True)
class First:
    """The first answer token. `finish`: why the answer ends with it, None if it goes on."""

    token: int
    logprobs: tuple[TokenLogprob, ...] | None
    finish: FinishReason | None


class Prompt:
    """Fed by the steps, on the event loop. `on_first` is called once, within the step that drew the first token.

    Keeps nothing of the prefix's payloads: they live in the engine's pages.
    """

    def __init__(
        self,
        request: RequestId,
        prefix: Prefix,
        chain: KeyChain,
        writes: SequenceWrites,
        *,
        block_tokens: int,
        answer_max: int,
        pool: Sequence[PoolTarget],
        handoff: Target,
        on_first: Callable[[First], None],
    ) -> None:
        self.request = request
        self.device_s = 0.0
        self.first: asyncio.Future[First] = asyncio.get_running_loop().create_future()
        self._known = prefix.known
        self._suspects = prefix.suspects
        self._unreadable = prefix.unreadable
        self._loaded = len(prefix.payloads)
        self._chain = chain
        self._writes = writes
        self._block_tokens = block_tokens
        self._answer_max = answer_max
        self._pool = pool
        self._handoff = handoff
        self._on_first = on_first
        self._begun = self._loaded

    @property
    def full_blocks(self) -> int:
        return len(self._chain.keys)

    @property
    def loaded(self) -> Sequence[BlockRef]:
        """The hit: blocks that were read and not computed."""
        return [self._known[i] for i in range(self._loaded)]

    def on_produced(self, produced: Produced, device_s: float) -> None:
        self.device_s += device_s
        if produced.tokens and not self.first.done():
            first = First(produced.tokens[0], produced.logprobs, self._finish(produced))
            self._on_first(first)
            self.first.set_result(first)
        self._begin_writes(produced.computed)

    def ref(self, position: int) -> BlockRef | None:
        """Where decode may read a full block: known to the pool, or stored by now."""
        return self._known.get(position) or self._writes.ref(position)

    def _finish(self, produced: Produced) -> FinishReason | None:
        """The engine was asked for one token, so that its `length` says nothing about the answer's."""
        if produced.finish == "stop":
            return "stop"
        return "length" if self._answer_max == 1 else None

    def _begin_writes(self, computed: int) -> None:
        """Each block that is full now starts its way to the store; computing goes on."""
        full = min(computed // self._block_tokens, self.full_blocks)
        for position in range(self._begun, full):
            if position not in self._known:
                self._writes.begin(position, self._chain.keys[position], self._targets(position))
        self._begun = max(self._begun, full)

    def _targets(self, position: int) -> Sequence[Target]:
        """The pool first, for whom it is open. A block that the pool has and cannot give now stays out of it: its row
        would win the commit, and decode could not read it either. One that it can never give is written again."""
        if position in self._unreadable:
            return (self._handoff,)
        suspect = self._suspects.get(position)
        if suspect is not None:
            return (*(MendTarget(pool, suspect) for pool in self._pool), self._handoff)
        return (*self._pool, self._handoff)
