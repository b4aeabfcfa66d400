"""Conversion of the packaged GGUF: whole or not at all, and a bad source names what is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from shared.contracts.errors import SettingsError
from shared.engine.convert import convert, find_source, main
from shared.engine.model_config import read_card
from shared.engine.weights import load_weights

pytestmark = pytest.mark.model


def quiet(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def source() -> Path:
    return find_source("smollm2")[0]


@pytest.fixture
def copy(model_dir: Path, tmp_path: Path) -> Path:
    """A model folder of links, whose single files a test may replace."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in model_dir.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def replaced(folder: Path, name: str, content: bytes) -> None:
    (folder / name).unlink()
    (folder / name).write_bytes(content)


def test_the_card_says_what_the_gguf_says(model_dir: Path) -> None:
    card = read_card(model_dir)
    assert card.name == "smollm2-135m-instruct"
    config = card.config
    assert (config.layers, config.query_heads, config.kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocabulary, config.context_tokens, config.tied_embedding) == (49_152, 8_192, True)
    assert (config.rope_theta, config.norm_epsilon) == (100_000.0, 1e-5)
    assert card.stop_tokens == (2,)
    assert 2 * config.kv_elements_token() == 23_040


def test_every_weight_is_the_rounded_value_of_the_gguf(model_dir: Path, source: Path) -> None:
    card = read_card(model_dir)
    ours = load_weights(model_dir, card)
    theirs = {t.name: t for t in gguf.GGUFReader(source).tensors}

    def rounded(name: str) -> torch.Tensor:
        values = np.array(dequantize(theirs[name].data, theirs[name].tensor_type))
        return torch.from_numpy(values).to(torch.bfloat16)

    assert torch.equal(ours["embedding"], rounded("token_embd.weight"))
    assert torch.equal(ours["layers.29.down"], rounded("blk.29.ffn_down.weight"))
    assert torch.equal(ours["layers.7.gate_up"][:1536], rounded("blk.7.ffn_gate.weight"))
    assert torch.equal(ours["layers.7.gate_up"][1536:], rounded("blk.7.ffn_up.weight"))
    assert torch.equal(ours["layers.3.qkv"][768:], rounded("blk.3.attn_v.weight"))
    # Row 2 i + j of a head in GGUF is row 32 j + i in ours.
    q, k = rounded("blk.3.attn_q.weight"), rounded("blk.3.attn_k.weight")
    assert torch.equal(ours["layers.3.qkv"][64 * 4 + 32 + 5], q[64 * 4 + 2 * 5 + 1])
    assert torch.equal(ours["layers.3.qkv"][576 + 64 * 2 + 9], k[64 * 2 + 2 * 9])


def test_a_second_run_returns_at_once_and_changes_nothing(model_dir: Path) -> None:
    before = {f.name: f.stat().st_mtime_ns for f in model_dir.iterdir()}
    said: list[str] = []
    convert("smollm2", model_dir, said.append)
    assert {f.name: f.stat().st_mtime_ns for f in model_dir.iterdir()} == before
    assert len(said) == 1


def test_a_truncated_gguf_names_the_tensor_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    reader = gguf.GGUFReader(source)
    victim = next(t for t in reader.tensors if t.name == "blk.20.ffn_up.weight")
    short = tmp_path / "short.gguf"
    with source.open("rb") as file:
        short.write_bytes(file.read(int(victim.data_offset) + 100))
    with pytest.raises(SettingsError, match=r"blk\.20\.ffn_up\.weight"):
        convert(str(short), tmp_path / "out", quiet)
    assert [p.name for p in tmp_path.iterdir()] == ["short.gguf"]


def _tiny_gguf(path: Path, **changes: np.ndarray | None) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(4)
    writer.add_feed_forward_length(6)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_vocab_size(4)
    writer.add_context_length(8)
    writer.add_rope_freq_base(10.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "ab", "<e>"])
    writer.add_token_merges(["a b"])
    writer.add_token_types([1, 1, 1, 3])
    writer.add_bos_token_id(3)
    writer.add_eos_token_id(3)
    writer.add_chat_template("{{ messages }}")
    shapes = {
        "token_embd": (4, 4),
        "blk.0.attn_norm": (4,),
        "blk.0.attn_q": (4, 4),
        "blk.0.attn_k": (2, 4),
        "blk.0.attn_v": (2, 4),
        "blk.0.attn_output": (4, 4),
        "blk.0.ffn_norm": (4,),
        "blk.0.ffn_gate": (6, 4),
        "blk.0.ffn_up": (6, 4),
        "blk.0.ffn_down": (4, 6),
        "output_norm": (4,),
    }
    for name, shape in shapes.items():
        values = changes.get(name, np.ones(shape, np.float32))
        if values is not None:
            writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_tiny_gguf_is_converted(tmp_path: Path) -> None:
    path = tmp_path / "Tiny.gguf"
    _tiny_gguf(path)
    card = convert(str(path), tmp_path / "out", quiet)
    assert (card.name, card.config.vocabulary, card.config.head_dim, card.stop_tokens) == ("tiny", 4, 2, (3,))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["Tiny.gguf", "out"]
    assert load_weights(tmp_path / "out", card)["layers.0.qkv"].tolist() == [[1.0] * 4] * 8


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("blk.0.ffn_up", None, "missing"),
        ("blk.0.attn_k", np.ones((4, 4), np.float32), "shape"),
        ("blk.0.ffn_down", np.full((4, 6), np.nan, np.float32), "finite"),
    ],
)
def test_a_wrong_gguf_names_the_tensor(tmp_path: Path, name: str, values: np.ndarray | None, says: str) -> None:
    path = tmp_path / "wrong.gguf"
    _tiny_gguf(path, **{name: values})
    with pytest.raises(SettingsError, match=rf"{name}\.weight.*{says}"):
        convert(str(path), tmp_path / "out", quiet)
    assert not (tmp_path / "out").exists()


def test_what_is_no_gguf_is_refused_by_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "no.gguf"
    path.write_bytes(b"\0" * 4096)
    assert main(["--source", str(path), "--out", str(tmp_path / "out")]) == 1
    assert "cannot be read as GGUF" in capsys.readouterr().err
    assert main(["--source", str(tmp_path / "absent"), "--out", str(tmp_path / "out")]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_an_unknown_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(SettingsError, match="not empty"):
        convert("smollm2", tmp_path, quiet)
    assert (tmp_path / "mine").read_text() == "precious"


def test_changed_weights_are_refused(copy: Path, model_dir: Path) -> None:
    content = bytearray((model_dir / "weights.safetensors").read_bytes())
    content[-1] ^= 1
    replaced(copy, "weights.safetensors", bytes(content))
    with pytest.raises(SettingsError, match="digest"):
        load_weights(copy, read_card(copy))
    replaced(copy, "weights.safetensors", bytes(content[:-10]))
    with pytest.raises(SettingsError, match="bytes"):
        load_weights(copy, read_card(copy))
    (copy / "weights.safetensors").unlink()
    with pytest.raises(SettingsError, match="does not exist"):
        load_weights(copy, read_card(copy))


def test_a_card_that_does_not_fit_its_weights_names_the_tensor(copy: Path) -> None:
    card = json.loads((copy / "model.json").read_text())
    card["config"]["layers"] = 31
    replaced(copy, "model.json", json.dumps(card).encode())
    with pytest.raises(SettingsError, match=r"layers\.30\.attention_norm is missing"):
        load_weights(copy, read_card(copy))
    card["config"] |= {"layers": 30, "feed_forward_dim": 1024}
    replaced(copy, "model.json", json.dumps(card).encode())
    with pytest.raises(SettingsError, match=r"layers\.0\.gate_up has shape"):
        load_weights(copy, read_card(copy))


def test_a_broken_or_newer_card_is_refused(copy: Path, tmp_path: Path) -> None:
    card = json.loads((copy / "model.json").read_text())
    replaced(copy, "model.json", json.dumps(card | {"format": 2}).encode())
    with pytest.raises(SettingsError, match="format 2"):
        read_card(copy)
    replaced(copy, "model.json", b"{")
    with pytest.raises(SettingsError, match="not a model card"):
        read_card(copy)
    with pytest.raises(SettingsError, match="no converted model"):
        read_card(tmp_path / "nowhere")


def test_a_half_made_folder_does_not_count(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    with pytest.raises(SettingsError, match="no complete model"):
        convert("smollm2", copy, quiet)
    shutil.rmtree(copy)
