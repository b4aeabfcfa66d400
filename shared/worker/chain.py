"""The keys of a growing sequence: a namespace's chain over prompt and answer, extended as blocks fill."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from shared.contracts.block import chain_keys, chain_root, digest, pack_tokens
from shared.contracts.ids import NamespaceId


class KeyChain:
    """Keys of the full blocks of `tokens` in `namespace`, in order; `extend` adds those of what follows."""

    def __init__(self, namespace: NamespaceId, fingerprint: bytes, block_tokens: int) -> None:
        self.namespace = namespace
        self.keys: list[bytes] = []
        self._root = chain_root(namespace, fingerprint)
        self._block_tokens = block_tokens
        self._rest: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """About 0.1 µs a token: fine for a step's tokens, prompts go through `extend_far`."""
        self._rest.extend(tokens)
        full = len(self._rest) // self._block_tokens * self._block_tokens
        self.keys += chain_keys(self._last(), self._rest[:full], self._block_tokens)
        del self._rest[:full]

    async def extend_far(self, tokens: Sequence[int]) -> None:
        """`extend` off the event loop."""
        await asyncio.to_thread(self.extend, tokens)

    def tail_key(self) -> bytes:
        """Names the partial block after the last full one; never a block's key, since the domain differs."""
        return digest("deepserve/tail/1", self._last(), pack_tokens(self._rest))

    def _last(self) -> bytes:
        return self.keys[-1] if self.keys else self._root
