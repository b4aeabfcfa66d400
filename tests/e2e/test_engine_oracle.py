"""The network against `transformers` on the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from shared.engine.attention import attend, geometry_of
from shared.engine.kv_pages import KvPages
from shared.engine.model import Model
from shared.engine.model_config import ModelConfig
from shared.engine.paged_engine import Rows
from shared.engine.reference import reference_forward
from shared.engine.torch_engine import assemble
from tests.model_fixture import RealModel

pytestmark = pytest.mark.model

BLOCK = 64
TOKENS = 1100
"""More than one attention tile."""
FP32_TOLERANCE = 1e-4
"""For logits up to 43: 26 units in the last place, over 30 layers."""


@pytest.fixture(scope="module")
def tokens(model_dir: Path) -> list[int]:
    """Text of the repository, so that the logits are those of language and not of noise."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    sources = sorted((Path(__file__).resolve().parent.parent.parent / "shared" / "contracts").glob("*.py"))
    ids: list[int] = tokenizer.encode("\n".join(path.read_text() for path in sources)).ids
    assert len(ids) > TOKENS
    return ids[:TOKENS]


def _oracle(real: RealModel, dtype: torch.dtype) -> LlamaForCausalLM:
    c = real.card.config
    config = LlamaConfig(
        vocab_size=c.vocabulary,
        hidden_size=c.model_dim,
        intermediate_size=c.feed_forward_dim,
        num_hidden_layers=c.layers,
        num_attention_heads=c.query_heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.context_tokens,
        rms_norm_eps=c.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=c.tied_embedding,
        attention_bias=False,
        mlp_bias=False,
    )
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(_their_names(c, real.weights), strict=False)
    assert missing == ["lm_head.weight"] or not missing
    assert not unexpected
    model.tie_weights()
    return model.eval().to(dtype)


def _their_names(c: ModelConfig, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    q_rows, kv_rows = c.query_heads * c.head_dim, c.kv_heads * c.head_dim
    state = {"model.embed_tokens.weight": weights["embedding"], "model.norm.weight": weights["final_norm"]}
    for i in range(c.layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        q, k, v = weights[ours + "qkv"].split([q_rows, kv_rows, kv_rows])
        gate, up = weights[ours + "gate_up"].chunk(2)
        state |= {
            theirs + "self_attn.q_proj.weight": q,
            theirs + "self_attn.k_proj.weight": k,
            theirs + "self_attn.v_proj.weight": v,
            theirs + "self_attn.o_proj.weight": weights[ours + "attention_output"],
            theirs + "mlp.gate_proj.weight": gate,
            theirs + "mlp.up_proj.weight": up,
            theirs + "mlp.down_proj.weight": weights[ours + "down"],
            theirs + "input_layernorm.weight": weights[ours + "attention_norm"],
            theirs + "post_attention_layernorm.weight": weights[ours + "mlp_norm"],
        }
    return {name: tensor.float() for name, tensor in state.items()}


@torch.inference_mode()
def _their_logits(real: RealModel, dtype: torch.dtype, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = _oracle(real, dtype)(torch.tensor([tokens]), use_cache=False).logits[0].float()
    return logits


@torch.inference_mode()
def _our_logits(model: Model, tokens: list[int]) -> torch.Tensor:
    pages = list(range(-(-len(tokens) // BLOCK)))
    kv = KvPages(model.config, pages=len(pages), block_tokens=BLOCK, dtype=model.dtype)
    geometry = geometry_of(model.config, block_tokens=BLOCK, dtype=model.dtype)
    rows, _ = assemble([Rows(tokens, 0, pages, None)], BLOCK)
    hidden_NM = model.forward(rows, kv, geometry, attend)
    return model.logits(hidden_NM, range(len(tokens))).float()


@pytest.fixture(scope="module")
def truth(real_model: RealModel, tokens: list[int]) -> torch.Tensor:
    """transformers in fp64: logits_NV. Its own fp32 lies 0.7e-4 from it, so fp32 against fp32 would measure both."""
    return _their_logits(real_model, torch.float64, tokens)


def test_the_reference_equals_transformers_in_fp32(
    real_model: RealModel, tokens: list[int], truth: torch.Tensor
) -> None:
    ours = reference_forward(real_model.card.config, real_model.weights, tokens).logits_NV
    assert (ours - truth).abs().max() < FP32_TOLERANCE


def test_the_engine_equals_transformers_in_fp32(real_model: RealModel, tokens: list[int], truth: torch.Tensor) -> None:
    model = Model(real_model.card.config, real_model.weights, torch.float32)
    ours = _our_logits(model, tokens)
    assert (ours - truth).abs().max() < FP32_TOLERANCE
    assert torch.equal(ours.argmax(-1), truth.argmax(-1))


def test_bf16_is_as_near_to_fp32_as_transformers_own_bf16(
    real_model: RealModel, tokens: list[int], truth: torch.Tensor
) -> None:
    ours = _our_logits(real_model.model, tokens)
    theirs = _their_logits(real_model, torch.bfloat16, tokens)
    targets = torch.tensor(tokens[1:])

    def loss(logits: torch.Tensor) -> float:
        return torch.nn.functional.cross_entropy(logits[:-1], targets).item()

    distances: dict[str, Callable[[torch.Tensor], float]] = {
        "mean difference": lambda x: (x - truth).abs().mean().item(),
        "other argmax": lambda x: (x.argmax(-1) != truth.argmax(-1)).float().mean().item(),
        "loss": lambda x: abs(loss(x) - loss(truth)),
    }
    report = {name: (distance(ours), distance(theirs)) for name, distance in distances.items()}
    print(report, "fp32 loss", loss(truth))
    assert report["mean difference"][0] <= 1.1 * report["mean difference"][1]
    assert report["other argmax"][0] <= report["other argmax"][1] + 0.01
    assert report["loss"][0] <= report["loss"][1] + 0.01
