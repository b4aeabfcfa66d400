"""Token ids of prompts and text of token ids, by the model's own `tokenizer.json`. No torch.

A prompt comes as pieces (`guard.Piece`): markers of the template become their ids, everything else is encoded without
the added vocabulary, so that no text of a client is ever a special token. For text without spellings of markers that
equals encoding the whole prompt at once, because a tokenizer splits at its added tokens before anything else; `load`
checks that this holds and refuses a tokenizer for which it does not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Encoder
from tokenizers.decoders import DecodeStream

from shared.contracts import limits
from shared.contracts.errors import SettingsError
from shared.text.guard import Guard, Marker, Piece
from shared.text.token_bytes import is_byte_level, measure, spelled_bytes

_PROBE = ("Hello", " world 12\n", "\n\nIs it", "x")


class TooManyTokens(Exception):
    """A text has certainly more tokens than were allowed: `at_least` of them."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"at least {at_least} tokens")
        self.at_least = at_least


class TextStream:
    """Text of one answer, token by token; special tokens give none, a split character waits for its rest."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._stream = DecodeStream(skip_special_tokens=True)

    def step(self, token: int) -> str:
        """The text that `token` completes, often empty."""
        return self._stream.step(self._encoder, token) or ""


class Tokenizer:
    """Not for the event loop with long texts: `encode` of a million characters takes about half a second."""

    def __init__(self, document: str) -> None:
        """`document`: the content of a `tokenizer.json`. Raises SettingsError."""
        fields: dict[str, Any] = json.loads(document)
        added: list[dict[str, Any]] = fields.get("added_tokens") or []
        self._full = Encoder.from_str(document)
        self._plain = Encoder.from_str(json.dumps({**fields, "added_tokens": [], "post_processor": None}))
        self._ids = {entry["content"]: int(entry["id"]) for entry in added}
        self._spellings: dict[int, str] = {token: spelling for spelling, token in self._ids.items()}
        self._byte_level = is_byte_level(fields)
        self._measure = measure(fields)
        self.special_ids = frozenset(int(entry["id"]) for entry in added if entry["special"])
        self.guard = Guard([Marker(e["content"], e["lstrip"], e["rstrip"]) for e in added])
        self._check()

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Raises SettingsError when the file is missing, broken or of an unsupported kind."""
        try:
            return cls(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError) as error:
            raise SettingsError(f"{path}: no usable tokenizer: {error}") from error

    def encode(self, pieces: Sequence[Piece]) -> list[int]:
        """Ids of a prompt. The encoder releases the interpreter lock, so a thread really runs beside the loop."""
        texts = [piece.text for piece in pieces if not piece.marker]
        encoded = iter(self._plain.encode_batch_fast(texts, add_special_tokens=False))
        ids: list[int] = []
        for piece in pieces:
            ids += [self._ids[piece.text]] if piece.marker else next(encoded).ids
        return ids

    def encode_within(self, pieces: Sequence[Piece], tokens_max: int) -> list[int]:
        """As `encode`, exactly, for a prompt of up to `tokens_max` tokens.

        Raises TooManyTokens as soon as it is certain: a longer prompt costs what the allowed tokens cost, and not what
        its length does. One that is a little too long may be returned.
        """
        markers = sum(piece.marker for piece in pieces)
        texts = [piece.text for piece in pieces if not piece.marker]
        least = markers + sum(map(self.least_tokens, texts))
        if least > tokens_max:
            raise TooManyTokens(least)
        if sum(map(len, texts)) > max(limits.ENCODE_SLICE_CHARS, limits.TOKEN_CHARS_USUAL * tokens_max):
            self._count(texts, markers, tokens_max)
        return self.encode(pieces)

    def least_tokens(self, text: str) -> int:
        """A lower bound without encoding; 0 where none is known."""
        return self._measure.least_tokens(text)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of text that `token` stands for, perhaps a part of a character."""
        added = self._spellings.get(token)
        if added is not None:
            return added.encode()
        spelling = str(self._full.id_to_token(token) or "")
        data = spelled_bytes(spelling) if self._byte_level or spelling.startswith("<0x") else None
        return self.decode([token]).encode() if data is None else data

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text: no spelling becomes a special token."""
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of ids, special tokens included."""
        return str(self._full.decode(list(tokens), skip_special_tokens=False))

    def id_of(self, spelling: str) -> int | None:
        """The id of an added token."""
        return self._ids.get(spelling)

    def stream(self) -> TextStream:
        return TextStream(self._full)

    def _count(self, texts: Sequence[str], counted: int, tokens_max: int) -> None:
        """Counts slice by slice, `counted` to begin with. Raises TooManyTokens as soon as it is certain."""
        for text in texts:
            for part in slices(text, limits.ENCODE_SLICE_CHARS):
                (encoded,) = self._plain.encode_batch_fast([part], add_special_tokens=False)
                counted += max(len(encoded) - limits.CUT_SLACK_TOKENS, 0) if len(part) < len(text) else len(encoded)
                if counted > tokens_max:
                    raise TooManyTokens(counted)

    def _check(self) -> None:
        """Pieces must encode as the whole does; a tokenizer that treats the start of a text specially would not."""
        for marker in self._ids:
            pieces = [Piece(text, marker=False) for text in _PROBE]
            mark = Piece(marker, marker=True)
            probe = [pieces[0], mark, pieces[1], mark, mark, pieces[2], mark, pieces[3]]
            whole = self._full.encode("".join(piece.text for piece in probe), add_special_tokens=False).ids
            if self._keeps_space(marker) and list(whole) != self.encode(probe):
                raise SettingsError(f"the tokenizer does not encode a prompt piece by piece (around {marker!r})")

    def _keeps_space(self, marker: str) -> bool:
        split = self.guard.split(f"a {marker} b", "\ufdd0")
        return [piece.text for piece in split] == ["a ", marker, " b"]


def slices(text: str, chars: int) -> Iterator[str]:
    """`text` in parts of at most `chars`, each cut before a space near its end if there is one: words stay whole."""
    start = 0
    while len(text) - start > chars:
        space = text.rfind(" ", start + chars - chars // 8, start + chars)
        end = space if space > start else start + chars
        yield text[start:end]
        start = end
    yield text[start:]
