"""The index's one table: a row says that the pool holds a block (invariants 6 and 7, as constraints).

Owned by this service alone. Every query names the namespace; it is the first column of the primary key, so that a row
of one namespace can neither answer for nor collide with a row of another.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
)

from shared.contracts.block import KEY_BYTES, PUT_ID_BYTES

SCHEMA: Final = "cache_index"
METADATA: Final = MetaData(schema=SCHEMA)

BLOCKS: Final = Table(
    "blocks",
    METADATA,
    Column("namespace", Text, nullable=False),
    Column("key", LargeBinary, nullable=False),
    Column("put_id", LargeBinary, nullable=False, comment="names the object: an evictor deletes only this put"),
    Column("position", Integer, nullable=False, comment="index of the block in its chain"),
    Column("object_bytes", BigInteger, nullable=False),
    Column("traffic_class", Text, nullable=False),
    Column("account", Text, nullable=False),
    Column("request", Text, nullable=False, comment="who committed the row: never a hit for the same request"),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("last_used_at", DateTime(timezone=True), nullable=False),
    Column("expires_at", DateTime(timezone=True), nullable=False),
    PrimaryKeyConstraint("namespace", "key", name="blocks_pkey"),
    CheckConstraint("namespace ~ '^ns_[0-9a-f]{32}$'", name="blocks_namespace_form"),
    CheckConstraint(f"octet_length(key) = {KEY_BYTES}", name="blocks_key_bytes"),
    CheckConstraint(f"octet_length(put_id) = {PUT_ID_BYTES}", name="blocks_put_id_bytes"),
    CheckConstraint("position >= 0", name="blocks_position"),
    CheckConstraint("object_bytes > 0", name="blocks_object_bytes"),
    CheckConstraint("traffic_class IN ('agent', 'chat')", name="blocks_traffic_class"),
    CheckConstraint("expires_at > created_at AND last_used_at >= created_at", name="blocks_times"),
    Index("blocks_expires_at", "expires_at"),
)
