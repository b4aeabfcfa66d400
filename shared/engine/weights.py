"""Weights on disk: names, shapes, writing one after another, mapping into memory.

DIMENSION KEY
    M model dim, F feed-forward dim, V vocab, H query heads, G KV heads, D head dim

Owns `weights.safetensors`. Fused as the forward uses them: `qkv` has the rows of Q, K, V; `gate_up` those of gate
and up. Data starts at a multiple of `ALIGNMENT` bytes, so that a mapped tensor is as fast as one on the heap.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared.contracts.errors import SettingsError
from shared.engine.model_config import WEIGHTS_FILE, ModelCard, ModelConfig

ALIGNMENT: Final = 4096
ELEMENT_BYTES: Final = 2
DIGEST_CHUNK_BYTES: Final = 4 * 2**20


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name → shape of all tensors of the file, in its order."""
    c = config
    q_rows, kv_rows = c.query_heads * c.head_dim, c.kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embedding": (c.vocabulary, c.model_dim)}
    for i in range(c.layers):
        shapes |= {
            f"layers.{i}.attention_norm": (c.model_dim,),
            f"layers.{i}.qkv": (q_rows + 2 * kv_rows, c.model_dim),
            f"layers.{i}.attention_output": (c.model_dim, q_rows),
            f"layers.{i}.mlp_norm": (c.model_dim,),
            f"layers.{i}.gate_up": (2 * c.feed_forward_dim, c.model_dim),
            f"layers.{i}.down": (c.model_dim, c.feed_forward_dim),
        }
    shapes["final_norm"] = (c.model_dim,)
    if not c.tied_embedding:
        shapes["head"] = (c.vocabulary, c.model_dim)
    return shapes


def write_weights(path: Path, config: ModelConfig, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    """Writes bf16 tensors, one after another, and yields each name when it is written; memory holds one at a time.

    Raises SettingsError naming the tensor that comes out of turn or in another shape.
    """
    shapes = expected_shapes(config)
    with path.open("wb") as file:
        file.write(_header(shapes))
        turn = iter(shapes.items())
        for name, tensor in tensors:
            expected = next(turn, None)
            if expected != (name, tuple(tensor.shape)):
                raise SettingsError(f"tensor {name} of shape {tuple(tensor.shape)} where {expected} belongs")
            data = tensor.to(torch.bfloat16).contiguous()
            if not torch.isfinite(data).all():
                raise SettingsError(f"tensor {name} does not fit bfloat16")
            file.write(data.view(torch.uint8).numpy().data)
            yield name
        missing = next(turn, None)
        if missing is not None:
            raise SettingsError(f"tensor {missing[0]} is missing")


def _header(shapes: dict[str, tuple[int, ...]]) -> bytes:
    """Header of the safetensors format, padded with blanks so that the data is aligned."""
    entries: dict[str, object] = {}
    start = 0
    for name, shape in shapes.items():
        end = start + ELEMENT_BYTES * _elements(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (start, end)}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def file_digest(path: Path) -> str:
    """SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(DIGEST_CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def load_weights(model_dir: Path, card: ModelCard) -> dict[str, Tensor]:
    """All tensors, mapped (pages are shared between processes), each checked by name, shape and dtype, the file by its
    digest: blocks made with other bytes under this fingerprint would poison the pool. Raises SettingsError."""
    path = model_dir / WEIGHTS_FILE
    try:
        found = path.stat().st_size
        if found != card.weights_bytes:
            raise SettingsError(f"{path} has {found} bytes, the card says {card.weights_bytes}; convert again")
        if file_digest(path) != card.weights_digest:
            raise SettingsError(f"{path} differs from the digest on its card; convert the model again")
        return dict(_checked(path, expected_shapes(card.config)))
    except FileNotFoundError:
        raise SettingsError(f"{path} does not exist; convert the model again") from None
    except SafetensorError as error:
        raise SettingsError(f"{path} is not a safetensors file: {error}") from error


def _checked(path: Path, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        if extra := sorted(names - shapes.keys()):
            raise SettingsError(f"tensor {extra[0]} in {path} belongs to no such model")
        for name, shape in shapes.items():
            if name not in names:
                raise SettingsError(f"tensor {name} is missing from {path}")
            tensor = file.get_tensor(name)
            if tuple(tensor.shape) != shape:
                raise SettingsError(f"tensor {name} has shape {tuple(tensor.shape)}, the config says {shape}")
            if tensor.dtype != torch.bfloat16:
                raise SettingsError(f"tensor {name} is {tensor.dtype}, not bfloat16")
            yield name, tensor
