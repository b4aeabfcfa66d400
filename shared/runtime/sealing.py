"""Sealed data: AES-256-GCM under a key that services share, bound to a purpose.

A sealed text is: version (1 byte) | salt (16) | nonce (12) | ciphertext and tag. Every text is encrypted under a key of
its own, derived from the shared key, the purpose and the salt: random nonces under one key would be used up after 2^32
messages, which a busy cluster sends in weeks. What was sealed for one purpose does not open for another.
"""

from __future__ import annotations

import hmac
import os
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from shared.contracts.errors import InternalError

VERSION: Final = 1
_SALT_BYTES: Final = 16
_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16
_HEAD_BYTES: Final = 1 + _SALT_BYTES + _NONCE_BYTES
SEAL_BYTES: Final = _HEAD_BYTES + _TAG_BYTES
"""By how much a sealed text is longer than the plain one."""


def seal(key: bytes, purpose: str, data: bytes) -> bytes:
    """`data` so that only who has `key` (32 bytes) can read it, and nobody can change it unseen."""
    return seal_with(key, purpose, data, os.urandom(_SALT_BYTES + _NONCE_BYTES))


def seal_with(key: bytes, purpose: str, data: bytes, entropy: bytes) -> bytes:
    """As `seal`, with the 28 bytes of entropy given: they must never be used twice."""
    salt, nonce = entropy[:_SALT_BYTES], entropy[_SALT_BYTES:]
    if len(nonce) != _NONCE_BYTES:
        raise ValueError(f"sealing needs {_SALT_BYTES + _NONCE_BYTES} bytes of entropy, got {len(entropy)}")
    head = bytes([VERSION]) + entropy
    return head + AESGCM(_derive(key, purpose, salt)).encrypt(nonce, data, head)


def open_sealed(key: bytes, purpose: str, sealed: bytes) -> bytes:
    """The plain data. Raises InternalError when it was not sealed with this key for this purpose, or was changed."""
    if len(sealed) < SEAL_BYTES or sealed[0] != VERSION:
        raise InternalError(f"not a sealed text of version {VERSION}: {len(sealed)} bytes")
    head = sealed[:_HEAD_BYTES]
    salt, nonce = head[1 : 1 + _SALT_BYTES], head[1 + _SALT_BYTES :]
    try:
        return AESGCM(_derive(key, purpose, salt)).decrypt(nonce, memoryview(sealed)[_HEAD_BYTES:], head)
    except InvalidTag as error:
        raise InternalError(f"sealed text for {purpose!r} does not open: another key or purpose, or damage") from error


def _derive(key: bytes, purpose: str, salt: bytes) -> bytes:
    if len(key) != 32:
        raise ValueError(f"a sealing key has 32 bytes, got {len(key)}")
    name = purpose.encode()
    return hmac.digest(key, b"deepserve/seal/1" + len(name).to_bytes(4, "little") + name + salt, "sha256")
