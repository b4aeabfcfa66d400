"""Sealed blocks: exactly the block that was sealed, or a miss with its reason; golden bytes for ever.

The expected bytes are put together here from the format's description, with the library's low-level parts.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from shared.contracts.errors import BlockMiss
from shared.runtime.stores.sealed import BlockForm, BlockName, object_bytes, open_block, seal_block

GOLDEN = Path(__file__).parents[1] / "data" / "block.object"
SECRET = bytes(range(32))
NAME = BlockName(key=bytes(range(100, 132)), put_id=bytes(range(200, 216)))
FORM = BlockForm(dtype="bfloat16", shape=(2, 3, 4), payload_bytes=48)
PAYLOAD = bytes(range(48))
HEADER_BYTES = 92


def by_hand(secret: bytes, name: BlockName, payload: bytes, *, checksum: int | None = None, version: int = 1) -> bytes:
    """Magic, version, dtype 1, 3 dimensions, key, put id, 6 dims, payload size, CRC-32; then AES-256-GCM."""
    header = struct.pack(
        "<4sHBB32s16s6IQI",
        *(b"DSKV", version, 1, 3, name.key, name.put_id),
        *(2, 3, 4, 0, 0, 0),
        *(len(payload), zlib.crc32(payload) if checksum is None else checksum),
    )
    # HKDF-SHA256 (RFC 5869), one block: extract with the put id as salt, expand with the format's name.
    extracted = hmac.new(name.put_id, secret, hashlib.sha256).digest()
    key = hmac.new(extracted, b"deepserve/object/1\x01", hashlib.sha256).digest()
    encryptor = Cipher(algorithms.AES(key), modes.GCM(bytes(12))).encryptor()
    encryptor.authenticate_additional_data(header)
    return header + encryptor.update(payload) + encryptor.finalize() + encryptor.tag


def sealed() -> bytes:
    return b"".join(seal_block(SECRET, NAME, FORM, PAYLOAD))


def reason(data: bytes, **changed: object) -> str:
    secret, name, form = (changed.get(k, v) for k, v in (("secret", SECRET), ("name", NAME), ("form", FORM)))
    with pytest.raises(BlockMiss) as missed:
        open_block(secret, name, form, data)  # type: ignore[arg-type]
    return missed.value.reason


def test_an_object_is_made_as_its_description_says() -> None:
    assert sealed() == by_hand(SECRET, NAME, PAYLOAD)
    assert len(sealed()) == object_bytes(FORM) == HEADER_BYTES + 48 + 16
    assert open_block(SECRET, NAME, FORM, sealed()) == PAYLOAD
    assert open_block(SECRET, NAME, FORM, memoryview(sealed()), verify_checksum=True) == PAYLOAD


def test_a_golden_object_opens_for_ever() -> None:
    assert open_block(SECRET, NAME, FORM, GOLDEN.read_bytes(), verify_checksum=True) == PAYLOAD
    assert sealed() == GOLDEN.read_bytes()


def test_a_whole_block_goes_both_ways() -> None:
    payload = os.urandom(1_474_560)
    form = BlockForm(dtype="bfloat16", shape=(64, 30, 2, 3, 64), payload_bytes=len(payload))
    secret, name = os.urandom(32), BlockName(os.urandom(32), os.urandom(16))
    parts = seal_block(secret, name, form, memoryview(payload))
    assert payload[:64] not in b"".join(parts)
    assert open_block(secret, name, form, b"".join(parts)) == payload


def test_every_cut_is_a_miss() -> None:
    data = sealed()
    for length in range(len(data)):
        assert reason(data[:length]) == "short"
    assert reason(data + b"\0") == "corrupt"
    assert reason(data + data) == "corrupt"


def test_every_flipped_bit_is_a_miss_with_a_reason_of_its_place() -> None:
    data = sealed()
    places = {
        "magic": (range(0, 4), {"foreign"}),
        "version": (range(4, 6), {"version"}),
        "dtype": (range(6, 7), {"dtype", "corrupt"}),
        "dimensions": (range(7, 8), {"shape", "corrupt"}),
        "key": (range(8, 40), {"key"}),
        "put id": (range(40, 56), {"key"}),
        "shape": (range(56, 80), {"shape", "corrupt"}),
        "size": (range(80, 88), {"shape"}),
        "checksum": (range(88, 92), {"decrypt"}),
        "ciphertext and tag": (range(92, len(data)), {"decrypt"}),
    }
    assert sorted(i for where, _ in places.values() for i in where) == list(range(len(data)))
    for where, expected in places.values():
        for place in where:
            for bit in range(8):
                changed = bytearray(data)
                changed[place] ^= 1 << bit
                assert reason(bytes(changed)) in expected, (place, bit)


def test_another_secret_put_form_or_key_is_a_miss() -> None:
    data = sealed()
    assert reason(data, secret=bytes(32)) == "decrypt"
    assert reason(data, name=replace(NAME, key=bytes(32))) == "key"
    assert reason(data, name=replace(NAME, put_id=bytes(16))) == "key"
    assert reason(data, form=replace(FORM, dtype="float16")) == "dtype"
    assert reason(data, form=replace(FORM, shape=(3, 2, 4))) == "shape"
    assert reason(data, form=replace(FORM, payload_bytes=47)) == "shape"


def test_an_object_under_anothers_name_is_a_miss_though_both_are_whole() -> None:
    """What an attacker on the store can do: rename, and rewrite the header to fit."""
    other = BlockName(key=bytes(32), put_id=NAME.put_id)
    theirs = b"".join(seal_block(SECRET, other, FORM, PAYLOAD))
    assert reason(theirs) == "key"
    assert reason(sealed()[:HEADER_BYTES] + theirs[HEADER_BYTES:]) == "decrypt"


def test_an_object_of_a_newer_format_is_a_miss() -> None:
    assert reason(by_hand(SECRET, NAME, PAYLOAD, version=2)) == "version"


def test_the_checksum_tells_what_was_wrong_before_it_was_sealed() -> None:
    data = by_hand(SECRET, NAME, PAYLOAD, checksum=1)
    assert open_block(SECRET, NAME, FORM, data) == PAYLOAD
    with pytest.raises(BlockMiss) as missed:
        open_block(SECRET, NAME, FORM, data, verify_checksum=True)
    assert missed.value.reason == "corrupt"


def test_two_puts_of_one_block_share_no_bytes_of_ciphertext() -> None:
    other = b"".join(seal_block(SECRET, replace(NAME, put_id=bytes(16)), FORM, PAYLOAD))
    pairs = zip(sealed()[HEADER_BYTES:], other[HEADER_BYTES:], strict=True)
    assert sum(a == b for a, b in pairs) < 8


def test_a_payload_that_is_not_of_its_form_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="48"):
        seal_block(SECRET, NAME, FORM, PAYLOAD[:-1])
    with pytest.raises(ValueError, match="dtype"):
        seal_block(SECRET, NAME, replace(FORM, dtype="int3"), PAYLOAD)
    with pytest.raises(ValueError, match="secret"):
        seal_block(b"short", NAME, FORM, PAYLOAD)
