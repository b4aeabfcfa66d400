"""Claims of tags and grants from an account's standing. Pure; signing lives in the runtime."""

from __future__ import annotations

from dataclasses import dataclass

from services.billing.accounts import Standing
from shared.contracts import limits
from shared.contracts.errors import InvalidRequest
from shared.contracts.ids import GrantId, HoldId, NamespaceId, TagId, prefixed, sub_namespace
from shared.contracts.messages import Hold
from shared.contracts.tag import GrantClaims, Retention, TagClaims


@dataclass(frozen=True)
class TagPolicy:
    """What the operator decides for all accounts. `shared`: namespaces that every paying account may read."""

    tag_ttl_s: float
    retention: Retention
    shared: tuple[NamespaceId, ...] = ()


def tag_claims(standing: Standing, policy: TagPolicy, *, price_version: int, entropy: bytes, now_s: float) -> TagClaims:
    """Who may be admitted for the next `tag_ttl_s`. A trial account's tag closes the pool, both ways."""
    paid = standing.paid
    return TagClaims(
        tag_id=TagId(prefixed("tag_", entropy)),
        account=standing.account,
        key_id=standing.key_id,
        paid=paid,
        namespace=standing.namespace,
        shared=policy.shared if paid else (),
        cache_read=paid,
        cache_write=paid,
        retention=policy.retention,
        traffic_class=standing.traffic_class,
        concurrency=standing.concurrency,
        price_version=price_version,
        issued_at_s=now_s,
        expires_at_s=now_s + policy.tag_ttl_s,
        funded=standing.funds.total_nano > 0,
    )


def check_hold(hold: Hold, now_s: float) -> None:
    """Raises InvalidRequest on a hold that no request can mean."""
    for name, value in (("request", hold.request), ("model", hold.model)):
        if not 1 <= len(value) <= limits.NAME_CHARS_MAX or not value.isprintable():
            raise InvalidRequest(f"the {name} has 1 to {limits.NAME_CHARS_MAX} printable characters")
    if not 1 <= hold.prompt_tokens <= limits.TOKENS_MAX:
        raise InvalidRequest(f"a prompt of {hold.prompt_tokens} tokens")
    if not 1 <= hold.max_output_tokens <= limits.TOKENS_MAX:
        raise InvalidRequest(f"an answer of at most {hold.max_output_tokens} tokens")
    if hold.user_id is not None and len(hold.user_id.encode()) > limits.USER_ID_BYTES_MAX:
        raise InvalidRequest(f"user_id is longer than {limits.USER_ID_BYTES_MAX} bytes")
    latest_s = now_s + limits.HOLD_DEADLINE_MAX_S + limits.CLOCK_SKEW_S
    if not now_s - limits.CLOCK_SKEW_S < hold.deadline_s <= latest_s:
        raise InvalidRequest(f"the deadline is not within the next {limits.HOLD_DEADLINE_MAX_S} s")


def grant_claims(
    hold: Hold, standing: Standing, policy: TagPolicy, *, hold_id: HoldId, entropy: bytes, now_s: float
) -> GrantClaims:
    """What this one request may do. The rights are those of the standing at the hold, which is newer than the tag's.

    `user_id` splits the account's namespace; it can never name another one.
    """
    paid = standing.paid
    return GrantClaims(
        grant_id=GrantId(prefixed("grant_", entropy)),
        request=hold.request,
        hold=hold_id,
        account=standing.account,
        key_id=standing.key_id,
        model=hold.model,
        namespace=sub_namespace(standing.namespace, hold.user_id),
        shared=policy.shared if paid else (),
        cache_read=paid,
        cache_write=paid,
        traffic_class=hold.traffic_class,
        retention_s=policy.retention.of(hold.traffic_class),
        prompt_tokens=hold.prompt_tokens,
        max_output_tokens=hold.max_output_tokens,
        issued_at_s=now_s,
        deadline_s=hold.deadline_s,
    )
