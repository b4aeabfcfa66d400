"""A gapless prefix without repeats of one token sequence, whatever arrives (invariant 3)."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.token_log import TokenLog
from shared.contracts.block import pack_tokens
from shared.contracts.errors import InternalError
from shared.contracts.messages import TokenLogprob

SEQUENCE = [7, 7, 8, 9, 1, 0, 49_151, 3]


def test_what_continues_is_new_what_repeats_is_not() -> None:
    log = TokenLog(10)
    assert log.add(0, SEQUENCE[:3], None) == 3
    assert log.add(1, SEQUENCE[1:5], None) == 2
    assert log.add(0, SEQUENCE[:2], None) == 0
    assert (log.received, log.waiting) == (5, 5)
    assert [token for token, _ in log.take()] == SEQUENCE[:5]
    assert log.take() == []
    assert log.packed() == pack_tokens(SEQUENCE[:5])


def test_nothing_past_a_gap_enters() -> None:
    log = TokenLog(10)
    log.add(0, [5], None)
    assert log.add(2, [6, 7], None) == 0
    assert log.received == 1


def test_a_repeat_that_differs_is_an_error_and_changes_nothing() -> None:
    log = TokenLog(10)
    log.add(0, [5, 6], None)
    with pytest.raises(InternalError, match="diverged"):
        log.add(1, [7, 8], None)
    assert log.received == 2


def test_more_than_granted_is_an_error() -> None:
    log = TokenLog(3)
    log.add(0, [1, 2, 3], None)
    assert log.add(1, [2, 3], None) == 0
    with pytest.raises(InternalError, match="granted 3"):
        log.add(3, [4], None)


def test_log_probabilities_stay_with_their_tokens() -> None:
    log = TokenLog(10)
    one, two, three = (TokenLogprob(logprob=-float(n), top=((n, -float(n)),)) for n in (1, 2, 3))
    log.add(0, [1, 2], [one, two])
    log.add(1, [2, 3], [two, three])
    assert log.take() == [(1, one), (2, two), (3, three)]
    with pytest.raises(InternalError, match="1 log probabilities for 2 tokens"):
        log.add(3, [4, 5], [one])


@given(st.integers(0, 2**32), st.integers(1, 60))
def test_any_order_of_any_pieces_gives_a_prefix_of_the_sequence(seed: int, pieces: int) -> None:
    draw = random.Random(seed)
    sequence = [draw.randrange(100) for _ in range(30)]
    log = TokenLog(30)
    seen: list[int] = []
    for _ in range(pieces):
        first = draw.randrange(30)
        log.add(first, sequence[first : first + draw.randrange(1, 6)], None)
        seen += [token for token, _ in log.take()]
        assert seen == sequence[: log.received]
