"""Blocks: the key chain, the fingerprint, the object header (design, section 4).

A block is the KV of `block_tokens` consecutive tokens from a multiple of it. Its key commits to every token before it,
to the namespace and to everything that changes its bytes. The header's bytes and the golden vectors are for ever.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence
from typing import Final

import msgspec

from shared.contracts.errors import BlockMiss, SettingsError
from shared.contracts.ids import NamespaceId

FORMAT_VERSION: Final = 1
KEY_BYTES: Final = 32
PUT_ID_BYTES: Final = 16
HEADER_MAGIC: Final = b"DSKV"
_HEADER = struct.Struct("<4sHBB32s16s6IQI")
HEADER_BYTES: Final = _HEADER.size
DTYPES: Final = ("opaque", "bfloat16", "float16", "float32")


def digest(domain: str, *fields: bytes) -> bytes:
    """SHA-256 over domain-tagged, length-prefixed fields: no two different inputs share a preimage."""
    h = hashlib.sha256()
    for field in (domain.encode(), *fields):
        h.update(len(field).to_bytes(8, "little"))
        h.update(field)
    return h.digest()


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that changes KV bytes (design, section 4). Two workers share blocks only if all of it is equal."""

    weights_digest: str
    tokenizer_revision: str
    architecture: str
    kv_dtype: str
    kv_layout: str
    rope: str
    block_tokens: int
    adapter_digest: str
    numeric_domain: str

    def digest(self) -> bytes:
        fields = [f"{name}={getattr(self, name)}".encode() for name in self.__struct_fields__]
        return digest("deepserve/fingerprint/1", *fields)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32."""
    packed = array("I", tokens)
    if array("I").itemsize != 4:
        raise SettingsError("this platform has no 4-byte unsigned int")
    if struct.pack("=H", 1) != struct.pack("<H", 1):
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """The inverse of `pack_tokens`. Raises ValueError on a length that is no multiple of 4."""
    packed = array("I")
    packed.frombytes(data)
    if struct.pack("=H", 1) != struct.pack("<H", 1):
        packed.byteswap()
    return packed.tolist()


def chain_root(namespace: NamespaceId, fingerprint_digest: bytes) -> bytes:
    """The root of a namespace's chain for one fingerprint: the first of the three places of the namespace."""
    return digest("deepserve/root/1", FORMAT_VERSION.to_bytes(4, "little"), namespace.encode(), fingerprint_digest)


def chain_keys(root: bytes, tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """Keys of all full blocks of `tokens`. About 1 µs a block and 0.1 µs a token: long prompts go to a thread."""
    keys = []
    previous = root
    packed = pack_tokens(tokens)
    width = 4 * block_tokens
    for start in range(0, len(packed) - width + 1, width):
        previous = digest("deepserve/block/1", previous, packed[start : start + width])
        keys.append(previous)
    return keys


class BlockHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first `HEADER_BYTES` of an object. `shape` has at most six dimensions; `checksum` is the CRC-32 of the
    plain payload, `payload_bytes` its size before encryption."""

    key: bytes
    put_id: bytes
    dtype: str
    shape: tuple[int, ...]
    payload_bytes: int
    checksum: int

    def pack(self) -> bytes:
        dims = (*self.shape, *[0] * (6 - len(self.shape)))
        return _HEADER.pack(
            HEADER_MAGIC,
            FORMAT_VERSION,
            DTYPES.index(self.dtype),
            len(self.shape),
            self.key,
            self.put_id,
            *dims,
            self.payload_bytes,
            self.checksum,
        )


def unpack_header(data: bytes | memoryview) -> BlockHeader:
    """Raises BlockMiss(short | foreign | version | corrupt)."""
    if len(data) < HEADER_BYTES:
        raise BlockMiss("short", f"object of {len(data)} bytes has no header")
    magic, version, dtype, ndim, key, put_id, *rest = _HEADER.unpack(data[:HEADER_BYTES])
    dims, payload_bytes, checksum = rest[:6], rest[6], rest[7]
    if magic != HEADER_MAGIC:
        raise BlockMiss("foreign", "not a DeepServe object")
    if version != FORMAT_VERSION:
        raise BlockMiss("version", f"object format {version}, this code reads {FORMAT_VERSION}")
    if dtype >= len(DTYPES) or ndim > 6 or any(dims[ndim:]):
        raise BlockMiss("corrupt", "header fields out of range")
    return BlockHeader(
        key=key,
        put_id=put_id,
        dtype=DTYPES[dtype],
        shape=tuple(dims[:ndim]),
        payload_bytes=payload_bytes,
        checksum=checksum,
    )


def object_name(key: bytes, put_id: bytes) -> str:
    """The put id in the name keeps an evictor from deleting a block that was stored again."""
    return f"{key.hex()}-{put_id.hex()}"


GOLDEN_ROOT: Final = "d341edb1706358c449f7d7e4164b36d22c10d9a449293abebf97301562dc39fd"
GOLDEN_KEYS: Final = (
    "bccda5c86babc9d04fdae597bee672ae5077d811b9343784d0703a3659899bfa",
    "8fa16b464a2e28b9252e0d2379cab738af85a6fa0ec4785dd8916f71125adf92",
)


def check_golden() -> None:
    """Every start computes known keys: a process that hashes otherwise would store blocks that nobody finds.

    Raises SettingsError.
    """
    root = chain_root(NamespaceId("ns_" + "00" * 16), bytes(32))
    keys = chain_keys(root, list(range(129)), 64)
    if root.hex() != GOLDEN_ROOT or tuple(k.hex() for k in keys) != GOLDEN_KEYS:
        raise SettingsError("block keys differ from the golden vectors; do not serve from this build")
