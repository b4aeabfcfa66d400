"""API key → tag: asked of billing once, checked offline, kept until it expires or is revoked (design, section 3).

The key never leaves the gateway: billing gets its SHA-256 digest and its last four characters. Requests that arrive
together with the same new key wait for one question.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import dataclass

from services.gateway.background import Background
from shared.contracts import limits, subjects
from shared.contracts.errors import AuthenticationFailed, ClaimRefused, DeadlineExceeded, Overloaded
from shared.contracts.messages import Authorize, AuthorizeReply
from shared.contracts.ports import Bus, Clock
from shared.contracts.tag import TagClaims
from shared.runtime import rpc
from shared.runtime.signing import Verifier

MALFORMED = "Authentication Fails (auth header format should be Bearer sk-...)"


@dataclass(frozen=True)
class Tag:
    """A statement of billing and what it claims."""

    text: str
    claims: TagClaims


@dataclass(frozen=True)
class ApiKey:
    """What may be known of a key: its digest and the end that billing names in errors."""

    digest: bytes
    hint: str


def api_key(authorization: str | None) -> ApiKey:
    """From the header's value. Raises AuthenticationFailed in DeepSeek's words."""
    scheme, _, key = (authorization or "").partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key or not key.isascii():
        raise AuthenticationFailed(MALFORMED)
    return ApiKey(hashlib.sha256(key.encode()).digest(), key[-4:])


class Tags:
    def __init__(self, bus: Bus, verifier: Verifier, clock: Clock, background: Background) -> None:
        self._bus = bus
        self._verifier = verifier
        self._clock = clock
        self._background = background
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._asking: dict[bytes, asyncio.Task[Tag]] = {}

    async def tag(self, key: ApiKey) -> Tag:
        """A tag that is good for at least limits.TAG_RENEW_S more. One of an account without money is not kept.

        Raises AuthenticationFailed; Overloaded when billing does not answer.
        """
        known = self._remembered(key.digest)
        if known is not None:
            return known
        task = self._asking.get(key.digest)
        if task is None:
            task = self._background.spawn(self._ask(key), "authorize")
            self._asking[key.digest] = task
            task.add_done_callback(lambda _: self._asking.pop(key.digest, None))
        # One client that leaves must not end the question for the others.
        return await asyncio.shield(task)

    def _remembered(self, digest: bytes) -> Tag | None:
        text = self._known.get(digest)
        if text is None:
            return None
        now_s = self._clock.now_s()
        try:
            claims = self._verifier.tag(text, now_s)
        except (ClaimRefused, AuthenticationFailed):
            del self._known[digest]
            return None
        return Tag(text, claims) if claims.expires_at_s - now_s > limits.TAG_RENEW_S else None

    async def _ask(self, key: ApiKey) -> Tag:
        message = Authorize(key_digest=key.digest, key_hint=key.hint)
        try:
            reply = await rpc.call(self._bus, subjects.BILLING_AUTHORIZE, message, AuthorizeReply)
            claims = self._verifier.tag(reply.tag, self._clock.now_s())
        except DeadlineExceeded as error:
            raise Overloaded(error.message) from error
        except ClaimRefused as error:
            raise Overloaded("the key's rights have just changed; please retry") from error
        if not claims.funded:
            self._known.pop(key.digest, None)
            return Tag(reply.tag, claims)
        self._known[key.digest] = reply.tag
        self._known.move_to_end(key.digest)
        if len(self._known) > limits.TAGS_CACHED_MAX:
            self._known.popitem(last=False)
        return Tag(reply.tag, claims)
