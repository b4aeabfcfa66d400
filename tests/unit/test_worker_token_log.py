"""What a worker keeps for a gateway: gaps, acknowledgements, resends."""

from __future__ import annotations

import pytest

from shared.contracts import limits
from shared.contracts.epoch import Epoch, Stage
from shared.contracts.errors import Overloaded
from shared.contracts.ids import GatewayId, RequestId
from shared.contracts.messages import PrefillTiming, TokenLogprob
from shared.worker.token_log import TokenLog

EPOCH = Epoch(1, Stage.DECODE, 1)


def make_log(hit_tokens: int | None = None) -> TokenLog:
    return TokenLog(RequestId("r"), EPOCH, GatewayId("g"), hit_tokens=hit_tokens)


def test_a_resend_says_again_exactly_what_is_kept() -> None:
    log = make_log()
    log.append(0, [10, 11, 12], None)
    log.append(3, [13], None)
    log.acknowledge(2)
    for asked, first, tokens in [(0, 2, (12, 13)), (2, 2, (12, 13)), (3, 3, (13,)), (4, 4, ()), (9, 4, ())]:
        (entry,) = log.entries_from(asked)
        assert (entry.first, entry.tokens, entry.epoch) == (first, tokens, EPOCH)


def test_acknowledgements_only_move_forward_and_never_past_what_was_said() -> None:
    log = make_log()
    log.append(0, [1, 2, 3], None)
    log.acknowledge(2)
    log.acknowledge(1)
    log.acknowledge(4)
    assert (log.acknowledged, log.next_index) == (2, 3)


def test_a_gap_in_the_engines_numbers_is_a_bug() -> None:
    log = make_log()
    log.append(0, [1], None)
    with pytest.raises(ValueError, match="token 2 follows 0"):
        log.append(2, [1], None)


def test_the_log_is_bounded_by_a_gateway_that_acknowledges_nothing() -> None:
    log = make_log()
    log.append(0, [0] * limits.TOKEN_LOG_MAX, None)
    with pytest.raises(Overloaded):
        log.append(limits.TOKEN_LOG_MAX, [0], None)


def test_entries_have_log_probabilities_for_all_their_tokens_or_for_none() -> None:
    log = make_log()
    p = TokenLogprob(-0.5, ((7, -0.5),))
    log.append(0, [1, 2], None)
    log.append(2, [3, 4], [p, p])
    entries = log.entries_from(0)
    assert [(e.first, e.tokens, e.logprobs) for e in entries] == [(0, (1, 2), None), (2, (3, 4), (p, p))]


def test_hits_ride_with_token_0_and_the_finish_with_the_last() -> None:
    log = make_log(hit_tokens=128)
    log.timing = PrefillTiming(queued_s=0.0, lookup_s=0.1, read_s=0.2, compute_s=0.3)
    log.append(0, [1, 2], None)
    log.finish = "stop"
    (whole,) = log.entries_from(0)
    assert (whole.hit_tokens, whole.timing, whole.finish) == (128, log.timing, "stop")
    (rest,) = log.entries_from(1)
    assert (rest.hit_tokens, rest.timing, rest.finish) == (None, None, "stop")
    (nothing,) = log.entries_from(2)
    assert (nothing.tokens, nothing.finish) == ((), "stop")
