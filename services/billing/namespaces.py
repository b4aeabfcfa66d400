"""Namespace keys at rest: random, one for each namespace, wrapped by the master key. Pure; entropy is an argument.

Dropping the row of a wrapped key erases the namespace's cache: nothing else can open its blocks. The namespace is the
associated data, so that a wrapped key copied into another namespace's row does not open.
"""

from __future__ import annotations

from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from shared.contracts.errors import ClaimRefused, InternalError
from shared.contracts.ids import NamespaceId
from shared.contracts.tag import GrantClaims

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
WRAP_VERSION: Final = b"\x01"
WRAPPED_BYTES: Final = len(WRAP_VERSION) + NONCE_BYTES + KEY_BYTES + TAG_BYTES
_DOMAIN: Final = b"deepserve/namespace-key/1\0"


def wrap(master_key: bytes, namespace: NamespaceId, key: bytes, nonce: bytes) -> bytes:
    """version (1) | nonce (12) | AES-256-GCM of `key` (32 + 16). `nonce` must be fresh random bytes."""
    if len(key) != KEY_BYTES or len(nonce) != NONCE_BYTES:
        raise ValueError(f"a namespace key has {KEY_BYTES} bytes and its nonce {NONCE_BYTES}")
    return WRAP_VERSION + nonce + AESGCM(master_key).encrypt(nonce, key, _DOMAIN + namespace.encode())


def unwrap(master_key: bytes, namespace: NamespaceId, wrapped: bytes) -> bytes:
    """Raises InternalError on a row that this master key did not wrap for this namespace."""
    if len(wrapped) != WRAPPED_BYTES or wrapped[:1] != WRAP_VERSION:
        raise InternalError(f"the wrapped key of {namespace} has an unknown form")
    nonce, sealed = wrapped[1 : 1 + NONCE_BYTES], wrapped[1 + NONCE_BYTES :]
    try:
        return AESGCM(master_key).decrypt(nonce, sealed, _DOMAIN + namespace.encode())
    except InvalidTag:
        raise InternalError(f"the master key does not open the key of {namespace}") from None


def check_access(grant: GrantClaims, namespace: NamespaceId) -> None:
    """Raises ClaimRefused unless the grant opens this namespace (invariant 7)."""
    if not grant.cache_read and not grant.cache_write:
        raise ClaimRefused("the grant does not open the pool")
    if namespace != grant.namespace and namespace not in grant.shared:
        raise ClaimRefused("the grant does not name this namespace")
