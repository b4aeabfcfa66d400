"""Living workers, from their heartbeats, and which one holds a prefix. Pure: times are arguments."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shared.contracts import limits
from shared.contracts.ids import WorkerId
from shared.contracts.messages import Role, WorkerHeartbeat


@dataclass(frozen=True, slots=True)
class _Heard:
    heartbeat: WorkerHeartbeat
    at_s: float


class Workers:
    """The latest heartbeat of each worker. A worker silent for limits.PEER_LEASE_S is gone."""

    def __init__(self) -> None:
        self._heard: OrderedDict[WorkerId, _Heard] = OrderedDict()

    def hear(self, heartbeat: WorkerHeartbeat, now_s: float) -> None:
        self._heard[heartbeat.worker] = _Heard(heartbeat, now_s)
        self._heard.move_to_end(heartbeat.worker)
        while self._heard and (
            len(self._heard) > limits.PEERS_MAX or next(iter(self._heard.values())).at_s < now_s - limits.PEER_LEASE_S
        ):
            self._heard.popitem(last=False)

    def alive(self, worker: WorkerId | None, now_s: float) -> bool:
        """Whether it was heard within its lease, draining or not."""
        heard = self._heard.get(worker) if worker is not None else None
        return heard is not None and heard.at_s >= now_s - limits.PEER_LEASE_S

    def capacity(self, role: Role, model: str, now_s: float) -> int:
        """Requests that all workers of the role take at once."""
        return sum(heartbeat.capacity for heartbeat in self._serving(role, model, now_s))

    def count(self, role: Role, model: str, now_s: float) -> int:
        return sum(1 for _ in self._serving(role, model, now_s))

    def room(self, role: Role, model: str, now_s: float) -> bool:
        """Whether some worker of the role says that it has room for one more."""
        return any(beat.running < beat.capacity for beat in self._serving(role, model, now_s))

    def fingerprint(self, model: str, now_s: float) -> bytes | None:
        """Of the prefill workers; where an upgrade is under way, of the one heard last."""
        found = [heartbeat.fingerprint for heartbeat in self._serving("prefill", model, now_s)]
        return found[-1] if found else None

    def block_tokens(self, model: str, now_s: float) -> int:
        """Block size of the model's prefill workers."""
        found = [heartbeat.block_tokens for heartbeat in self._serving("prefill", model, now_s)]
        return found[-1] if found else limits.BLOCK_TOKENS_DEFAULT

    def choose(self, worker: WorkerId | None, model: str, now_s: float) -> WorkerId | None:
        """`worker`, if it is worth sending work to it by name: a prefill worker of several, with room."""
        serving = {beat.worker: beat for beat in self._serving("prefill", model, now_s)}
        beat = serving.get(worker) if worker is not None else None
        return worker if beat is not None and len(serving) > 1 and beat.running < beat.capacity else None

    def _serving(self, role: Role, model: str, now_s: float) -> Iterator[WorkerHeartbeat]:
        for heard in self._heard.values():
            beat = heard.heartbeat
            fresh = heard.at_s >= now_s - limits.PEER_LEASE_S
            if fresh and beat.role == role and beat.model == model and not beat.draining:
                yield beat


class Affinity:
    """Which prefill worker read a prompt that ends in a block, by the block's chained key. Least recently used go."""

    def __init__(self, entries_max: int = limits.AFFINITY_ENTRIES_MAX) -> None:
        self._workers: OrderedDict[bytes, WorkerId] = OrderedDict()
        self._entries_max = entries_max

    def remember(self, keys: Sequence[bytes], worker: WorkerId) -> None:
        """The prompt with these block keys was read by `worker`."""
        if not keys:
            return
        self._workers[keys[-1]] = worker
        self._workers.move_to_end(keys[-1])
        if len(self._workers) > self._entries_max:
            self._workers.popitem(last=False)

    def find(self, keys: Sequence[bytes]) -> WorkerId | None:
        """The worker of the longest remembered prompt that this one continues."""
        return next((self._workers[key] for key in reversed(keys) if key in self._workers), None)
