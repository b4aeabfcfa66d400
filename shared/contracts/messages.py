"""Every message between services: frozen, versioned by its tag, packed as MessagePack.

A new field has a default, so that versions n and n-1 understand each other; a changed meaning is a new tag. Token ids
travel packed (`block.pack_tokens`). No tensor and no KV byte is ever in a message.
"""

from __future__ import annotations

from typing import Final, Literal, TypeVar

import msgspec

from shared.contracts.epoch import Epoch
from shared.contracts.errors import ErrorRecord
from shared.contracts.ids import AccountId, GatewayId, NamespaceId, RequestId, WorkerId
from shared.contracts.tag import TrafficClass
from shared.contracts.usage import Usage

FinishReason = Literal["stop", "length", "cancelled", "insufficient_system_resource"]
Role = Literal["prefill", "decode"]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=lambda name: f"{name}/1"):
    """Base of all messages; the tag is the class name and its version."""


# -- work (JetStream, sealed with the cluster key) --------------------------------------------------------------------


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is drawn. `temperature` 0 is greedy. The noise of position p is a function of (seed, p)."""

    temperature: float
    top_p: float
    seed: int
    stop_tokens: tuple[int, ...]
    """Ids that end the sequence (end of turn); the id itself is counted and not shown."""
    top_logprobs: int | None = None
    """None: no log probabilities. n: the drawn token's and those of the n most likely, 0 to 20."""


class PrefillWork(Message, frozen=True, kw_only=True):
    request: RequestId
    attempt: int
    gateway: GatewayId
    model: str
    tokens: bytes
    sampling: Sampling
    grant: str
    published_at_s: float


class BlockRef(msgspec.Struct, frozen=True, kw_only=True):
    """Where decode reads one block: `pool` objects open with the namespace's key, `handoff` ones with the handoff's."""

    source: Literal["pool", "handoff"]
    namespace: NamespaceId
    key: bytes
    put_id: bytes


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms at temperature 1. `top`: (token, logprob), most likely first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class DecodeWork(Message, frozen=True, kw_only=True):
    """The handoff. `blocks[i]` holds tokens [i·block_tokens, (i+1)·block_tokens); each is stored. `tail` holds the
    KV of the computed tokens after the last full block (None if there are none or the store is down). A list that is
    shorter than the prompt is legal: decode computes the rest from `tokens`."""

    request: RequestId
    attempt: int
    gateway: GatewayId
    model: str
    tokens: bytes
    blocks: tuple[BlockRef, ...]
    tail: BlockRef | None
    handoff_key: bytes
    first_token: int
    hit_tokens: int
    sampling: Sampling
    grant: str
    published_at_s: float
    first_logprob: TokenLogprob | None = None
    """Of `first_token`, so that decode can say it again to a gateway that missed it."""


# -- gateway and workers (core NATS) ----------------------------------------------------------------------------------


class Claim(Message, frozen=True, kw_only=True):
    """A worker asks the gateway that owns the request whether its try still counts."""

    request: RequestId
    epoch: Epoch
    worker: WorkerId


class ClaimReply(Message, frozen=True, kw_only=True):
    """`go`: work. `stale`: a newer epoch holds it; drop the message. `cancelled`: settle what was delivered (decode) or
    drop it (prefill; the gateway releases the hold). `unknown`: this gateway has no such request.

    `delivered`: packed ids of the answer tokens that the gateway has, from index 0. `hit_tokens`: the hit count that
    the request's first prefill fixed, None before that. `final`: the named last count, None while open."""

    verdict: Literal["go", "stale", "cancelled", "unknown"]
    delivered: bytes = b""
    hit_tokens: int | None = None
    final: int | None = None


class PrefillTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time to first token went, in seconds; for benches and logs, never for decisions."""

    queued_s: float
    lookup_s: float
    read_s: float
    compute_s: float


class TokenEntry(msgspec.Struct, frozen=True, kw_only=True):
    """News of one sequence. Answer tokens are numbered from 0; `tokens[k]` has index `first + k`.

    `ready` fields (`hit_tokens`, `timing`) come with the first entry of the prefill. `finish` says that the worker
    produced its last token; the gateway answers with Finalize. `error` ends the request without an answer."""

    request: RequestId
    epoch: Epoch
    first: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    hit_tokens: int | None = None
    timing: PrefillTiming | None = None
    finish: FinishReason | None = None
    error: ErrorRecord | None = None


class TokenBatch(Message, frozen=True, kw_only=True):
    """One per step per gateway, all its sequences in it."""

    worker: WorkerId
    entries: tuple[TokenEntry, ...]


class Acknowledge(Message, frozen=True, kw_only=True):
    """The gateway has all answer tokens below `received`: the worker may forget them."""

    request: RequestId
    epoch: Epoch
    received: int


class Resend(Message, frozen=True, kw_only=True):
    """“From n”: the worker sends again what it has from index `first`."""

    request: RequestId
    epoch: Epoch
    first: int


class Finalize(Message, frozen=True, kw_only=True):
    """The one final count: usage, last chunk and settlement carry `count`; tokens from it on are free.

    `reasoning`: how many of them were thinking. The worker stops within one step and settles."""

    request: RequestId
    epoch: Epoch
    count: int
    reason: FinishReason
    reasoning: int = 0


class WorkerHeartbeat(Message, frozen=True, kw_only=True):
    """`capacity`: requests that the worker takes at once. `warm`: chain heads it holds in memory (routing hints)."""

    worker: WorkerId
    role: Role
    model: str
    capacity: int
    running: int
    pages_free: int
    pages: int
    context_tokens: int
    block_tokens: int
    fingerprint: bytes
    sent_at_s: float
    draining: bool = False


class GatewayHeartbeat(Message, frozen=True, kw_only=True):
    """The gateway's lease: silence longer than limits.PEER_LEASE_S ends its work."""

    gateway: GatewayId
    sent_at_s: float


# -- billing (core NATS request and reply) ----------------------------------------------------------------------------


class Authorize(Message, frozen=True, kw_only=True):
    """`key_digest`: SHA-256 of the API key; the key itself never leaves the gateway. `key_hint`: its last four."""

    key_digest: bytes
    key_hint: str


class AuthorizeReply(Message, frozen=True, kw_only=True):
    tag: str


class Hold(Message, frozen=True, kw_only=True):
    """Idempotent by `request`. Raises InsufficientBalance, AuthenticationFailed, NotFound (model without a price)."""

    tag: str
    request: RequestId
    model: str
    user_id: str | None
    traffic_class: TrafficClass
    prompt_tokens: int
    max_output_tokens: int
    deadline_s: float


class HoldReply(Message, frozen=True, kw_only=True):
    grant: str
    hold_nano: int


class Settle(Message, frozen=True, kw_only=True):
    """The hold's one end when work was done; idempotent by the grant's request, the same content is answered again.

    Raises Conflict when the hold ended otherwise."""

    grant: str
    epoch: Epoch
    usage: Usage
    worker: WorkerId
    device_s: float
    """Busy seconds of the device for this request in this stage."""


class Release(Message, frozen=True, kw_only=True):
    """The hold's end when no prefill ran: failed or cancelled before any work."""

    grant: str
    reason: str


class Settled(Message, frozen=True, kw_only=True):
    """Committed. `amount_nano`: what was taken, 0 for a release."""

    amount_nano: int
    currency: str


class BalanceQuery(Message, frozen=True, kw_only=True):
    tag: str


class BalanceReply(Message, frozen=True, kw_only=True):
    """Decimal strings with two or more places, as DeepSeek's /user/balance gives them."""

    is_available: bool
    currency: str
    total_balance: str
    granted_balance: str
    topped_up_balance: str


class NamespaceKeyQuery(Message, frozen=True, kw_only=True):
    """The key of a namespace that the grant names."""

    grant: str
    namespace: NamespaceId


NAMESPACE_KEY_SEAL: Final = "namespace-key"
"""The purpose under which a namespace key is sealed in transit."""


class NamespaceKeyReply(Message, frozen=True, kw_only=True):
    """`sealed_key`: 32 random bytes, sealed with the cluster key for NAMESPACE_KEY_SEAL."""

    sealed_key: bytes


class Revoked(Message, frozen=True, kw_only=True):
    """Broadcast: statements of this account or key issued before `at_s` are void."""

    account: AccountId
    key_id: str | None
    at_s: float


# -- cache_index (core NATS request and reply) ------------------------------------------------------------------------


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of one namespace's chain, concatenated (32 bytes each), from block 0."""

    namespace: NamespaceId
    keys: bytes


class Lookup(Message, frozen=True, kw_only=True):
    """The own chain first, then each readable shared chain. Rows that this request committed itself do not count."""

    grant: str
    request: RequestId
    chains: tuple[Chain, ...]


class LookupReply(Message, frozen=True, kw_only=True):
    """The longest run from block 0, for each block the own row, else a shared one."""

    blocks: tuple[BlockRef, ...]


class CommitBlock(msgspec.Struct, frozen=True, kw_only=True):
    key: bytes
    put_id: bytes
    position: int
    """Index of the block in its chain."""
    object_bytes: int
    put_at_s: float
    replaces: bytes = b""
    """The put id whose object a read proved to be gone or damaged: its row is replaced if it still holds exactly this
    put. b"": the first unexpired row wins."""


class Commit(Message, frozen=True, kw_only=True):
    """Rows for objects that are already stored (bytes before row). Writes go to the grant's own namespace only."""

    grant: str
    blocks: tuple[CommitBlock, ...]


class CommitReply(Message, frozen=True, kw_only=True):
    """For each block the put id that the row holds now (b"" where the commit was refused as too old). Where it is not
    the caller's own, the caller deletes its object."""

    put_ids: tuple[bytes, ...]


class Touch(Message, frozen=True, kw_only=True):
    """A served hit extends all blocks of its prefix; a probe extends nothing."""

    grant: str
    blocks: tuple[BlockRef, ...]


class Done(Message, frozen=True, kw_only=True):
    """Nothing to say but yes."""


class Refused(Message, frozen=True, kw_only=True):
    """The reply of any request that ended in an error."""

    error: ErrorRecord


M = TypeVar("M", bound=Message)


def encode(message: Message) -> bytes:
    """MessagePack bytes."""
    return msgspec.msgpack.encode(message)


def decode(kind: type[M], data: bytes) -> M:
    """Raises msgspec.DecodeError or ValidationError on anything that is not a `kind`: messages are hostile input."""
    return msgspec.msgpack.decode(data, type=kind)
