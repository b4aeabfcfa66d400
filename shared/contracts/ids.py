"""Typed identifiers. Owns their form; randomness comes in as an argument, so that a simulation can seed it."""

from __future__ import annotations

import hashlib
from typing import NewType

RequestId = NewType("RequestId", str)
"""UUID text, made once at the gateway; also the id of the completion that the client sees."""
AccountId = NewType("AccountId", str)
KeyId = NewType("KeyId", str)
HoldId = NewType("HoldId", str)
TagId = NewType("TagId", str)
GrantId = NewType("GrantId", str)
NamespaceId = NewType("NamespaceId", str)
"""`ns_` and 32 hexadecimal digits: 16 bytes."""
WorkerId = NewType("WorkerId", str)
GatewayId = NewType("GatewayId", str)

NAMESPACE_PREFIX = "ns_"


def prefixed(prefix: str, entropy: bytes) -> str:
    """`prefix` and the hexadecimal of 16 bytes of `entropy`."""
    if len(entropy) != 16:
        raise ValueError(f"an id needs 16 bytes of entropy, got {len(entropy)}")
    return f"{prefix}{entropy.hex()}"


def sub_namespace(namespace: NamespaceId, user_id: str | None) -> NamespaceId:
    """The namespace of one `user_id` inside an account's namespace (design, section 3).

    A request body can split a namespace and never name one: the account's namespace is always hashed in.
    """
    if user_id is None:
        return namespace
    digest = hashlib.sha256(b"deepserve/user-namespace/1\0" + namespace.encode() + b"\0" + user_id.encode()).digest()
    return NamespaceId(prefixed(NAMESPACE_PREFIX, digest[:16]))
