"""Billing's signed statements: tags and grants as text, checked offline by every service (design, section 3).

A statement is `base64url(payload).base64url(signature)`, without padding; the payload is the claims' JSON. The
signature covers the kind before the payload, so that a tag never passes for a grant. Billing signs; everybody verifies.
That a signature is good may be remembered; expiry and revocation are looked at each time.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections import OrderedDict
from typing import Final, TypeVar

import msgspec
from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey, VerifyKey

from shared.contracts import limits
from shared.contracts.errors import AuthenticationFailed, ClaimRefused
from shared.contracts.messages import Revoked
from shared.contracts.tag import GrantClaims, TagClaims

Claims = TagClaims | GrantClaims
C = TypeVar("C", TagClaims, GrantClaims)

_DOMAINS: Final[dict[type, bytes]] = {
    TagClaims: b"deepserve/statement/tag/1\0",
    GrantClaims: b"deepserve/statement/grant/1\0",
}
_FORM: Final = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+", re.ASCII)


def sign(claims: Claims, signing_key: bytes) -> str:
    """The statement as text. `signing_key`: the 32-byte Ed25519 seed.

    Raises ValueError when it would be longer than limits.STATEMENT_BYTES_MAX.
    """
    payload = msgspec.json.encode(claims)
    signature = SigningKey(signing_key).sign(_DOMAINS[type(claims)] + payload).signature
    text = f"{_encode(payload)}.{_encode(signature)}"
    if len(text) > limits.STATEMENT_BYTES_MAX:
        raise ValueError(f"statement of {len(text)} bytes, at most {limits.STATEMENT_BYTES_MAX}")
    return text


def verify(kind: type[C], text: str, verify_key: bytes, now_s: float) -> C:
    """The claims of a statement that billing signed and that is still valid; knows nothing of revocations.

    Raises AuthenticationFailed when it is not a `kind` that billing signed, ClaimRefused when it has expired.
    """
    claims = _checked(kind, text, verify_key)
    check_expiry(claims, now_s)
    return claims


def valid_until_s(claims: Claims) -> float:
    """When the statement ends: a grant outlives its request's deadline, so that a billing outage loses no money."""
    if isinstance(claims, TagClaims):
        return claims.expires_at_s
    return claims.deadline_s + limits.SETTLE_ALLOWANCE_S


def check_expiry(claims: Claims, now_s: float) -> None:
    """Raises ClaimRefused after the statement's end and the clocks' skew."""
    if now_s > valid_until_s(claims) + limits.CLOCK_SKEW_S:
        raise ClaimRefused("the statement has expired")


def _checked(kind: type[C], text: str, verify_key: bytes) -> C:
    if len(text) > limits.STATEMENT_BYTES_MAX or not _FORM.fullmatch(text):
        raise AuthenticationFailed("not a statement")
    payload_text, signature_text = text.split(".")
    try:
        payload, signature = _decode(payload_text), _decode(signature_text)
        VerifyKey(verify_key).verify(_DOMAINS[kind] + payload, signature)
        # The signature is good: what it covers was written by billing, perhaps by a newer version.
        return msgspec.json.decode(payload, type=kind)
    except (binascii.Error, BadSignatureError, ValueError) as error:
        raise AuthenticationFailed("the statement was not signed by billing") from error
    except msgspec.DecodeError as error:
        raise AuthenticationFailed("the statement's claims cannot be read") from error


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    if _encode(data) != text:
        raise ValueError("not the canonical form")
    return data


class Revocations:
    """What was revoked and is not over yet. Fed by the `revoked` broadcast; overrides tags and grants."""

    def __init__(self) -> None:
        self._revoked: OrderedDict[tuple[str, str | None], float] = OrderedDict()
        self._floor_s = float("-inf")

    def apply(self, revoked: Revoked, now_s: float) -> None:
        """Statements of this account (of this key alone, if it is named) issued up to `at_s` are void from now on."""
        name = (revoked.account, revoked.key_id)
        self._revoked[name] = max(revoked.at_s, self._revoked.pop(name, revoked.at_s))
        self._forget(now_s)

    def check(self, claims: Claims) -> None:
        """Raises ClaimRefused when the statement is void."""
        whole = self._revoked.get((claims.account, None), self._floor_s)
        of_key = self._revoked.get((claims.account, claims.key_id), self._floor_s)
        if claims.issued_at_s <= max(whole, of_key, self._floor_s):
            raise ClaimRefused("the statement was revoked")

    def _forget(self, now_s: float) -> None:
        """Drops what is over. One dropped for want of room voids everything as old as itself: closed, not open."""
        while self._revoked:
            name, at_s = next(iter(self._revoked.items()))
            over = at_s < now_s - limits.REVOCATION_LIFE_S
            if not over and len(self._revoked) <= limits.REVOCATIONS_MAX:
                return
            del self._revoked[name]
            if not over:
                self._floor_s = max(self._floor_s, at_s)


class Verifier:
    """`verify` with a memory: signatures already found good, and what was revoked since. One for each process.

    Billing does not settle through it: work that was done under a grant is paid for, whatever was revoked meanwhile.
    """

    def __init__(self, verify_key: bytes, revocations: Revocations | None = None) -> None:
        self._verify_key = verify_key
        self._verified: OrderedDict[tuple[type, str], Claims] = OrderedDict()
        self.revocations = revocations or Revocations()

    def tag(self, text: str, now_s: float) -> TagClaims:
        """Raises AuthenticationFailed (not billing's), ClaimRefused (expired or revoked)."""
        return self._verify(TagClaims, text, now_s)

    def grant(self, text: str, now_s: float) -> GrantClaims:
        """Raises AuthenticationFailed (not billing's), ClaimRefused (expired or revoked)."""
        return self._verify(GrantClaims, text, now_s)

    def _verify(self, kind: type[C], text: str, now_s: float) -> C:
        known = self._verified.get((kind, text))
        if isinstance(known, kind):
            self._verified.move_to_end((kind, text))
            claims: C = known
        else:
            claims = _checked(kind, text, self._verify_key)
            self._verified[(kind, text)] = claims
            if len(self._verified) > limits.STATEMENTS_VERIFIED_MAX:
                self._verified.popitem(last=False)
        check_expiry(claims, now_s)
        self.revocations.check(claims)
        return claims
