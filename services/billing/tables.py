"""The books' tables, schema `billing` (invariants 1, 2, 4, 8 and 9, as constraints; triggers are in `schema.py`).

Amounts are BIGINT nano-units: 9.2 billion units, of which `limits.AMOUNT_NANO_MAX` lets a ninth be used. What has
happened is never changed: journal, entries, usage, prices and ledger accounts refuse UPDATE and DELETE. What changes
is a balance (only by entries) and a hold's state (only from pending to its one end).

    accounts ─┬─ api_keys          ledger_accounts ── balances      one row each, moved by entries
              ├─ namespaces               │
              ├─ holds ── usage           │
              └─ journal ────────────── entries                     an act, and the amounts that it moves
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from services.billing.accounts import CURRENCIES
from services.billing.ledger import ENDS, Act, Ledger
from services.billing.namespaces import WRAPPED_BYTES
from shared.contracts import limits
from shared.contracts.lifecycle import HoldState

SCHEMA: Final = "billing"
METADATA: Final = MetaData(schema=SCHEMA)
HASH_BYTES: Final = 32


def _one_of(column: str, values: tuple[str, ...]) -> str:
    quoted = ", ".join(f"'{value}'" for value in values)
    return f"{column} IN ({quoted})"


_LEDGERS: Final = tuple(ledger.value for ledger in Ledger)
_ENDS: Final = _one_of("act", tuple(act.value for act in ENDS))
_CLASSES: Final = "('agent', 'chat')"


ACCOUNTS: Final = Table(
    "accounts",
    METADATA,
    Column("id", Text, primary_key=True),
    Column("number", BigInteger, Identity(always=True), nullable=False, comment="order of creation"),
    Column("name", Text, nullable=False),
    Column("currency", Text, nullable=False),
    Column("namespace", Text, nullable=False, comment="random; the root of the account's key chains"),
    Column("concurrency", Integer, nullable=False, comment="requests under way at once, over all keys"),
    Column("created_at", DateTime(timezone=True), nullable=False),
    UniqueConstraint("number", name="accounts_number"),
    UniqueConstraint("namespace", name="accounts_namespace"),
    CheckConstraint(_one_of("currency", CURRENCIES), name="accounts_currency"),
    CheckConstraint("namespace ~ '^ns_[0-9a-f]{32}$'", name="accounts_namespace_form"),
    CheckConstraint("concurrency > 0", name="accounts_concurrency"),
)

API_KEYS: Final = Table(
    "api_keys",
    METADATA,
    Column("id", Text, primary_key=True),
    Column("account", Text, ForeignKey(ACCOUNTS.c.id), nullable=False),
    Column("digest", LargeBinary, nullable=False, comment="SHA-256 of the key; the key is nowhere"),
    Column("hint", Text, nullable=False, comment="the key's last characters"),
    Column("traffic_class", Text, comment="null: each request decides"),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("revoked_at", DateTime(timezone=True)),
    UniqueConstraint("digest", name="api_keys_digest"),
    CheckConstraint(f"octet_length(digest) = {HASH_BYTES}", name="api_keys_digest_bytes"),
    CheckConstraint(f"traffic_class IN {_CLASSES}", name="api_keys_traffic_class"),
    Index("api_keys_account", "account"),
)

LEDGER_ACCOUNTS: Final = Table(
    "ledger_accounts",
    METADATA,
    Column("account", Text, ForeignKey(ACCOUNTS.c.id), nullable=False),
    Column("ledger", Text, nullable=False),
    PrimaryKeyConstraint("account", "ledger", name="ledger_accounts_pkey"),
    CheckConstraint(_one_of("ledger", _LEDGERS), name="ledger_accounts_ledger"),
)

BALANCES: Final = Table(
    "balances",
    METADATA,
    Column("account", Text, nullable=False),
    Column("ledger", Text, nullable=False),
    Column("balance_nano", BigInteger, nullable=False, comment="credits less debits of its entries"),
    Column("floor_nano", BigInteger, comment="null: may go below zero without limit"),
    PrimaryKeyConstraint("account", "ledger", name="balances_pkey"),
    ForeignKeyConstraint(
        ["account", "ledger"], [LEDGER_ACCOUNTS.c.account, LEDGER_ACCOUNTS.c.ledger], name="balances_ledger_account"
    ),
    CheckConstraint("balance_nano >= floor_nano", name="balances_floor"),
)

HOLDS: Final = Table(
    "holds",
    METADATA,
    Column("id", Text, primary_key=True),
    Column("request", Text, nullable=False),
    Column("account", Text, ForeignKey(ACCOUNTS.c.id), nullable=False),
    Column("key_id", Text, ForeignKey(API_KEYS.c.id), nullable=False),
    Column("model", Text, nullable=False),
    Column("prompt_tokens", Integer, nullable=False),
    Column("max_output_tokens", Integer, nullable=False),
    Column("amount_nano", BigInteger, nullable=False),
    Column("granted_nano", BigInteger, nullable=False, comment="the part taken from granted money"),
    Column("topped_up_nano", BigInteger, nullable=False, comment="the part taken from topped-up money"),
    Column("price_version", Integer, nullable=False),
    Column("price_hit", Numeric(20, 9), nullable=False, comment="prices as they were at the hold"),
    Column("price_miss", Numeric(20, 9), nullable=False),
    Column("price_output", Numeric(20, 9), nullable=False),
    Column("claims", JSONB, nullable=False, comment="the grant's claims: a repeated hold gets the same grant"),
    Column("input_hash", LargeBinary, nullable=False),
    Column("deadline", DateTime(timezone=True), nullable=False),
    Column("state", Text, nullable=False, server_default=HoldState.PENDING.value),
    Column("created_at", DateTime(timezone=True), nullable=False),
    UniqueConstraint("request", name="holds_request"),
    UniqueConstraint("id", "account", "prompt_tokens", "amount_nano", name="holds_bounds"),
    CheckConstraint("prompt_tokens > 0 AND max_output_tokens > 0", name="holds_tokens"),
    CheckConstraint(
        "granted_nano >= 0 AND topped_up_nano >= 0 AND granted_nano + topped_up_nano = amount_nano", name="holds_amount"
    ),
    CheckConstraint(_one_of("state", tuple(state.value for state in HoldState)), name="holds_state"),
    CheckConstraint(f"octet_length(input_hash) = {HASH_BYTES}", name="holds_input_hash_bytes"),
    Index("holds_due", "deadline", postgresql_where=text("state = 'pending'")),
    Index("holds_account_pending", "account", postgresql_where=text("state = 'pending'")),
)

JOURNAL: Final = Table(
    "journal",
    METADATA,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("act", Text, nullable=False),
    Column("account", Text, ForeignKey(ACCOUNTS.c.id), nullable=False),
    Column("hold", Text, ForeignKey(HOLDS.c.id)),
    Column("request", Text),
    Column("amount_nano", BigInteger, nullable=False, comment="what the act is about; a settlement: the cost"),
    Column("idempotency_key", Text, nullable=False),
    Column("input_hash", LargeBinary, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    UniqueConstraint("idempotency_key", name="journal_idempotency_key"),
    UniqueConstraint("id", "account", name="journal_of_account"),
    CheckConstraint(_one_of("act", tuple(act.value for act in Act)), name="journal_act"),
    CheckConstraint(f"amount_nano BETWEEN 0 AND {limits.AMOUNT_NANO_MAX}", name="journal_amount"),
    CheckConstraint(
        "(act IN ('topped_up', 'granted')) = (hold IS NULL) AND (hold IS NULL) = (request IS NULL)", name="journal_hold"
    ),
    CheckConstraint(f"octet_length(input_hash) = {HASH_BYTES}", name="journal_input_hash_bytes"),
    Index("journal_one_start", "hold", unique=True, postgresql_where=text("act = 'hold'")),
    Index("journal_one_end", "hold", unique=True, postgresql_where=text(_ENDS)),
    Index("journal_one_late_usage", "hold", unique=True, postgresql_where=text("act = 'late_usage'")),
    Index("journal_account", "account", "id"),
)

ENTRIES: Final = Table(
    "entries",
    METADATA,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("journal", BigInteger, nullable=False),
    Column("account", Text, nullable=False),
    Column("debit", Text, nullable=False),
    Column("credit", Text, nullable=False),
    Column("amount_nano", BigInteger, nullable=False),
    ForeignKeyConstraint(["journal", "account"], [JOURNAL.c.id, JOURNAL.c.account], name="entries_journal"),
    ForeignKeyConstraint(
        ["account", "debit"], [LEDGER_ACCOUNTS.c.account, LEDGER_ACCOUNTS.c.ledger], name="entries_debit"
    ),
    ForeignKeyConstraint(
        ["account", "credit"], [LEDGER_ACCOUNTS.c.account, LEDGER_ACCOUNTS.c.ledger], name="entries_credit"
    ),
    CheckConstraint("amount_nano > 0", name="entries_amount"),
    CheckConstraint("debit <> credit", name="entries_between_two"),
    Index("entries_by_journal", "journal"),
    Index("entries_account", "account", "id"),
)

USAGE: Final = Table(
    "usage",
    METADATA,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("request", Text, nullable=False),
    Column("hold", Text, nullable=False),
    Column("account", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("prompt_tokens", Integer, nullable=False),
    Column("cached", Integer, nullable=False),
    Column("uncached", Integer, nullable=False),
    Column("not_eligible", Integer, nullable=False),
    Column("output", Integer, nullable=False),
    Column("reasoning", Integer, nullable=False, comment="of the output"),
    Column("amount_nano", BigInteger, nullable=False),
    Column("hold_nano", BigInteger, nullable=False),
    Column("price_version", Integer, nullable=False),
    Column("worker", Text, nullable=False),
    Column("attempt", Integer, nullable=False, comment="with stage and delivery: the epoch that was settled"),
    Column("stage", SmallInteger, nullable=False),
    Column("delivery", Integer, nullable=False),
    Column("device_s", Double, nullable=False, comment="busy seconds of the device"),
    Column("late", Boolean, nullable=False, comment="arrived after its hold had expired"),
    Column("input_hash", LargeBinary, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    UniqueConstraint("request", name="usage_request"),
    UniqueConstraint("hold", name="usage_hold"),
    # The classes sum to the prompt that was held, and the cost stays within the hold: not only by the code's word.
    ForeignKeyConstraint(
        ["hold", "account", "prompt_tokens", "hold_nano"],
        [HOLDS.c.id, HOLDS.c.account, HOLDS.c.prompt_tokens, HOLDS.c.amount_nano],
        name="usage_of_hold",
    ),
    CheckConstraint("cached + uncached + not_eligible = prompt_tokens", name="usage_classes"),
    CheckConstraint("least(cached, uncached, not_eligible, output, reasoning) >= 0", name="usage_counts"),
    CheckConstraint("reasoning <= output", name="usage_reasoning"),
    CheckConstraint("amount_nano BETWEEN 0 AND hold_nano", name="usage_within_hold"),
    CheckConstraint("attempt > 0 AND delivery > 0 AND stage IN (0, 1)", name="usage_epoch"),
    CheckConstraint("device_s >= 0 AND device_s < 'Infinity'", name="usage_device"),
    CheckConstraint(f"octet_length(input_hash) = {HASH_BYTES}", name="usage_input_hash_bytes"),
    Index("usage_account", "account", "id"),
)

PRICES: Final = Table(
    "prices",
    METADATA,
    Column("version", Integer, nullable=False, comment="of the whole price list"),
    Column("model", Text, nullable=False),
    Column("currency", Text, nullable=False),
    Column("hit", Numeric(20, 9), nullable=False, comment="units per million tokens"),
    Column("miss", Numeric(20, 9), nullable=False),
    Column("output", Numeric(20, 9), nullable=False),
    Column("valid_from", DateTime(timezone=True), nullable=False),
    PrimaryKeyConstraint("version", "model", "currency", name="prices_pkey"),
    CheckConstraint("version > 0", name="prices_version"),
    CheckConstraint(_one_of("currency", CURRENCIES), name="prices_currency"),
    CheckConstraint(
        f"0 <= hit AND hit <= miss AND miss <= {limits.PRICE_MAX} AND output BETWEEN 0 AND {limits.PRICE_MAX}",
        name="prices_bounds",
    ),
)

NAMESPACES: Final = Table(
    "namespaces",
    METADATA,
    Column("namespace", Text, primary_key=True, comment="an account's, or one split from it by user_id"),
    Column("account", Text, ForeignKey(ACCOUNTS.c.id), nullable=False),
    Column("wrapped_key", LargeBinary, nullable=False, comment="dropping the row erases the namespace's cache"),
    Column("created_at", DateTime(timezone=True), nullable=False),
    CheckConstraint("namespace ~ '^ns_[0-9a-f]{32}$'", name="namespaces_namespace_form"),
    CheckConstraint(f"octet_length(wrapped_key) = {WRAPPED_BYTES}", name="namespaces_wrapped_bytes"),
    Index("namespaces_account", "account"),
)

IDEMPOTENCY: Final = Table(
    "idempotency",
    METADATA,
    Column("key", Text, primary_key=True, comment="the administrator's Idempotency-Key"),
    Column("input_hash", LargeBinary, nullable=False),
    Column("reply", JSONB, nullable=False, comment="given again to the same input; other input is refused"),
    Column("created_at", DateTime(timezone=True), nullable=False),
    CheckConstraint(f"octet_length(input_hash) = {HASH_BYTES}", name="idempotency_input_hash_bytes"),
)
