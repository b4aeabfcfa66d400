"""What every worker stands on: the parts that prefill and decode share, made once by a composition root."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shared.contracts.ids import WorkerId
from shared.contracts.ports import Bus, Clock, EngineProfile
from shared.contracts.tag import GrantClaims
from shared.worker.block_reader import BlockReader
from shared.worker.block_writer import BlockWriter, Spawn
from shared.worker.counters import Counters
from shared.worker.emitter import Emitter
from shared.worker.engine_loop import EngineLoop
from shared.worker.namespace_keys import NamespaceKeys
from shared.worker.objects import BlockObjects
from shared.worker.page_gate import PageGate
from shared.worker.settlement import Settlement
from shared.worker.step_router import StepRouter


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """`verify`: a grant's claims by its signature. `check_revoked` raises ClaimRefused for a void grant. `entropy(n)`:
    n random bytes. `spawn` makes a task that the worker owns."""

    worker: WorkerId
    model: str
    bus: Bus
    clock: Clock
    counters: Counters
    engine: EngineLoop
    router: StepRouter
    emitter: Emitter
    pages: PageGate
    objects: BlockObjects
    reader: BlockReader
    writer: BlockWriter
    keys: NamespaceKeys
    settlement: Settlement
    verify: Callable[[str, float], GrantClaims]
    check_revoked: Callable[[GrantClaims], None]
    entropy: Callable[[int], bytes]
    spawn: Spawn
    fingerprint: bytes
    """Digest of the engine's fingerprint."""

    @property
    def profile(self) -> EngineProfile:
        return self.engine.profile

    @property
    def block_tokens(self) -> int:
        return self.engine.profile.block_tokens

    @property
    def block_bytes(self) -> int:
        """Payload of a whole block."""
        return self.engine.profile.kv_bytes_token * self.engine.profile.block_tokens
