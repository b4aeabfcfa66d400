"""Epochs, claims, the one final count (invariants 4 and 11)."""

from __future__ import annotations

import pytest

from services.gateway.request_state import Request
from shared.contracts.block import pack_tokens
from shared.contracts.epoch import Epoch, Stage
from shared.contracts.errors import IllegalTransition, Overloaded, to_record
from shared.contracts.ids import RequestId, WorkerId
from shared.contracts.lifecycle import RequestEvent, RequestState
from shared.contracts.messages import (
    Acknowledge,
    Claim,
    ClaimReply,
    Finalize,
    FinishReason,
    PrefillTiming,
    Resend,
    TokenEntry,
)

ID = RequestId("r")
P1, P2, D1, D2 = WorkerId("p1"), WorkerId("p2"), WorkerId("d1"), WorkerId("d2")
TIMING = PrefillTiming(queued_s=0.1, lookup_s=0.2, read_s=0.3, compute_s=0.4)


def prefill(attempt: int = 1, delivery: int = 1) -> Epoch:
    return Epoch(attempt, Stage.PREFILL, delivery)


def decode(attempt: int = 1, delivery: int = 1) -> Epoch:
    return Epoch(attempt, Stage.DECODE, delivery)


def claim(epoch: Epoch, worker: WorkerId) -> Claim:
    return Claim(request=ID, epoch=epoch, worker=worker)


def entry(
    epoch: Epoch, first: int, *tokens: int, hit: int | None = None, finish: FinishReason | None = None
) -> TokenEntry:
    timing = TIMING if hit is not None else None
    return TokenEntry(request=ID, epoch=epoch, first=first, tokens=tokens, hit_tokens=hit, timing=timing, finish=finish)


@pytest.fixture
def request_() -> Request:
    request = Request(ID, max_output_tokens=100)
    assert request.publish() == 1
    return request


@pytest.fixture
def decoding(request_: Request) -> Request:
    """Token 0 from prefill, decode has claimed."""
    request_.claim(claim(prefill(), P1))
    request_.accept(entry(prefill(), 0, 50, hit=64), P1)
    request_.claim(claim(decode(), D1))
    return request_


def test_the_way_from_hold_to_finish(request_: Request) -> None:
    assert (request_.state, request_.waiting_for, request_.claimed) == (RequestState.HELD, Stage.PREFILL, False)
    assert request_.claim(claim(prefill(), P1)) == ClaimReply(verdict="go")
    assert (request_.state, request_.waiting_for, request_.claimed) == (RequestState.PREFILLING, None, True)
    assert request_.accept(entry(prefill(), 0, 50, hit=64), P1)
    assert (request_.state, request_.waiting_for) == (RequestState.HANDED_OFF, Stage.DECODE)
    assert (request_.hit_tokens, request_.timing) == (64, TIMING)
    assert request_.claim(claim(decode(), D1)) == ClaimReply(verdict="go", delivered=pack_tokens([50]), hit_tokens=64)
    assert (request_.state, request_.stage, request_.waiting_for) == (RequestState.DECODING, Stage.DECODE, None)
    assert request_.accept(entry(decode(), 1, 51, 52), D1)
    assert request_.finish is None
    assert request_.accept(entry(decode(), 3, finish="stop"), D1)
    assert request_.finish == "stop"
    assert [token for token, _ in request_.log.take()] == [50, 51, 52]
    request_.end(RequestEvent.FINISH, 3, "stop")
    final = Finalize(request=ID, epoch=decode(), count=3, reason="stop")
    assert (request_.over, request_.finalize()) == (True, (D1, final))


def test_a_one_token_answer_ends_at_prefill(request_: Request) -> None:
    request_.claim(claim(prefill(), P1))
    assert request_.accept(entry(prefill(), 0, 50, hit=0, finish="length"), P1)
    assert (request_.state, request_.finish) == (RequestState.PREFILLING, "length")


def test_asking_again_gets_the_same_answer_and_others_are_stale(decoding: Request) -> None:
    assert decoding.claim(claim(decode(), D1)).verdict == "go"
    assert decoding.claim(claim(decode(), D2)).verdict == "stale"
    assert decoding.claim(claim(prefill(), P1)).verdict == "stale"
    assert decoding.claim(claim(prefill(delivery=9), P1)).verdict == "stale"
    assert decoding.claim(claim(decode(attempt=2), D1)).verdict == "stale"


def test_an_old_epoch_changes_nothing(decoding: Request) -> None:
    decoding.claim(claim(decode(delivery=2), D2))
    assert not decoding.accept(entry(decode(), 1, 66), D1)
    assert not decoding.accept(entry(decode(), 1, finish="length"), D1)
    failed = TokenEntry(request=ID, epoch=decode(), first=1, error=to_record(Overloaded("no")))
    assert not decoding.accept(failed, D1)
    assert not decoding.accept(entry(decode(delivery=3), 1, 66), D2), "never claimed"
    assert not decoding.accept(entry(decode(delivery=2), 1, 66), D1), "another worker's epoch"
    assert (decoding.log.received, decoding.error, decoding.finish) == (1, None, None)


def test_a_published_attempt_makes_claims_of_the_one_before_stale(request_: Request) -> None:
    assert request_.publish() == 2
    assert request_.claim(claim(prefill(attempt=1), P1)).verdict == "stale"
    assert request_.claim(claim(prefill(attempt=2), P2)).verdict == "go"


def test_the_first_lookup_fixes_the_hit_count(decoding: Request) -> None:
    decoding.publish()
    decoding.claim(claim(prefill(attempt=2), P2))
    assert decoding.state is RequestState.PREFILLING
    decoding.accept(entry(prefill(attempt=2), 0, 50, hit=6400), P2)
    assert (decoding.hit_tokens, decoding.state) == (64, RequestState.HANDED_OFF)


def test_a_first_token_that_decodes_claim_overtook_still_tells_the_hit_count(request_: Request) -> None:
    request_.claim(claim(prefill(), P1))
    request_.claim(claim(decode(), D1))
    assert request_.accept(entry(prefill(), 0, 50, hit=64), P1)
    assert (request_.hit_tokens, request_.log.received) == (64, 0), "its token comes from the current epoch"
    assert request_.accept(entry(decode(), 0, 50, 51, hit=64), D1)
    assert request_.log.received == 2


def test_a_fail_over_goes_on_where_the_client_is(decoding: Request) -> None:
    decoding.accept(entry(decode(), 1, 51, 52), D1)
    reply = decoding.claim(claim(decode(delivery=2), D2))
    assert reply == ClaimReply(verdict="go", delivered=pack_tokens([50, 51, 52]), hit_tokens=64)
    decoding.accept(entry(decode(delivery=2), 1, 51, 52, 53), D2)
    assert [token for token, _ in decoding.log.take()] == [50, 51, 52, 53]


def test_another_token_at_a_known_place_ends_the_request(decoding: Request) -> None:
    assert decoding.accept(entry(decode(), 0, 49, 51), D1)
    assert decoding.error is not None
    assert decoding.log.received == 1


def test_an_end_before_known_tokens_ends_the_request(decoding: Request) -> None:
    decoding.accept(entry(decode(), 1, 51, 52), D1)
    assert decoding.accept(entry(decode(), 2, finish="stop"), D1)
    assert decoding.error is not None


def test_an_end_past_a_gap_waits_for_the_gap(decoding: Request) -> None:
    assert not decoding.accept(entry(decode(), 3, 53, finish="stop"), D1)
    assert decoding.finish is None
    assert decoding.resend() == (D1, Resend(request=ID, epoch=decode(), first=1))
    assert decoding.accept(entry(decode(), 1, 51, 52, 53, finish="stop"), D1)
    assert decoding.finish == "stop"


def test_what_is_told_to_the_worker(request_: Request) -> None:
    assert request_.resend() is None
    assert request_.acknowledge() is None
    request_.claim(claim(prefill(), P1))
    assert request_.resend() == (P1, Resend(request=ID, epoch=prefill(), first=0))
    request_.claim(claim(decode(), D1))
    request_.accept(entry(decode(), 0, 50, 51), D1)
    assert request_.acknowledge() == (D1, Acknowledge(request=ID, epoch=decode(), received=2))
    assert request_.resend() == (D1, Resend(request=ID, epoch=decode(), first=0)), "the hit count is still unknown"


def test_an_error_of_the_worker_is_the_requests(decoding: Request) -> None:
    failed = TokenEntry(request=ID, epoch=decode(), first=1, error=to_record(Overloaded("no", retry_after_s=3)))
    assert decoding.accept(failed, D1)
    assert isinstance(decoding.error, Overloaded)
    assert decoding.error.retry_after_s == 3


def test_there_is_one_end(decoding: Request) -> None:
    decoding.end(RequestEvent.CANCEL, 1, "cancelled")
    with pytest.raises(IllegalTransition):
        decoding.end(RequestEvent.FINISH, 2, "stop")
    assert not decoding.accept(entry(decode(), 1, 51), D1)
    assert decoding.finalize() == (D1, Finalize(request=ID, epoch=decode(), count=1, reason="cancelled"))


def test_claims_after_the_end_learn_the_final_count(decoding: Request) -> None:
    decoding.end(RequestEvent.CANCEL, 1, "cancelled")
    expected = ClaimReply(verdict="cancelled", delivered=pack_tokens([50]), hit_tokens=64, final=1)
    assert decoding.claim(claim(decode(delivery=2), D2)) == expected
    assert decoding.claim(claim(decode(), D1)) == expected
    assert decoding.claim(claim(prefill(), P1)).verdict == "stale"


def test_a_prefill_after_the_end_settles_what_ran_and_drops_what_did_not(request_: Request) -> None:
    request_.claim(claim(prefill(), P1))
    request_.accept(entry(prefill(), 0, 50, hit=0, finish="length"), P1)
    request_.end(RequestEvent.FINISH, 1, "length")
    reply = request_.claim(claim(prefill(delivery=2), P2))
    assert reply == ClaimReply(verdict="go", delivered=pack_tokens([50]), hit_tokens=0, final=1)

    never = Request(ID, max_output_tokens=10)
    never.publish()
    never.end(RequestEvent.CANCEL, 0, "cancelled")
    assert never.claim(claim(prefill(), P1)) == ClaimReply(verdict="cancelled", final=0)
    assert (never.claimed, never.finalize()) == (False, None)
