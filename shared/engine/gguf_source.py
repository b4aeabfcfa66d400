"""Reads a GGUF file of a Llama-family model: config, tensors by our names, tokenizer, chat template.

Owns what is particular to GGUF: quantized tensors, the row order of Q and K, names. A short
or wrong file raises SettingsError that names the tensor at fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from shared.contracts.errors import SettingsError
from shared.engine.model_config import ModelConfig

CONTROL_TOKEN: Final = 3
"""`tokenizer.ggml.token_type` of special tokens."""

Tensor = npt.NDArray[np.float32]


class _CheckedReader(GGUFReader):
    """Says which tensor a truncated file lacks; the library would fail in a reshape without a name."""

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        for field in fields:
            _, name_data, _, dims, raw_type, offset = field.parts
            block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(raw_type[0])]
            end = int(start_offs) + int(offset[0]) + int(np.prod(dims)) * block_bytes // block_elements
            if end > len(self.data):
                name = bytes(name_data).decode()
                raise SettingsError(f"tensor {name} ends at byte {end}, the file has {len(self.data)}: truncated?")
        super()._build_tensors(start_offs, fields)


class GgufSource:
    def __init__(self, path: Path) -> None:
        """Raises SettingsError when the file is missing, is no GGUF, is short, or is not of the Llama family."""
        try:
            self._reader = _CheckedReader(path)
        except FileNotFoundError:
            raise SettingsError(f"{path} does not exist") from None
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            raise SettingsError(f"{path} cannot be read as GGUF: {error}") from error
        self._tensors = {t.name: t for t in self._reader.tensors}
        self.architecture = str(self.field("general.architecture"))
        if self.architecture != "llama":
            raise SettingsError(f"{path} is of architecture {self.architecture}, this engine reads llama")
        self.config = self._config()

    def field(self, name: str) -> Any:
        """Raises SettingsError naming the field."""
        found = self._reader.fields.get(name)
        if found is None:
            raise SettingsError(f"the GGUF lacks the field {name}")
        return found.contents()

    def _config(self) -> ModelConfig:
        heads = int(self.field("llama.attention.head_count"))
        model_dim = int(self.field("llama.embedding_length"))
        epsilon = np.float32(self.field("llama.attention.layer_norm_rms_epsilon"))
        return ModelConfig(
            layers=int(self.field("llama.block_count")),
            model_dim=model_dim,
            feed_forward_dim=int(self.field("llama.feed_forward_length")),
            query_heads=heads,
            kv_heads=int(self.field("llama.attention.head_count_kv")),
            head_dim=model_dim // heads,
            vocabulary=int(self.field("llama.vocab_size")),
            context_tokens=int(self.field("llama.context_length")),
            rope_theta=float(self.field("llama.rope.freq_base")),
            norm_epsilon=float(str(epsilon)),
            tied_embedding="output.weight" not in self._tensors,
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(our name, fp32 values) one after another, in the order of `weights.expected_shapes`."""
        c = self.config
        yield "embedding", self._tensor("token_embd.weight", c.vocabulary, c.model_dim)
        for i in range(c.layers):
            yield from self._layer(i)
        yield "final_norm", self._tensor("output_norm.weight", c.model_dim)
        if not c.tied_embedding:
            yield "head", self._tensor("output.weight", c.vocabulary, c.model_dim)

    def _layer(self, i: int) -> Iterator[tuple[str, Tensor]]:
        c, theirs, ours = self.config, f"blk.{i}.", f"layers.{i}."
        m, f, q_rows, kv_rows = c.model_dim, c.feed_forward_dim, c.query_heads * c.head_dim, c.kv_heads * c.head_dim
        q = _halves(self._tensor(theirs + "attn_q.weight", q_rows, m), c.query_heads)
        k = _halves(self._tensor(theirs + "attn_k.weight", kv_rows, m), c.kv_heads)
        v = self._tensor(theirs + "attn_v.weight", kv_rows, m)
        gate, up = self._tensor(theirs + "ffn_gate.weight", f, m), self._tensor(theirs + "ffn_up.weight", f, m)
        yield ours + "attention_norm", self._tensor(theirs + "attn_norm.weight", m)
        yield ours + "qkv", np.concatenate([q, k, v])
        yield ours + "attention_output", self._tensor(theirs + "attn_output.weight", m, q_rows)
        yield ours + "mlp_norm", self._tensor(theirs + "ffn_norm.weight", m)
        yield ours + "gate_up", np.concatenate([gate, up])
        yield ours + "down", self._tensor(theirs + "ffn_down.weight", m, f)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        stored = self._tensors.get(name)
        if stored is None:
            raise SettingsError(f"tensor {name} is missing from the GGUF")
        values = np.require(dequantize(stored.data, stored.tensor_type), np.float32, "W")
        if values.shape != shape:
            raise SettingsError(f"tensor {name} has shape {values.shape}, the config says {shape}")
        if not np.isfinite(values).all():
            raise SettingsError(f"tensor {name} holds values that are not finite")
        return values

    def special_tokens(self) -> list[str]:
        types = self.field("tokenizer.ggml.token_type")
        return [t for t, kind in zip(self.field("tokenizer.ggml.tokens"), types, strict=True) if kind == CONTROL_TOKEN]


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Undoes GGUF's row order of Q and K (rotary pairs interleaved) to halves, which our rotary turns."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
