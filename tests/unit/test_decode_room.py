"""Pages promised to answers, worked out by hand for blocks of 64."""

from __future__ import annotations

import pytest

from services.decode.room import pages_promised


@pytest.mark.parametrize(
    ("prompt", "known", "answer_max", "whole", "pages"),
    [
        (64, 1, 64, False, 2),
        (64, 1, 65, False, 3),
        (100, 1, 8_000, False, (100 + 1_025 + 63) // 64),
        (100, 1, 8_000, True, (100 + 8_000 + 63) // 64),
        (100, 7_500, 8_000, False, (100 + 8_000 + 63) // 64),
        (1, 1, 1, False, 1),
    ],
)
def test_a_promise_covers_what_is_expected_or_all(
    prompt: int, known: int, answer_max: int, whole: bool, pages: int
) -> None:
    assert pages_promised(prompt, known, answer_max, 64, whole=whole) == pages
