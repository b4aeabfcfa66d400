"""Rights from an account's standing, keys and namespaces; expected values by hand."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import UTC, datetime

import msgspec
import pytest

from services.billing import accounts, namespaces, tags
from services.billing.accounts import Standing
from services.billing.ledger import Funds
from services.billing.tags import TagPolicy
from shared.contracts.errors import ClaimRefused, InternalError, InvalidRequest
from shared.contracts.ids import AccountId, HoldId, KeyId, NamespaceId, RequestId
from shared.contracts.messages import Hold
from shared.contracts.tag import Retention, TagClaims

NOW_S = 1_800_000_000.0
OWN = NamespaceId("ns_" + "ab" * 16)
SHARED = (NamespaceId("ns_" + "cd" * 16),)
STANDING = Standing(
    account=AccountId("acct_1"),
    key_id=KeyId("key_1"),
    key_hint="abcd",
    currency="USD",
    namespace=OWN,
    concurrency=7,
    traffic_class=None,
    revoked=False,
    funds=Funds(granted_nano=0, topped_up_nano=5),
    topped_up_ever=True,
)
POLICY = TagPolicy(tag_ttl_s=60, retention=Retention(agent_s=259_200, chat_s=604_800), shared=SHARED)
TRIAL = replace(STANDING, funds=Funds(granted_nano=5, topped_up_nano=0), topped_up_ever=False)
HOLD = Hold(
    tag="",
    request=RequestId("r1"),
    model="m",
    user_id=None,
    traffic_class="agent",
    prompt_tokens=100,
    max_output_tokens=50,
    deadline_s=NOW_S + 600,
)


@pytest.mark.parametrize(
    ("granted", "topped_up", "ever", "paid"),
    [(0, 5, True, True), (5, 0, False, False), (5, 0, True, True), (0, 0, True, False), (0, 0, False, False)],
)
def test_paid_is_topped_up_ever_and_a_positive_balance(granted: int, topped_up: int, ever: bool, paid: bool) -> None:
    standing = replace(STANDING, funds=Funds(granted, topped_up), topped_up_ever=ever)
    tag = tags.tag_claims(standing, POLICY, price_version=3, entropy=bytes(16), now_s=NOW_S)
    assert (tag.paid, tag.cache_read, tag.cache_write) == (paid, paid, paid)
    assert tag.shared == (SHARED if paid else ())


def test_a_tag_lives_a_minute_and_carries_the_account() -> None:
    tag = tags.tag_claims(STANDING, POLICY, price_version=3, entropy=bytes(16), now_s=NOW_S)
    assert (tag.issued_at_s, tag.expires_at_s) == (NOW_S, NOW_S + 60)
    assert (tag.account, tag.key_id, tag.namespace, tag.concurrency) == ("acct_1", "key_1", OWN, 7)
    assert (tag.retention.agent_s, tag.retention.chat_s) == (3 * 86_400, 7 * 86_400)
    assert tag.price_version == 3


def test_a_grant_bounds_its_request() -> None:
    grant = tags.grant_claims(HOLD, STANDING, POLICY, hold_id=HoldId("h"), entropy=bytes(range(16)), now_s=NOW_S)
    assert (grant.request, grant.hold, grant.model) == ("r1", "h", "m")
    assert (grant.prompt_tokens, grant.max_output_tokens, grant.deadline_s) == (100, 50, NOW_S + 600)
    assert (grant.traffic_class, grant.retention_s) == ("agent", 259_200)
    assert (grant.cache_read, grant.cache_write, grant.namespace, grant.shared) == (True, True, OWN, SHARED)
    chat = msgspec.structs.replace(HOLD, traffic_class="chat")
    grant = tags.grant_claims(chat, STANDING, POLICY, hold_id=HoldId("h"), entropy=bytes(16), now_s=NOW_S)
    assert grant.retention_s == 604_800


def test_a_trial_grant_closes_the_pool() -> None:
    grant = tags.grant_claims(HOLD, TRIAL, POLICY, hold_id=HoldId("h"), entropy=bytes(16), now_s=NOW_S)
    assert (grant.cache_read, grant.cache_write, grant.shared) == (False, False, ())


@pytest.mark.parametrize(("granted", "topped_up", "funded"), [(0, 0, False), (0, 1, True), (1, 0, True)])
def test_a_tag_says_whether_there_is_anything_to_spend(granted: int, topped_up: int, funded: bool) -> None:
    standing = replace(STANDING, funds=Funds(granted, topped_up))
    tag = tags.tag_claims(standing, POLICY, price_version=3, entropy=bytes(16), now_s=NOW_S)
    assert tag.funded is funded


def test_a_tag_of_before_that_field_counts_as_funded() -> None:
    tag = tags.tag_claims(STANDING, POLICY, price_version=3, entropy=bytes(16), now_s=NOW_S)
    fields = {name: value for name, value in msgspec.to_builtins(tag).items() if name != "funded"}
    assert msgspec.convert(fields, TagClaims).funded


def test_user_id_splits_the_namespace_and_cannot_name_one() -> None:
    named = msgspec.structs.replace(HOLD, user_id="ns_" + "cd" * 16)
    grant = tags.grant_claims(named, STANDING, POLICY, hold_id=HoldId("h"), entropy=bytes(16), now_s=NOW_S)
    expected = hashlib.sha256(b"deepserve/user-namespace/1\0" + OWN.encode() + b"\0ns_" + b"cd" * 16).hexdigest()
    assert grant.namespace == "ns_" + expected[:32]


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_tokens": 0},
        {"prompt_tokens": 2**31},
        {"max_output_tokens": 0},
        {"user_id": "ü" * 257},
        {"deadline_s": NOW_S - 6},
        {"deadline_s": NOW_S + 86_406},
        {"deadline_s": float("nan")},
    ],
)
def test_holds_that_no_request_means_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        tags.check_hold(msgspec.structs.replace(HOLD, **change), NOW_S)


def test_a_plain_hold_passes() -> None:
    tags.check_hold(msgspec.structs.replace(HOLD, user_id="ü" * 256), NOW_S)


def test_an_api_key_is_shown_once_and_kept_as_its_digest() -> None:
    entropy = bytes(range(48))
    secret, kept = accounts.new_api_key(AccountId("acct_1"), "chat", entropy, datetime.now(UTC))
    assert secret == "sk-" + bytes(range(16, 48)).hex()
    assert kept.digest == hashlib.sha256(secret.encode()).digest()
    assert (kept.hint, kept.id) == ("2e2f", "key_" + bytes(range(16)).hex())
    assert secret[3:20] not in repr(kept)


def test_an_account_has_a_namespace_of_its_own() -> None:
    account = accounts.new_account("Acme", "CNY", 500, bytes(range(32)), datetime.now(UTC))
    assert account.id == "acct_000102030405060708090a0b0c0d0e0f"
    assert account.namespace == "ns_101112131415161718191a1b1c1d1e1f"


@pytest.mark.parametrize(
    ("name", "currency", "concurrency"),
    [("", "USD", 1), ("  ", "USD", 1), ("a\nb", "USD", 1), ("x" * 201, "USD", 1), ("a", "EUR", 1), ("a", "USD", 0)],
)
def test_accounts_that_cannot_be_are_refused(name: str, currency: str, concurrency: int) -> None:
    with pytest.raises(InvalidRequest):
        accounts.new_account(name, currency, concurrency, bytes(32), datetime.now(UTC))


def test_the_401_is_deepseeks_word_by_word() -> None:
    error = accounts.refusal("abcd")
    assert error.message == "Authentication Fails, Your api key: ****abcd is invalid"
    assert error.status == 401
    assert accounts.refusal("sk-secret-abcd").message.count("secret") == 0


def test_a_namespace_key_opens_for_its_namespace_and_master_key_alone() -> None:
    master, key, nonce = bytes(range(32)), bytes(range(100, 132)), bytes(12)
    wrapped = namespaces.wrap(master, OWN, key, nonce)
    assert key not in wrapped
    assert namespaces.unwrap(master, OWN, wrapped) == key
    for broken in (
        (master, SHARED[0], wrapped),
        (bytes(32), OWN, wrapped),
        (master, OWN, wrapped[:-1]),
        (master, OWN, b"\x02" + wrapped[1:]),
        (master, OWN, wrapped[:-1] + bytes([wrapped[-1] ^ 1])),
    ):
        with pytest.raises(InternalError):
            namespaces.unwrap(*broken)


def test_a_grant_opens_its_own_and_shared_namespaces_only() -> None:
    grant = tags.grant_claims(HOLD, STANDING, POLICY, hold_id=HoldId("h"), entropy=bytes(16), now_s=NOW_S)
    namespaces.check_access(grant, OWN)
    namespaces.check_access(grant, SHARED[0])
    with pytest.raises(ClaimRefused):
        namespaces.check_access(grant, NamespaceId("ns_" + "ef" * 16))
    trial = tags.grant_claims(HOLD, TRIAL, POLICY, hold_id=HoldId("h"), entropy=bytes(16), now_s=NOW_S)
    with pytest.raises(ClaimRefused):
        namespaces.check_access(trial, OWN)
