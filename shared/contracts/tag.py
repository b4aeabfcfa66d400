"""Claims of the tag and of the grant (design, section 3). Signing and checking signatures live in runtime/signing."""

from __future__ import annotations

from typing import Literal

import msgspec

from shared.contracts.ids import AccountId, GrantId, HoldId, KeyId, NamespaceId, RequestId, TagId

TrafficClass = Literal["agent", "chat"]


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """How long a block is kept after its last use, in seconds."""

    agent_s: int
    chat_s: int

    def of(self, traffic_class: TrafficClass) -> int:
        return self.agent_s if traffic_class == "agent" else self.chat_s


class TagClaims(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="tag/1"):
    """Who may be admitted. Lives about a minute (limits.TAG_TTL_S); the gateway renews it."""

    tag_id: TagId
    account: AccountId
    key_id: KeyId
    paid: bool
    namespace: NamespaceId
    shared: tuple[NamespaceId, ...]
    cache_read: bool
    cache_write: bool
    retention: Retention
    traffic_class: TrafficClass | None
    """The API key's setting; None lets each request decide."""
    concurrency: int
    """Requests that the account may have under way at once, over all keys."""
    price_version: int
    issued_at_s: float
    expires_at_s: float
    funded: bool = True
    """False: there is nothing to spend, not even a trial's grant. Such a request is refused before any work on it, and
    such a tag is not kept, so that a top-up counts at once."""


class GrantClaims(msgspec.Struct, frozen=True, kw_only=True, tag="grant/1"):
    """What this one request may do. Outlives the tag: valid until `deadline_s` plus the settlement allowance."""

    grant_id: GrantId
    request: RequestId
    hold: HoldId
    account: AccountId
    key_id: KeyId
    model: str
    namespace: NamespaceId
    """Already split by `user_id`: the only namespace that this request writes."""
    shared: tuple[NamespaceId, ...]
    cache_read: bool
    cache_write: bool
    traffic_class: TrafficClass
    retention_s: int
    prompt_tokens: int
    max_output_tokens: int
    issued_at_s: float
    deadline_s: float


def pool_open(grant: GrantClaims) -> bool:
    """Whether this request's prompt tokens can be hits or misses at all (else they are not eligible)."""
    return grant.cache_read
