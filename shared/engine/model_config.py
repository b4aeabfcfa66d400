"""What a model folder holds: the frozen shape of the network and the card that names its bytes.

Owns `model.json`. Does not own the tensors (weights.py) or how the folder was made (convert.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from shared.contracts.block import Fingerprint
from shared.contracts.errors import SettingsError

CARD_FILE: Final = "model.json"
WEIGHTS_FILE: Final = "weights.safetensors"
TOKENIZER_FILE: Final = "tokenizer.json"
TEMPLATE_FILE: Final = "chat_template.jinja"
CARD_FORMAT: Final = 1
CPU_DOMAIN: Final = "cpu-bf16-1"
"""The numeric domain of this CPU engine. Raise the number when a change moves a bit of KV or logits."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A Llama-family decoder: RMSNorm, rotary positions (halves rotated), grouped heads, gated SiLU."""

    layers: int
    model_dim: int
    feed_forward_dim: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context_tokens: int
    rope_theta: float
    norm_epsilon: float
    tied_embedding: bool

    def __post_init__(self) -> None:
        sizes = (self.layers, self.model_dim, self.feed_forward_dim, self.query_heads, self.kv_heads, self.head_dim)
        if min(*sizes, self.vocabulary, self.context_tokens) < 1:
            raise ValueError("every size of a model is at least 1")
        if self.query_heads % self.kv_heads:
            raise ValueError(f"{self.query_heads} query heads do not share {self.kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ValueError("rotary positions need an even head_dim")

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.query_heads // self.kv_heads

    def kv_elements_token(self) -> int:
        """Elements of K and V of one token over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim


class ModelCard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`model.json`. Digests are SHA-256 in hexadecimal; `stop_tokens` end a turn."""

    format: int
    name: str
    architecture: str
    config: ModelConfig
    weights_digest: str
    weights_bytes: int
    tokenizer_revision: str
    bos_token: int
    eos_token: int
    stop_tokens: tuple[int, ...]
    source: str


def read_card(model_dir: Path) -> ModelCard:
    """The card of a converted model. Raises SettingsError that says what is wrong with the folder."""
    path = model_dir / CARD_FILE
    try:
        card = msgspec.json.decode(path.read_bytes(), type=ModelCard)
    except FileNotFoundError:
        raise SettingsError(f"{model_dir} holds no converted model; run python -m shared.engine.convert") from None
    except msgspec.DecodeError as error:
        raise SettingsError(f"{path} is not a model card: {error}") from error
    if card.format != CARD_FORMAT:
        raise SettingsError(f"{path} has format {card.format}, this code reads {CARD_FORMAT}; convert the model again")
    return card


def fingerprint_of(card: ModelCard, *, block_tokens: int, kv_dtype: str, numeric_domain: str) -> Fingerprint:
    """Everything about this model that changes the bytes of a block."""
    c = card.config
    sizes = f"L{c.layers} M{c.model_dim} F{c.feed_forward_dim} H{c.query_heads} G{c.kv_heads} D{c.head_dim}"
    return Fingerprint(
        weights_digest=card.weights_digest,
        tokenizer_revision=card.tokenizer_revision,
        architecture=f"{card.architecture} {sizes} V{c.vocabulary} eps{c.norm_epsilon!r}",
        kv_dtype=kv_dtype,
        kv_layout="layer,k|v,kv_head,token,dim",
        rope=f"half theta={c.rope_theta!r}",
        block_tokens=block_tokens,
        adapter_digest="",
        numeric_domain=numeric_domain,
    )
