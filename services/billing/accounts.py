"""Accounts and API keys as values. Pure: entropy comes in as an argument, rows are the repository's."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from services.billing.ledger import Funds
from shared.contracts import limits
from shared.contracts.errors import AuthenticationFailed, InvalidRequest
from shared.contracts.ids import NAMESPACE_PREFIX, AccountId, KeyId, NamespaceId, prefixed
from shared.contracts.tag import TrafficClass

CURRENCIES: Final = ("USD", "CNY")
"""The two that DeepSeek's /user/balance knows (reference, row 8)."""
API_KEY_PREFIX: Final = "sk-"
HINT_CHARS: Final = 4
ENTROPY_BYTES: Final = 16


@dataclass(frozen=True)
class Account:
    """`concurrency`: requests that it may have under way at once, over all its keys."""

    id: AccountId
    name: str
    currency: str
    namespace: NamespaceId
    concurrency: int
    created_at: datetime


@dataclass(frozen=True)
class ApiKey:
    """A key as billing keeps it: its digest and its last characters, never the key."""

    id: KeyId
    account: AccountId
    digest: bytes
    hint: str
    traffic_class: TrafficClass | None
    created_at: datetime
    revoked_at: datetime | None


@dataclass(frozen=True)
class Standing:
    """What decides the rights of a request: the account, the key it came with, and the money at this moment.

    `topped_up_ever`: the customer has paid money in, now or before, and not only been granted some.
    """

    account: AccountId
    key_id: KeyId
    key_hint: str
    currency: str
    namespace: NamespaceId
    concurrency: int
    traffic_class: TrafficClass | None
    revoked: bool
    funds: Funds
    topped_up_ever: bool

    @property
    def paid(self) -> bool:
        """Opens the pool (design, section 3)."""
        return self.topped_up_ever and self.funds.total_nano > 0


def new_account(name: str, currency: str, concurrency: int, entropy: bytes, now: datetime) -> Account:
    """`entropy`: twice `ENTROPY_BYTES`. Raises InvalidRequest on a name or currency that cannot be."""
    if not name.strip() or len(name) > limits.ACCOUNT_NAME_CHARS_MAX or not name.isprintable():
        raise InvalidRequest(f"a name has 1 to {limits.ACCOUNT_NAME_CHARS_MAX} printable characters")
    if currency not in CURRENCIES:
        raise InvalidRequest(f"the currency is one of {', '.join(CURRENCIES)}, not {currency}")
    if concurrency < 1:
        raise InvalidRequest("the concurrency is at least 1")
    return Account(
        id=AccountId(prefixed("acct_", entropy[:ENTROPY_BYTES])),
        name=name,
        currency=currency,
        namespace=NamespaceId(prefixed(NAMESPACE_PREFIX, entropy[ENTROPY_BYTES:])),
        concurrency=concurrency,
        created_at=now,
    )


def new_api_key(
    account: AccountId, traffic_class: TrafficClass | None, entropy: bytes, now: datetime
) -> tuple[str, ApiKey]:
    """(the key, shown once; what is kept of it). `entropy`: three times `ENTROPY_BYTES`, of which 256 bits secret."""
    key_id = KeyId(prefixed("key_", entropy[:ENTROPY_BYTES]))
    secret = API_KEY_PREFIX + entropy[ENTROPY_BYTES : 3 * ENTROPY_BYTES].hex()
    kept = ApiKey(
        id=key_id,
        account=account,
        digest=key_digest(secret),
        hint=secret[-HINT_CHARS:],
        traffic_class=traffic_class,
        created_at=now,
        revoked_at=None,
    )
    return secret, kept


def key_digest(secret: str) -> bytes:
    """As the gateway computes it. Plain SHA-256 is enough for 256 random bits; no salt, no work factor."""
    return hashlib.sha256(secret.encode()).digest()


def refusal(key_hint: str) -> AuthenticationFailed:
    """DeepSeek's 401, word by word (reference, row 54). The hint is the client's text: only its last characters."""
    hint = "".join(char for char in key_hint[-HINT_CHARS:] if char.isprintable())
    return AuthenticationFailed(f"Authentication Fails, Your api key: ****{hint} is invalid")


def moment(now_s: float) -> datetime:
    """Seconds since the epoch as the database keeps a moment."""
    return datetime.fromtimestamp(now_s, UTC)
