"""One answer in the engine: tokens to the gateway, full blocks to the pool, the end of it. Fed by the steps."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from shared.contracts.messages import FinishReason
from shared.contracts.ports import Produced
from shared.worker.block_writer import SequenceWrites
from shared.worker.chain import KeyChain
from shared.worker.emitter import Emitter, TokenStream
from shared.worker.suspects import Suspect
from shared.worker.targets import MendTarget, PoolTarget


class Answer:
    """`chain` covers the tokens known so far. `indexed`: positions whose block the pool has already, as the handoff
    says; those of `suspects` are of no use there, or may be. `begin_at`: the first block that is computed here. Where
    `pool` is empty nothing is stored."""

    def __init__(
        self,
        stream: TokenStream,
        emitter: Emitter,
        chain: KeyChain,
        writes: SequenceWrites,
        pool: Sequence[PoolTarget],
        *,
        block_tokens: int,
        begin_at: int,
        indexed: AbstractSet[int],
        suspects: Mapping[int, Suspect],
    ) -> None:
        self.device_s = 0.0
        self.tokens: list[int] = []
        """Drawn since this answer came into the engine."""
        self.finished: asyncio.Future[FinishReason] = asyncio.get_running_loop().create_future()
        self._stream = stream
        self._emitter = emitter
        self._chain = chain
        self._writes = writes
        self._pool = pool
        self._block_tokens = block_tokens
        self._begun = begin_at
        self._indexed = indexed
        self._suspects = suspects

    def on_produced(self, produced: Produced, device_s: float) -> None:
        """The last token's `finish` is not said here: it waits for the row of the last block."""
        self.device_s += device_s
        if self.finished.done() or self._stream.ended.done():
            return
        if produced.tokens:
            self.tokens.extend(produced.tokens)
            self._emitter.emit(self._stream, produced.first, produced.tokens, produced.logprobs)
        if self._pool:
            self._chain.extend(produced.tokens)
            self._begin_writes(produced.computed)
        if produced.finish is not None:
            self.finished.set_result(produced.finish)

    def _begin_writes(self, computed: int) -> None:
        full = min(computed // self._block_tokens, len(self._chain.keys))
        for position in range(self._begun, full):
            suspect = self._suspects.get(position)
            if suspect is not None:
                targets = tuple(MendTarget(pool, suspect) for pool in self._pool)
                self._writes.begin(position, self._chain.keys[position], targets)
            elif position not in self._indexed:
                self._writes.begin(position, self._chain.keys[position], self._pool)
        self._begun = max(self._begun, full)
