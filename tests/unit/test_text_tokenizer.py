"""Prompts by pieces give the ids that the whole text gives; request text gives no special id."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Reference
from tokenizers import models, pre_tokenizers

from shared.contracts import limits
from shared.contracts.errors import SettingsError
from shared.text.guard import Piece
from shared.text.tokenizer import Tokenizer, TooManyTokens, slices
from tests.unit.text_models import MARKERS, small_tokenizer_json

DOCUMENT = small_tokenizer_json()
REFERENCE = Reference.from_str(DOCUMENT)
TOKENIZER = Tokenizer(DOCUMENT)
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTE_SPELLINGS = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(0x100 + index) for index, byte in enumerate(b for b in range(256) if b not in _PRINTABLE)
}


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


class Recorder:
    """The encoder, and how many characters it was given in each call."""

    def __init__(self) -> None:
        self._encoder = Reference.from_str(DOCUMENT)
        self.chars: list[int] = []

    def encode_batch_fast(self, texts: Sequence[str], add_special_tokens: bool) -> Any:
        self.chars.append(sum(map(len, texts)))
        return self._encoder.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(TOKENIZER, "_plain", recorder)
    return recorder


LONGEST = max(len(spelling) for spelling in REFERENCE.get_vocab(with_added_tokens=False))


def test_what_cannot_fit_is_refused_without_encoding(recorder: Recorder) -> None:
    with pytest.raises(TooManyTokens) as caught:
        TOKENIZER.encode_within([Piece("é" * 3_000_000, False), Piece("<|im_end|>", True)], 2_000)
    assert caught.value.at_least == 1 + -(-6_000_000 // LONGEST)
    assert recorder.chars == []


def test_counting_stops_when_it_is_certain(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ENCODE_SLICE_CHARS", 1_000)
    text = "qz " * 5_000  # three tokens each, and few enough bytes to fit if they were long ones
    assert len(REFERENCE.encode(text, add_special_tokens=False).ids) == 15_000
    with pytest.raises(TooManyTokens) as caught:
        TOKENIZER.encode_within([Piece(text, False)], 2_400)
    assert 2_400 < caught.value.at_least <= 15_000
    assert len(recorder.chars) <= 3
    assert max(recorder.chars) <= 1_000


def test_a_prompt_that_fits_is_encoded_as_ever_after_it_was_counted(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ENCODE_SLICE_CHARS", 64)
    monkeypatch.setattr(limits, "TOKEN_CHARS_USUAL", 1)
    text = "the quick  brown é😀 fox\n\n jumps over the lazy dog " * 40 + "x" * 200
    expected = REFERENCE.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.encode_within([Piece(text, False)], len(expected)) == expected
    assert len(recorder.chars) > 2, "it was counted first"


@pytest.mark.parametrize("text", ["", "a", "ab " * 100, "x" * 101, " " * 50, "word " * 3 + "y" * 40])
def test_slices_are_the_text(text: str) -> None:
    parts = list(slices(text, 20))
    assert "".join(parts) == text
    assert max(map(len, parts)) <= 20


def test_slices_keep_words_whole() -> None:
    assert list(slices("aaaaaaaaaaaaaa bbb ccc", 16)) == ["aaaaaaaaaaaaaa", " bbb ccc"]


def test_the_bytes_of_a_token_may_be_no_character() -> None:
    ids = TOKENIZER.encode_text("é 😀")
    assert b"".join(map(TOKENIZER.token_bytes, ids)) == "é 😀".encode()
    assert TOKENIZER.token_bytes(ids[0]) == b"\xc3"
    assert TOKENIZER.token_bytes(TOKENIZER.id_of("</think>") or 0) == b"</think>"
    for byte in range(256):
        token = REFERENCE.token_to_id(BYTE_SPELLINGS[byte])
        assert token is not None
        assert TOKENIZER.token_bytes(token) == bytes([byte])
