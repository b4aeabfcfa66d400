"""The heartbeat table and the memory of prefixes."""

from __future__ import annotations

from services.gateway.workers import Affinity, Workers
from shared.contracts import limits
from shared.contracts.ids import WorkerId
from shared.contracts.messages import Role, WorkerHeartbeat

P1, P2, D1 = WorkerId("p1"), WorkerId("p2"), WorkerId("d1")


def beat(
    worker: WorkerId,
    role: Role = "prefill",
    *,
    capacity: int = 4,
    running: int = 0,
    draining: bool = False,
    model: str = "m",
    fingerprint: bytes = b"f" * 32,
) -> WorkerHeartbeat:
    return WorkerHeartbeat(
        worker=worker,
        role=role,
        model=model,
        capacity=capacity,
        running=running,
        pages_free=1,
        pages=1,
        context_tokens=8192,
        block_tokens=64,
        fingerprint=fingerprint,
        sent_at_s=0.0,
        draining=draining,
    )


def test_capacity_is_the_sum_over_living_workers_of_the_role_and_model() -> None:
    workers = Workers()
    workers.hear(beat(P1), 0.0)
    workers.hear(beat(P2, capacity=3), 1.0)
    workers.hear(beat(D1, "decode", capacity=16), 1.0)
    workers.hear(beat(WorkerId("x"), model="other", capacity=100), 1.0)
    assert workers.capacity("prefill", "m", 1.0) == 7
    assert workers.capacity("decode", "m", 1.0) == 16
    assert workers.capacity("prefill", "m", limits.PEER_LEASE_S + 0.5) == 3, "the first one is silent"
    assert workers.capacity("prefill", "m", limits.PEER_LEASE_S + 1.5) == 0


def test_a_draining_worker_lives_and_gets_nothing_new() -> None:
    workers = Workers()
    workers.hear(beat(P1, draining=True), 0.0)
    assert workers.alive(P1, 1.0)
    assert workers.capacity("prefill", "m", 1.0) == 0
    assert not workers.alive(P1, limits.PEER_LEASE_S + 0.1)
    assert not workers.alive(None, 0.0)


def test_room_is_what_a_worker_says_of_itself() -> None:
    workers = Workers()
    workers.hear(beat(P1, running=4), 0.0)
    assert not workers.room("prefill", "m", 0.0)
    workers.hear(beat(P2, running=3), 0.0)
    assert workers.room("prefill", "m", 0.0)


def test_work_is_sent_by_name_only_to_one_of_several_with_room() -> None:
    workers = Workers()
    workers.hear(beat(P1), 0.0)
    assert workers.choose(P1, "m", 0.0) is None, "it is the only one"
    workers.hear(beat(P2, running=4), 0.0)
    assert workers.choose(P1, "m", 0.0) == P1
    assert workers.choose(P2, "m", 0.0) is None, "full"
    assert workers.choose(WorkerId("gone"), "m", 0.0) is None
    assert workers.choose(None, "m", 0.0) is None


def test_fingerprint_and_block_size_come_from_prefill() -> None:
    workers = Workers()
    assert workers.fingerprint("m", 0.0) is None
    assert workers.block_tokens("m", 0.0) == 64
    workers.hear(beat(D1, "decode", fingerprint=b"d" * 32), 0.0)
    workers.hear(beat(P1), 0.0)
    assert workers.fingerprint("m", 0.0) == b"f" * 32


def test_the_longest_known_beginning_names_the_worker() -> None:
    affinity = Affinity(entries_max=2)
    affinity.remember([b"1", b"2"], P1)
    affinity.remember([b"1", b"2", b"3"], P2)
    assert affinity.find([b"1", b"2", b"3", b"4"]) == P2
    assert affinity.find([b"1", b"2", b"x"]) == P1
    assert affinity.find([b"1"]) is None, "only whole prompts are remembered"
    affinity.remember([b"9"], P1)
    assert affinity.find([b"1", b"2"]) is None, "the oldest went"
    affinity.remember([], P1)
