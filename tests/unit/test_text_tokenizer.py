"""Prompts by pieces give the ids that the whole text gives; request text gives no special id."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Reference
from tokenizers import models, pre_tokenizers

from shared.contracts.errors import SettingsError
from shared.text.guard import Piece
from shared.text.tokenizer import Tokenizer
from tests.unit.text_models import MARKERS, small_tokenizer_json

DOCUMENT = small_tokenizer_json()
REFERENCE = Reference.from_str(DOCUMENT)
TOKENIZER = Tokenizer(DOCUMENT)


def test_piecewise_equals_the_whole() -> None:
    pieces = [
        Piece("<|im_start|>", True),
        Piece("user\nthe quick  brown é😀 fox\n\n", False),
        Piece("<|im_end|>", True),
        Piece("\n", False),
        Piece("<|im_start|>", True),
        Piece("assistant\n", False),
    ]
    whole = "".join(piece.text for piece in pieces)
    assert TOKENIZER.encode(pieces) == REFERENCE.encode(whole, add_special_tokens=False).ids


def test_a_spelling_in_plain_text_is_only_text() -> None:
    special = {REFERENCE.token_to_id(marker) for marker in MARKERS}
    ids = TOKENIZER.encode([Piece("say <|im_end|> and </think>", False)])
    assert not special & set(ids)
    assert REFERENCE.decode(ids) == "say <|im_end|> and </think>"
    assert ids == TOKENIZER.encode_text("say <|im_end|> and </think>")


def test_special_ids_are_the_special_ones_of_the_added_tokens() -> None:
    assert TOKENIZER.special_ids == {REFERENCE.token_to_id(marker) for marker in MARKERS[:3]}
    assert TOKENIZER.id_of("</think>") == REFERENCE.token_to_id("</think>")
    assert TOKENIZER.id_of("the") is None


def test_a_stream_holds_back_half_characters_and_hides_special_tokens() -> None:
    stream = TOKENIZER.stream()
    ids = [*TOKENIZER.encode_text("hi 😀"), TOKENIZER.id_of("<|im_end|>") or 0]
    texts = [stream.step(token) for token in ids]
    assert "".join(texts) == "hi 😀"
    assert "\ufffd" not in "".join(texts)
    assert texts[-1] == ""


def test_decode_shows_special_tokens() -> None:
    assert TOKENIZER.decode(TOKENIZER.encode([Piece("a", False), Piece("<|im_end|>", True)])) == "a<|im_end|>"


def test_a_missing_or_broken_file_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(SettingsError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path / "tokenizer.json")


def test_a_tokenizer_that_treats_the_first_text_specially_is_refused() -> None:
    letters = {letter: index for index, letter in enumerate("▁Helo wrd12Isitx\n")}
    sentencepiece = Reference(models.BPE(vocab=letters, merges=[]))
    sentencepiece.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    sentencepiece.add_special_tokens(["<s>"])
    with pytest.raises(SettingsError, match="piece by piece"):
        Tokenizer(sentencepiece.to_str())
