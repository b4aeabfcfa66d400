"""The definition of truth: the network in fp32, one sequence, no cache, every step spelled out. Slow on purpose.

DIMENSION KEY
    N tokens of the sequence, H query heads, G KV heads, D head dim, M model dim, V vocab

Tests hold the engine against this and this against `transformers`. Rows of K and V are also what a page should hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shared.engine.model_config import ModelConfig


class Truth(NamedTuple):
    """logits_NV: fp32. kv_L2GND: rotated keys, and values, of every layer."""

    logits_NV: Tensor
    kv_L2GND: Tensor


@torch.inference_mode()
def reference_forward(config: ModelConfig, weights: Mapping[str, Tensor], tokens: Sequence[int]) -> Truth:
    """`weights`: any float dtype, by the names of weights.py; computed in fp32."""
    c = config
    w = {name: tensor.float() for name, tensor in weights.items()}
    x_NM = w["embedding"][torch.tensor(tokens)]
    cos_ND, sin_ND = reference_rotary(c, len(tokens))
    layers = []
    for i in range(c.layers):
        h_NM = reference_norm(x_NM, w[f"layers.{i}.attention_norm"], c.norm_epsilon)
        qkv_NUD = (h_NM @ w[f"layers.{i}.qkv"].T).view(len(tokens), c.query_heads + 2 * c.kv_heads, c.head_dim)
        q_NHD, k_NGD, v_NGD = torch.split(qkv_NUD, [c.query_heads, c.kv_heads, c.kv_heads], dim=1)
        q_NHD, k_NGD = reference_rotate(q_NHD, cos_ND, sin_ND), reference_rotate(k_NGD, cos_ND, sin_ND)
        layers.append(torch.stack([k_NGD.transpose(0, 1), v_NGD.transpose(0, 1)]))
        mixed_NE = reference_attention(q_NHD, k_NGD, v_NGD).reshape(len(tokens), -1)
        x_NM = x_NM + mixed_NE @ w[f"layers.{i}.attention_output"].T
        h_NM = reference_norm(x_NM, w[f"layers.{i}.mlp_norm"], c.norm_epsilon)
        gate_NF, up_NF = (h_NM @ w[f"layers.{i}.gate_up"].T).chunk(2, dim=-1)
        x_NM = x_NM + (gate_NF / (1 + torch.exp(-gate_NF)) * up_NF) @ w[f"layers.{i}.down"].T
    h_NM = reference_norm(x_NM, w["final_norm"], c.norm_epsilon)
    head_VM = w["embedding"] if c.tied_embedding else w["head"]
    return Truth(h_NM @ head_VM.T, torch.stack(layers))


def reference_attention(q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
    """Row n of the result mixes the values of rows [0, n]; query head h reads KV head h // (H / G)."""
    count, heads, dim = q_NHD.shape
    group = heads // k_NGD.shape[1]
    k_HND = k_NGD.repeat_interleave(group, dim=1).transpose(0, 1)
    v_HND = v_NGD.repeat_interleave(group, dim=1).transpose(0, 1)
    scores_HNN = q_NHD.transpose(0, 1) @ k_HND.transpose(1, 2) / math.sqrt(dim)
    future_NN = torch.ones(count, count, dtype=torch.bool).triu(1)
    weights_HNN = torch.softmax(scores_HNN.masked_fill(future_NN, float("-inf")), dim=-1)
    return (weights_HNN @ v_HND).transpose(0, 1)


def reference_norm(x_NM: Tensor, weight_M: Tensor, epsilon: float) -> Tensor:
    return weight_M * x_NM / torch.sqrt(x_NM.square().mean(dim=-1, keepdim=True) + epsilon)


def reference_rotary(config: ModelConfig, count: int) -> tuple[Tensor, Tensor]:
    """cos_ND and sin_ND of positions [0, count)."""
    exponent = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    angle = torch.outer(torch.arange(count).float(), 1.0 / config.rope_theta**exponent)
    return torch.cat([angle.cos()] * 2, dim=-1), torch.cat([angle.sin()] * 2, dim=-1)


def reference_rotate(x_NHD: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> Tensor:
    first, second = x_NHD.chunk(2, dim=-1)
    turned_NHD = torch.cat([-second, first], dim=-1)
    return x_NHD * cos_ND[:, None] + turned_NHD * sin_ND[:, None]
