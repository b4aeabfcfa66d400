"""What every request of this gateway shares; built once by `main`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.gateway.admission import Accounts
from services.gateway.auth import ApiKey, Tags
from services.gateway.background import Background
from services.gateway.gate import Gate
from services.gateway.holds import Holds
from services.gateway.prepare import Models
from services.gateway.token_inbox import TokenInbox
from services.gateway.workers import Affinity, Workers
from shared.contracts import limits
from shared.contracts.ids import GatewayId, RequestId
from shared.contracts.ports import Bus, Clock
from shared.runtime.signing import Verifier


@dataclass(frozen=True)
class Edge:
    """`gates`: one for each model. `entropy(n)`: n random bytes. `draining()`: no new requests are taken."""

    gateway: GatewayId
    bus: Bus
    clock: Clock
    verifier: Verifier
    entropy: Callable[[int], bytes]
    background: Background
    tags: Tags
    holds: Holds
    models: Models
    accounts: Accounts
    gates: dict[str, Gate]
    inbox: TokenInbox
    workers: Workers
    affinity: Affinity
    draining: Callable[[], bool]
    request_deadline_s: float = limits.REQUEST_DEADLINE_S
    keep_alive_s: float = limits.KEEP_ALIVE_S
    owned_by: str = "deepserve"


@dataclass(frozen=True)
class Call:
    """One chat completion as it came in. `received_s`: monotonic."""

    request: RequestId
    key: ApiKey
    body: bytes
    traffic_class: str | None
    received_s: float
