"""The paged KV tensors, and blocks going in and out of them.

DIMENSION KEY
    L layers, G KV heads, D head dim, P pages in the pool (and spare ones behind them), S token slots per page,
    X = P × S slots of the pool

Layout of the pool: (L, 2, G, P, S, D), K before V. Pages that lie next to each other are therefore one run of slots for
each layer and head, which attention views without copying. A block's payload is (L, 2, G, S, D), C-contiguous; a tail's
is (L, 2, G, tokens, D). Memory is mapped lazily: a page that was never written costs none, and reads as zeros.
"""

from __future__ import annotations

import mmap
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shared.contracts.errors import BlockMiss
from shared.engine.model_config import ModelConfig

SPARE_TOKENS: Final = 512
"""Slots of zeros behind the last page: attention reads keys in whole chunks of this many."""


class LayerPages(NamedTuple):
    """Views of one layer.

    kv_UXD: (2 G, X, D), K heads then V heads, for writing; k_1GXD, v_1GXD: (1, G, X, D), for attention.
    """

    kv_UXD: Tensor
    k_1GXD: Tensor
    v_1GXD: Tensor


class KvPages:
    def __init__(
        self, config: ModelConfig, *, pages: int, block_tokens: int, dtype: torch.dtype, layers: int | None = None
    ) -> None:
        """`layers`: fewer than the model has, for a self-test."""
        self.block_tokens = block_tokens
        self.dtype = dtype
        assert SPARE_TOKENS % block_tokens == 0
        c = config
        shape = (layers or c.layers, 2, c.kv_heads, pages + SPARE_TOKENS // block_tokens, block_tokens, c.head_dim)
        self._pool = _lazy_zeros(shape, dtype)
        self._element = np.dtype(f"u{dtype.itemsize}")
        self._bits = np.frombuffer(self._pool.view(torch.uint8).numpy().data, self._element).reshape(shape)
        self.layers = tuple(_views(layer) for layer in self._pool.unbind(0))

    @property
    def block_shape(self) -> tuple[int, ...]:
        layers, two, heads, _, slots, dim = self._bits.shape
        return (layers, two, heads, slots, dim)

    def payload_bytes(self, tokens: int) -> int:
        layers, two, heads, _, _, dim = self._bits.shape
        return layers * two * heads * tokens * dim * self._element.itemsize

    def check_payload(self, payload: bytes | memoryview, tokens: int) -> None:
        """Raises BlockMiss(shape)."""
        found = payload.nbytes if isinstance(payload, memoryview) else len(payload)
        if found != self.payload_bytes(tokens):
            raise BlockMiss(
                "shape", f"payload of {found} bytes, KV of {tokens} tokens has {self.payload_bytes(tokens)}"
            )

    def write(self, page: int, payload: bytes | memoryview, tokens: int) -> None:
        """Copies a checked payload into the first `tokens` slots of a page."""
        layers, two, heads, _, _, dim = self._bits.shape
        source = np.frombuffer(payload, self._element).reshape(layers, two, heads, tokens, dim)
        self._bits[:, :, :, page, :tokens] = source

    def read(self, page: int, tokens: int) -> bytes:
        """The payload of the first `tokens` slots of a page."""
        return self._bits[:, :, :, page, :tokens].tobytes()


def _views(layer_2GPSD: Tensor) -> LayerPages:
    two, heads, pages, slots, dim = layer_2GPSD.shape
    flat = layer_2GPSD.view(two, heads, pages * slots, dim)
    return LayerPages(flat.view(two * heads, pages * slots, dim), flat[0:1], flat[1:2])


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros from an anonymous mapping. torch.zeros would touch every page at start; huge pages would back each of the
    pool's many short runs with 2 MiB."""
    elements = int(np.prod(shape))
    mapping = mmap.mmap(-1, elements * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(mapping, dtype=dtype).view(shape)
