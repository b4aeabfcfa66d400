"""The benches' harness: spreads, order, aims and texts by hand-made values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.cli.bench.document import document
from shared.cli.bench.harness import Aim, Result, Spread, Table, interleaved, render, spread, write_json


def test_a_spread_is_median_and_range() -> None:
    assert spread([3.0, 1.0, 2.0, 10.0]) == Spread(median=2.5, low=1.0, high=10.0, samples=4)
    with pytest.raises(ValueError, match="no samples"):
        spread([])


def test_each_round_has_every_case_and_begins_with_another() -> None:
    order = list(interleaved(["a", "b", "c"], 4))
    rounds = [order[i : i + 3] for i in range(0, 12, 3)]
    assert rounds == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


@pytest.mark.parametrize(
    ("at_least", "reached", "met"), [(True, 10.0, True), (True, 9.9, False), (False, 1.5, True), (False, 1.6, False)]
)
def test_an_aim_has_a_direction(at_least: bool, reached: float, met: bool) -> None:
    assert Aim(says="", reached=reached, bound=10.0 if at_least else 1.5, at_least=at_least).met is met


def test_a_result_is_a_table_for_people_and_figures_for_programs(tmp_path: Path) -> None:
    aim = Aim(says="miss / hit", reached=12.5, bound=10.0, at_least=True)
    table = Table(title="T", columns=("size", "ms"), rows=(("1,000", "7"), ("30", "1,234")))
    result = Result(name="x", tables=(table,), figures={"1000": {"ms": 7}}, aims=(aim,))
    text = render(result, "one machine")
    assert "size      ms" in text
    assert "30     1,234" in text
    assert "reached  12.50 (at least 10)  miss / hit" in text
    write_json(tmp_path / "x.json", result, "one machine")
    written = json.loads((tmp_path / "x.json").read_text())
    assert written["figures"] == {"1000": {"ms": 7}}
    assert written["aims"][0]["met"] is True
    assert written["machine"] == "one machine"


def test_a_document_is_as_long_as_wanted_and_always_the_same() -> None:
    def two_tokens_a_word(text: str) -> int:
        return 2 * len(text.split())

    assert two_tokens_a_word(document(1_001, two_tokens_a_word)) == 1_000
    assert document(500, len) == document(500, len)
    assert document(50, two_tokens_a_word).startswith(document(20, two_tokens_a_word))
