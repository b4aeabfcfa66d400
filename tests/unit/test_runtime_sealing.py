"""Sealed texts: opened by the same key and purpose only; every changed or cut text is refused."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from shared.contracts.errors import InternalError
from shared.runtime.sealing import SEAL_BYTES, open_sealed, seal, seal_with

DATA = Path(__file__).parents[1] / "data"
KEY = bytes(range(32))
ENTROPY = bytes(range(100, 128))


def by_hand(key: bytes, purpose: bytes, data: bytes, entropy: bytes) -> bytes:
    """The format as its description says, with the library's low-level cipher."""
    secret = b"deepserve/seal/1" + len(purpose).to_bytes(4, "little") + purpose + entropy[:16]
    cipher = Cipher(algorithms.AES(hmac.new(key, secret, hashlib.sha256).digest()), modes.GCM(entropy[16:]))
    encryptor = cipher.encryptor()
    head = b"\x01" + entropy
    encryptor.authenticate_additional_data(head)
    return head + encryptor.update(data) + encryptor.finalize() + encryptor.tag


@pytest.mark.parametrize("data", [b"", b"x", b"work", bytes(100_000)])
def test_the_format_is_what_it_says(data: bytes) -> None:
    sealed = seal_with(KEY, "work", data, ENTROPY)
    assert sealed == by_hand(KEY, b"work", data, ENTROPY)
    assert len(sealed) == len(data) + SEAL_BYTES
    assert open_sealed(KEY, "work", sealed) == data


def test_a_golden_seal_opens_for_ever() -> None:
    golden = (DATA / "work.sealed").read_bytes()
    assert open_sealed(KEY, "work", golden) == b"golden work"
    assert seal_with(KEY, "work", b"golden work", ENTROPY) == golden


def test_two_seals_of_the_same_text_differ() -> None:
    assert seal(KEY, "work", b"x") != seal(KEY, "work", b"x")
    assert open_sealed(KEY, "work", seal(KEY, "work", b"x")) == b"x"


@pytest.mark.parametrize(("key", "purpose"), [(bytes(32), "work"), (KEY, "wor"), (KEY, "namespace key")])
def test_another_key_or_purpose_does_not_open(key: bytes, purpose: str) -> None:
    with pytest.raises(InternalError):
        open_sealed(key, purpose, seal(KEY, "work", b"secret"))


def test_every_cut_and_every_flipped_bit_is_refused() -> None:
    sealed = seal(KEY, "work", b"secret")
    for length in range(len(sealed)):
        with pytest.raises(InternalError):
            open_sealed(KEY, "work", sealed[:length])
    for bit in range(8 * len(sealed)):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(InternalError):
            open_sealed(KEY, "work", bytes(changed))


def test_a_key_of_another_length_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        seal(b"short", "work", b"x")
    with pytest.raises(ValueError, match="28 bytes of entropy"):
        seal_with(KEY, "work", b"x", bytes(27))
