"""The rebuilt tokenizer against ids that llama.cpp gave for the same file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

pytestmark = pytest.mark.model

GOLDEN = Path(__file__).resolve().parent.parent / "data" / "tokenizer_golden.json"


def test_every_text_has_the_ids_of_llama_cpp(model_dir: Path) -> None:
    document = json.loads((model_dir / "tokenizer.json").read_text(encoding="utf-8"))
    with_specials = Tokenizer.from_str(json.dumps(document))
    plain = Tokenizer.from_str(json.dumps(document | {"added_tokens": []}))
    cases: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["cases"]
    assert len(cases) > 60
    for case in cases:
        encoder = with_specials if case["special"] else plain
        assert encoder.encode(case["text"]).ids == case["ids"], case["text"]


def test_decoding_gives_the_text_back(model_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    for case in json.loads(GOLDEN.read_text())["cases"]:
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["text"]


def test_the_template_is_the_files_own(model_dir: Path) -> None:
    template = (model_dir / "chat_template.jinja").read_text(encoding="utf-8")
    assert "<|im_start|>" in template
    assert "add_generation_prompt" in template
