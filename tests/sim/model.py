"""The model of the simulations: a tokenizer of single characters in front of the engine of hashes.

Every printable ASCII character is one token, so that the text that a client sees tells the tokens that were drawn, and
an auditor can count a prompt's tokens by itself.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.gateway.prepare import ServedModel, load_model
from shared.engine.hash_engine import HashEngine
from tests.sim import threads

NAME: Final = "sim"
BLOCK_TOKENS: Final = 16
CONTEXT_TOKENS: Final = 2_048
MARKERS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ALPHABET: Final = "".join(chr(code) for code in range(33, 127)) + " \n"
"""Characters by their token id."""
FIRST_MARKER: Final = len(ALPHABET)
STOP_TOKEN: Final = FIRST_MARKER + 2
VOCABULARY: Final = FIRST_MARKER + len(MARKERS)
PRICES: Final = """
[[price]]
model = "sim"
currency = "USD"
hit = "0.003"
miss = "0.15"
output = "0.60"
"""
TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_folder(folder: Path) -> None:
    """A converted model's folder, as far as text goes."""
    visible = {" ": "Ġ", "\n": "Ċ"}
    vocabulary = {visible.get(character, character): number for number, character in enumerate(ALPHABET)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in MARKERS])
    card = {
        "config": {"context_tokens": CONTEXT_TOKENS},
        "bos_token": FIRST_MARKER,
        "eos_token": STOP_TOKEN,
        "stop_tokens": [STOP_TOKEN],
    }
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    (folder / "model.json").write_text(json.dumps(card), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


@functools.cache
def served_model() -> ServedModel:
    """Made once for all simulations of a process; it does not change."""
    with tempfile.TemporaryDirectory(prefix="deepserve-sim-") as folder:
        write_folder(Path(folder))
        return load_model(NAME, Path(folder))


def make_engine(pages: int, sequences_max: int, rows_per_s: float) -> HashEngine:
    """The engine of one worker; its steps take virtual time."""
    return HashEngine(
        model=NAME,
        weights="sim/1",
        pages=pages,
        sequences_max=sequences_max,
        block_tokens=BLOCK_TOKENS,
        vocabulary=VOCABULARY,
        context_tokens=CONTEXT_TOKENS,
        rows_per_s=rows_per_s,
        sleep=threads.sleep,
    )
