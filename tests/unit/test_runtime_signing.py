"""Statements: billing's word and nobody else's, of one kind, until its end or its revocation.

The expected texts are put together here, with another library's Ed25519.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shared.contracts import limits
from shared.contracts.errors import AuthenticationFailed, ClaimRefused
from shared.contracts.messages import Revoked
from shared.contracts.tag import GrantClaims, TagClaims
from shared.runtime.signing import Revocations, Verifier, sign, verify

SEED = bytes(range(32))
PRIVATE = Ed25519PrivateKey.from_private_bytes(SEED)
VERIFY_KEY = PRIVATE.public_key().public_bytes_raw()
DATA = Path(__file__).parents[1] / "data"
NOW_S = 1_800_000_000.0

TAG_FIELDS: dict[str, Any] = {
    "type": "tag/1",
    "tag_id": "tag_1",
    "account": "acc_1",
    "key_id": "key_1",
    "paid": True,
    "namespace": "ns_" + "0" * 32,
    "shared": [],
    "cache_read": True,
    "cache_write": True,
    "retention": {"agent_s": 259200, "chat_s": 604800},
    "traffic_class": None,
    "concurrency": 500,
    "price_version": 1,
    "issued_at_s": NOW_S,
    "expires_at_s": NOW_S + 60,
}
GRANT_FIELDS: dict[str, Any] = {
    "type": "grant/1",
    "grant_id": "grant_1",
    "request": "11111111-2222-3333-4444-555555555555",
    "hold": "hold_1",
    "account": "acc_1",
    "key_id": "key_1",
    "model": "smollm2-135m-instruct",
    "namespace": "ns_" + "0" * 32,
    "shared": [],
    "cache_read": True,
    "cache_write": True,
    "traffic_class": "chat",
    "retention_s": 604800,
    "prompt_tokens": 12,
    "max_output_tokens": 100,
    "issued_at_s": NOW_S,
    "deadline_s": NOW_S + 600,
}
TAG = msgspec.convert(TAG_FIELDS, TagClaims)
GRANT = msgspec.convert(GRANT_FIELDS, GrantClaims)


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def statement(domain: str, payload: bytes) -> str:
    return f"{b64(payload)}.{b64(PRIVATE.sign(domain.encode() + bytes(1) + payload))}"


def compact(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def test_the_text_is_made_of_payload_and_ed25519_signature() -> None:
    assert sign(TAG, SEED) == statement("deepserve/statement/tag/1", compact(TAG_FIELDS))
    assert sign(GRANT, SEED) == statement("deepserve/statement/grant/1", compact(GRANT_FIELDS))


def test_golden_statements_stay_readable_for_ever() -> None:
    tag, grant = (DATA / "tag.statement").read_text(), (DATA / "grant.statement").read_text()
    assert verify(TagClaims, tag, VERIFY_KEY, NOW_S) == TAG
    assert verify(GrantClaims, grant, VERIFY_KEY, NOW_S) == GRANT
    assert (sign(TAG, SEED), sign(GRANT, SEED)) == (tag, grant)


def test_what_billing_signed_is_read_back() -> None:
    assert verify(TagClaims, sign(TAG, SEED), VERIFY_KEY, NOW_S) == TAG
    assert verify(GrantClaims, sign(GRANT, SEED), VERIFY_KEY, NOW_S) == GRANT


def test_a_field_of_a_newer_version_is_ignored() -> None:
    payload = compact({**TAG_FIELDS, "colour": "blue"})
    assert verify(TagClaims, statement("deepserve/statement/tag/1", payload), VERIFY_KEY, NOW_S) == TAG


def test_a_tag_never_passes_for_a_grant() -> None:
    wrong: list[tuple[Any, str]] = [
        (GrantClaims, sign(TAG, SEED)),
        (TagClaims, sign(GRANT, SEED)),
        # Even a good signature of the wrong kind over the right payload, and the right kind over the wrong payload.
        (GrantClaims, statement("deepserve/statement/tag/1", compact(GRANT_FIELDS))),
        (GrantClaims, statement("deepserve/statement/grant/1", compact(TAG_FIELDS))),
    ]
    for kind, text in wrong:
        with pytest.raises(AuthenticationFailed):
            verify(kind, text, VERIFY_KEY, NOW_S)


def test_no_changed_character_passes() -> None:
    text = sign(TAG, SEED)
    for i in range(0, len(text), 3):
        changed = text[:i] + ("A" if text[i] != "A" else "B") + text[i + 1 :]
        with pytest.raises(AuthenticationFailed):
            verify(TagClaims, changed, VERIFY_KEY, NOW_S)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "a.",
        ".a",
        "a.b.c",
        "a b.c",
        "ä.b",
        "a.b\n",
        "A" * 5 + ".A",
        "A" * (limits.STATEMENT_BYTES_MAX - 1) + ".A",
        sign(TAG, SEED) + "=",
        sign(TAG, SEED).replace(".", ".A"),
        sign(TAG, bytes(32)),
    ],
)
def test_what_billing_did_not_sign_is_refused(text: str) -> None:
    with pytest.raises(AuthenticationFailed):
        verify(TagClaims, text, VERIFY_KEY, NOW_S)


def test_a_statement_of_unbounded_length_is_not_signed() -> None:
    with pytest.raises(ValueError, match="at most 16384"):
        sign(msgspec.structs.replace(TAG, shared=("ns_" + "f" * 32,) * 400), SEED)


def test_a_tag_ends_a_minute_and_the_skew_after_its_issue() -> None:
    text = sign(TAG, SEED)
    verify(TagClaims, text, VERIFY_KEY, NOW_S + 65)
    with pytest.raises(ClaimRefused, match="expired"):
        verify(TagClaims, text, VERIFY_KEY, NOW_S + 65.1)


def test_a_grant_lives_an_hour_beyond_its_deadline() -> None:
    text = sign(GRANT, SEED)
    verify(GrantClaims, text, VERIFY_KEY, NOW_S + 600 + 3600 + 5)
    with pytest.raises(ClaimRefused, match="expired"):
        verify(GrantClaims, text, VERIFY_KEY, NOW_S + 600 + 3600 + 5.1)


def test_the_verifier_remembers_signatures_but_not_validity() -> None:
    verifier = Verifier(VERIFY_KEY)
    text = sign(TAG, SEED)
    assert verifier.tag(text, NOW_S) is verifier.tag(text, NOW_S)
    with pytest.raises(AuthenticationFailed):
        verifier.grant(text, NOW_S)
    with pytest.raises(ClaimRefused, match="expired"):
        verifier.tag(text, NOW_S + 66)


def test_the_verifier_forgets_the_statement_used_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STATEMENTS_VERIFIED_MAX", 2)
    verifier = Verifier(VERIFY_KEY)
    texts = [sign(msgspec.structs.replace(TAG, tag_id=f"tag_{i}"), SEED) for i in range(3)]
    first, second = verifier.tag(texts[0], NOW_S), verifier.tag(texts[1], NOW_S)
    assert verifier.tag(texts[0], NOW_S) is first
    verifier.tag(texts[2], NOW_S)
    assert verifier.tag(texts[0], NOW_S) is first
    assert verifier.tag(texts[1], NOW_S) is not second


def revoked(account: str, key_id: str | None, at_s: float) -> Revoked:
    return msgspec.convert({"type": "Revoked/1", "account": account, "key_id": key_id, "at_s": at_s}, Revoked)


@pytest.mark.parametrize(
    ("message", "void"),
    [
        (revoked("acc_1", None, NOW_S + 1), True),
        (revoked("acc_1", "key_1", NOW_S + 1), True),
        (revoked("acc_1", "key_1", NOW_S), True),
        (revoked("acc_1", "key_2", NOW_S + 1), False),
        (revoked("acc_2", None, NOW_S + 1), False),
        (revoked("acc_1", None, NOW_S - 1), False),
    ],
)
def test_a_revocation_voids_what_was_issued_before_it(message: Revoked, void: bool) -> None:
    verifier = Verifier(VERIFY_KEY)
    tag, grant = sign(TAG, SEED), sign(GRANT, SEED)
    verifier.tag(tag, NOW_S)
    verifier.grant(grant, NOW_S)
    verifier.revocations.apply(message, NOW_S + 1)
    if not void:
        assert verifier.tag(tag, NOW_S) == TAG
        assert verifier.grant(grant, NOW_S) == GRANT
        return
    with pytest.raises(ClaimRefused, match="revoked"):
        verifier.tag(tag, NOW_S)
    with pytest.raises(ClaimRefused, match="revoked"):
        verifier.grant(grant, NOW_S)


def test_a_late_broadcast_of_an_older_revocation_changes_nothing() -> None:
    revocations = Revocations()
    revocations.apply(revoked("acc_1", None, NOW_S + 10), NOW_S + 10)
    revocations.apply(revoked("acc_1", None, NOW_S - 10), NOW_S + 10)
    with pytest.raises(ClaimRefused):
        revocations.check(TAG)


def test_revocations_without_room_void_more_and_never_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REVOCATIONS_MAX", 3)
    revocations = Revocations()
    revocations.apply(revoked("acc_1", None, NOW_S), NOW_S)
    for i in range(3):
        revocations.apply(revoked(f"acc_other_{i}", None, NOW_S + 1), NOW_S + 1)
    with pytest.raises(ClaimRefused):
        revocations.check(TAG)
    revocations.check(msgspec.structs.replace(TAG, issued_at_s=NOW_S + 2))


def test_a_revocation_is_forgotten_when_nothing_it_voids_can_live(monkeypatch: pytest.MonkeyPatch) -> None:
    revocations = Revocations()
    revocations.apply(revoked("acc_1", None, NOW_S), NOW_S)
    later_s = NOW_S + limits.REVOCATION_LIFE_S + 1
    revocations.apply(revoked("acc_2", None, later_s), later_s)
    revocations.check(TAG)
