"""The key chain and the header: golden bytes computed apart from the code, and every damage is a miss."""

from __future__ import annotations

import hashlib
import struct

import pytest

from shared.contracts import block
from shared.contracts.errors import BlockMiss
from shared.contracts.ids import NamespaceId, prefixed, sub_namespace

NAMESPACE = NamespaceId("ns_" + "00" * 16)


def by_hand(domain: bytes, *fields: bytes) -> bytes:
    """The documented preimage, spelled out: each field behind its length as 8 little-endian bytes."""
    return hashlib.sha256(b"".join(struct.pack("<Q", len(f)) + f for f in (domain, *fields))).digest()


def test_keys_follow_the_documented_preimage() -> None:
    root = by_hand(b"deepserve/root/1", struct.pack("<I", 1), NAMESPACE.encode(), bytes(32))
    first = by_hand(b"deepserve/block/1", root, struct.pack("<64I", *range(64)))
    second = by_hand(b"deepserve/block/1", first, struct.pack("<64I", *range(64, 128)))
    assert block.chain_root(NAMESPACE, bytes(32)) == root
    assert block.chain_keys(root, list(range(191)), 64) == [first, second]
    block.check_golden()


def test_a_tail_has_no_key_and_a_full_block_has() -> None:
    root = block.chain_root(NAMESPACE, bytes(32))
    assert block.chain_keys(root, range(63), 64) == []
    assert len(block.chain_keys(root, range(64), 64)) == 1


@pytest.mark.parametrize("changed", ["namespace", "fingerprint", "first token", "block size"])
def test_keys_commit_to_all_that_changes_bytes(changed: str) -> None:
    tokens = list(range(128))
    plain = block.chain_keys(block.chain_root(NAMESPACE, bytes(32)), tokens, 64)
    namespace = NamespaceId("ns_" + "01" * 16) if changed == "namespace" else NAMESPACE
    fingerprint = b"\1" * 32 if changed == "fingerprint" else bytes(32)
    other_tokens = [9, *tokens[1:]] if changed == "first token" else tokens
    size = 32 if changed == "block size" else 64
    other = block.chain_keys(block.chain_root(namespace, fingerprint), other_tokens, size)
    assert not set(plain) & set(other)


def test_every_field_of_the_fingerprint_changes_its_digest() -> None:
    base = {name: "x" for name in block.Fingerprint.__struct_fields__} | {"block_tokens": 64}
    digests = {block.Fingerprint(**base).digest()}
    for name in base:
        digests.add(block.Fingerprint(**(base | {name: 128 if name == "block_tokens" else "y"})).digest())
    assert len(digests) == len(base) + 1


def test_neighbouring_fields_cannot_be_shifted() -> None:
    assert block.digest("d", b"ab", b"c") != block.digest("d", b"a", b"bc")
    assert block.digest("d", b"") != block.digest("d")


def test_tokens_pack_as_little_endian_uint32() -> None:
    assert block.pack_tokens([1, 49_152]) == bytes.fromhex("0100000000c00000")
    assert block.unpack_tokens(bytes.fromhex("0100000000c00000")) == [1, 49_152]
    with pytest.raises(ValueError):
        block.unpack_tokens(b"\0\0\0")


HEADER = block.BlockHeader(
    key=bytes(range(32)),
    put_id=bytes(range(16)),
    dtype="bfloat16",
    shape=(30, 2, 3, 64, 64),
    payload_bytes=1_474_560,
    checksum=0xDEADBEEF,
)
HEADER_HEX = (
    "44534b56"  # magic DSKV
    "0100"  # format version
    "01"  # bfloat16
    "05"  # dimensions
    + bytes(range(32)).hex()
    + bytes(range(16)).hex()
    + "1e000000020000000300000040000000400000000000000000"[:48]
    + "0080160000000000"  # 1,474,560 payload bytes
    + "efbeadde"
)


def test_header_bytes_are_golden() -> None:
    assert HEADER.pack().hex() == HEADER_HEX
    assert block.unpack_header(bytes.fromhex(HEADER_HEX)) == HEADER


@pytest.mark.parametrize(
    ("position", "value", "reason"), [(0, 0x45, "foreign"), (4, 2, "version"), (6, 99, "corrupt"), (7, 7, "corrupt")]
)
def test_a_damaged_header_is_a_miss(position: int, value: int, reason: str) -> None:
    data = bytearray(bytes.fromhex(HEADER_HEX))
    data[position] = value
    with pytest.raises(BlockMiss) as caught:
        block.unpack_header(bytes(data))
    assert caught.value.reason == reason


def test_a_short_header_is_a_miss() -> None:
    for length in range(block.HEADER_BYTES):
        with pytest.raises(BlockMiss):
            block.unpack_header(bytes.fromhex(HEADER_HEX)[:length])


def test_a_user_id_splits_a_namespace_and_never_names_one() -> None:
    account = NamespaceId(prefixed("ns_", bytes(16)))
    other = NamespaceId(prefixed("ns_", b"\1" * 16))
    assert sub_namespace(account, None) == account
    assert sub_namespace(account, "a") != sub_namespace(account, "b") != account
    assert sub_namespace(account, other) != other
    assert sub_namespace(account, "a") != sub_namespace(other, "a")
    assert sub_namespace(account, "") != account
