"""Fair queues, admission, capacity, patience: counted by hand, time as an argument."""

from __future__ import annotations

import pytest

from services.gateway.admission import Accounts, Capacity
from services.gateway.queues import FairQueue, Waiting
from services.gateway.watch import Watch
from shared.contracts import limits
from shared.contracts.errors import Overloaded, TooManyRequests
from shared.contracts.ids import AccountId, RequestId

A, B, C = AccountId("a"), AccountId("b"), AccountId("c")


def waiting(account: AccountId, name: str, cost: int = 100, deadline_s: float = 1000.0) -> Waiting:
    return Waiting(request=RequestId(name), account=account, cost=cost, deadline_s=deadline_s)


def order(queue: FairQueue, count: int, now_s: float = 0.0) -> list[str]:
    found = [queue.pop(now_s) for _ in range(count)]
    return [one.request if one else "-" for one in found]


def test_accounts_take_turns_however_many_requests_one_sends() -> None:
    queue = FairQueue(100)
    for number in range(4):
        queue.push(waiting(A, f"a{number}"))
    queue.push(waiting(B, "b0"))
    queue.push(waiting(B, "b1"))
    assert order(queue, 7) == ["a0", "b0", "a1", "b1", "a2", "a3", "-"]


def test_turns_are_counted_in_tokens() -> None:
    queue = FairQueue(100)
    for number in range(3):
        queue.push(waiting(A, f"a{number}", cost=300))
        queue.push(waiting(B, f"b{number}", cost=100))
    assert order(queue, 6) == ["a0", "b0", "b1", "b2", "a1", "a2"]


def test_who_was_away_gets_no_credit() -> None:
    queue = FairQueue(100)
    for number in range(6):
        queue.push(waiting(A, f"a{number}"))
    assert order(queue, 3) == ["a0", "a1", "a2"]
    queue.push(waiting(B, "b0"))
    queue.push(waiting(B, "b1"))
    queue.push(waiting(B, "b2"))
    assert order(queue, 4) == ["b0", "a3", "b1", "a4"]


def test_a_full_queue_refuses_and_a_place_that_is_left_is_free_again() -> None:
    queue = FairQueue(2)
    queue.push(waiting(A, "a0"))
    queue.push(waiting(B, "b0"))
    with pytest.raises(Overloaded):
        queue.push(waiting(C, "c0"))
    assert queue.remove(A, RequestId("a0"))
    assert not queue.remove(A, RequestId("a0"))
    queue.push(waiting(C, "c0"))
    assert len(queue) == 2


def test_who_is_late_is_passed_over() -> None:
    queue = FairQueue(10)
    queue.push(waiting(A, "a0", deadline_s=5.0))
    queue.push(waiting(A, "a1", deadline_s=20.0))
    assert order(queue, 2, now_s=5.0) == ["a1", "-"]
    assert len(queue) == 1, "its owner takes it out"


def test_an_account_has_its_limit_over_all_its_requests() -> None:
    accounts = Accounts()
    accounts.enter(A, 2)
    accounts.enter(A, 2)
    with pytest.raises(TooManyRequests, match="limit of 2"):
        accounts.enter(A, 2)
    accounts.enter(B, 2)
    accounts.leave(A)
    accounts.enter(A, 2)
    assert (accounts.running(A), accounts.running(B), accounts.running(C)) == (2, 1, 0)


def admitted(capacity: Capacity, *, prefill: int, decode: int, gateways: int = 1) -> int:
    count = 0
    while capacity.admits(prefill=prefill, decode=decode, gateways=gateways):
        capacity.started()
        count += 1
    return count


def test_what_is_under_way_follows_what_workers_advertise() -> None:
    assert admitted(Capacity(), prefill=0, decode=8) == 0
    assert admitted(Capacity(), prefill=2, decode=0) == 0
    assert admitted(Capacity(), prefill=2, decode=8) == 4, "as many waiting as running at prefill"
    assert admitted(Capacity(), prefill=2, decode=8, gateways=2) == 2
    assert admitted(Capacity(), prefill=1, decode=1, gateways=5) == 2, "never nothing"


def test_answers_do_not_pile_up_behind_full_decode_slots() -> None:
    capacity = Capacity()
    for _ in range(4):
        capacity.started()
        capacity.handed_off()
    assert admitted(capacity, prefill=2, decode=4) == 2
    capacity.ended(handed_off=True)
    assert admitted(capacity, prefill=2, decode=4) == 1
    capacity.ended(handed_off=False)
    assert (capacity.prefilling, capacity.decoding) == (2, 3)


def test_silence_is_asked_about_each_second_and_news_resets_it() -> None:
    watch = Watch(0.0)
    watch.published(0.0, preferred=False)
    assert watch.act(0.9, held=True, room=True, prefill=True) == "wait"
    assert watch.act(1.0, held=True, room=True, prefill=True) == "resend"
    assert watch.act(1.5, held=True, room=True, prefill=True) == "wait"
    assert watch.act(2.0, held=True, room=True, prefill=True) == "resend"
    watch.progressed(2.5)
    assert watch.act(3.4, held=True, room=True, prefill=False) == "wait"
    assert watch.act(3.5, held=True, room=True, prefill=False) == "resend"


def test_a_preferred_worker_has_a_short_bound() -> None:
    watch = Watch(0.0)
    watch.published(0.0, preferred=True)
    assert watch.act(0.9, held=False, room=False, prefill=True) == "wait"
    assert watch.act(limits.AT_PATIENCE_S, held=False, room=False, prefill=True) == "to_any"
    watch.published(1.0, preferred=False)
    assert watch.act(3.0, held=False, room=True, prefill=True) == "wait"


def test_work_that_nobody_claims_is_published_again_a_bounded_number_of_times() -> None:
    watch = Watch(0.0)
    now_s, acts = 0.0, list[str]()
    watch.published(now_s, preferred=False)
    while not acts or acts[-1] == "again":
        now_s += limits.CLAIM_PATIENCE_S
        acts.append(watch.act(now_s, held=False, room=True, prefill=True))
        watch.published(now_s, preferred=False)
    assert acts == ["again"] * (limits.ATTEMPTS_MAX - 1) + ["give_up"]


def test_while_everybody_is_busy_work_is_not_taken_for_lost() -> None:
    watch = Watch(0.0)
    watch.published(0.0, preferred=False)
    for now_s in range(1, 200):
        assert watch.act(float(now_s), held=False, room=False, prefill=True) == "wait"
    assert watch.act(200.0 + limits.CLAIM_PATIENCE_S / 2, held=False, room=True, prefill=True) == "wait"
    assert watch.act(200.0 + limits.CLAIM_PATIENCE_S, held=False, room=True, prefill=True) == "again"


def test_the_work_of_a_dead_worker_is_lost_when_no_other_takes_it() -> None:
    watch = Watch(0.0)
    watch.published(0.0, preferred=False)
    assert watch.act(100.0, held=True, room=True, prefill=False) == "resend"
    assert watch.act(101.0, held=False, room=True, prefill=False) == "wait"
    assert watch.act(101.0 + limits.CLAIM_PATIENCE_S, held=False, room=True, prefill=False) == "again"


def test_a_handed_off_request_is_not_called_back_by_the_preferred_bound() -> None:
    watch = Watch(0.0)
    watch.published(0.0, preferred=True)
    assert watch.act(0.5, held=True, room=True, prefill=True) == "wait"
    assert watch.act(5.0, held=False, room=True, prefill=False) == "wait"
