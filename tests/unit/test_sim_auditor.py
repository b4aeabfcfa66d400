"""The auditor notices: exchanges and books with one thing wrong at a time. And the shrinker keeps what matters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.sim import oracle
from tests.sim.auditor import Auditor, Balance, UsageRow
from tests.sim.plan import Client, Plan, Trouble, Turn, draw
from tests.sim.shrink import kind_of, shrink
from tests.sim.simulation import Verdict
from tests.sim.workload import Exchange

TURN = Turn(text="more", pause_s=0.0, max_tokens=8)
PLAN = Plan(seed=1, accounts=("paid", "trial"), clients=(Client(0, 0.0, "you are a cat", (TURN,)),))
MESSAGES = [{"role": "system", "content": "you are a cat " * 4}, {"role": "user", "content": "more"}]
PROMPT = oracle.prompt_tokens(MESSAGES)
ANSWER = oracle.answer(PROMPT, 8, temperature=0.0, seed=0)
COST = (len(PROMPT) * 150) + 8 * 600


def exchange(**change: Any) -> Exchange:
    usage = {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 8,
        "total_tokens": len(PROMPT) + 8,
        "prompt_cache_hit_tokens": 0,
        "prompt_cache_miss_tokens": len(PROMPT),
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    right = Exchange(
        number=0,
        account=0,
        user=None,
        messages=MESSAGES,
        turn=TURN,
        asked_at_s=1.0,
        prompt=PROMPT,
        ended_at_s=2.0,
        ended="whole",
        request="r",
        status=200,
        text=oracle.text_of(ANSWER).lstrip("\n"),
        finish="length",
        usage=usage | change.pop("usage", {}),
        done=True,
    )
    return replace(right, **change)


def row(**change: Any) -> UsageRow:
    right = UsageRow("r", 0, len(PROMPT), 0, len(PROMPT), 0, 8, COST, False)
    return replace(right, **change)


def balances(**change: Any) -> list[Balance]:
    right = Balance(10**9, 10**9 - COST, 0, COST, 0)
    return [replace(right, **change), Balance(0, 0, 0, 0, 0)]


def test_what_is_right_has_no_faults() -> None:
    auditor = Auditor(PLAN, 60.0)
    auditor.check_answers([exchange()])
    auditor.check_books([exchange()], [row()], balances())
    assert auditor.faults == []


@pytest.mark.parametrize(
    "wrong",
    [
        exchange(text=oracle.text_of(ANSWER)[:-1] + "?"),
        exchange(text=oracle.text_of(ANSWER)[:-1]),
        exchange(text=oracle.text_of([*ANSWER, 5])),
        exchange(text=oracle.text_of([*ANSWER[:3], ANSWER[2], *ANSWER[3:]])),
        exchange(text=oracle.text_of([*ANSWER[:3], *ANSWER[4:]])),
        exchange(usage={"completion_tokens": 9, "total_tokens": len(PROMPT) + 9}),
        exchange(usage={"prompt_cache_hit_tokens": 16}),
        exchange(
            usage={
                "prompt_cache_hit_tokens": 16,
                "prompt_cache_miss_tokens": len(PROMPT) - 16,
                "prompt_tokens_details": {"cached_tokens": 16},
            }
        ),
        exchange(finish="stop"),
        exchange(finish="insufficient_system_resource"),
        exchange(done=False),
        exchange(ended="stuck"),
        exchange(ended_at_s=100.0),
        exchange(ended="error", status=500, error={"message": "no"}),
        exchange(ended="error", status=503, error={"message": "no"}),
        exchange(ended="lost"),
        exchange(faults=["a frame after [DONE]"]),
    ],
)
def test_a_wrong_answer_is_noticed(wrong: Exchange) -> None:
    auditor = Auditor(PLAN, 60.0)
    auditor.check_answers([wrong])
    assert auditor.faults


@pytest.mark.parametrize(
    ("rows", "money"),
    [
        ([], balances()),
        ([row(), row()], balances()),
        ([row(), row(request="nobody")], balances()),
        ([row(output=7, amount_nano=COST - 600)], balances(spendable_nano=10**9 - COST + 600, spent_nano=COST - 600)),
        ([row(amount_nano=COST + 1)], balances(spendable_nano=10**9 - COST - 1, spent_nano=COST + 1)),
        ([row(cached=16)], balances()),
        ([row(uncached=0, not_eligible=len(PROMPT))], balances()),
        ([row(account=1)], balances()),
        ([row()], balances(held_nano=5, spendable_nano=10**9 - COST - 5)),
        ([row()], balances(spendable_nano=10**9)),
        ([row()], balances(spent_nano=COST + 1)),
    ],
)
def test_wrong_books_are_noticed(rows: list[UsageRow], money: list[Balance]) -> None:
    auditor = Auditor(PLAN, 60.0)
    auditor.check_books([exchange()], rows, money)
    assert auditor.faults


def test_a_failing_plan_is_shrunk_to_what_matters() -> None:
    plan = draw(5)
    assert plan.requests > 3
    guilty = Trouble(kind="crash", at_s=1.0, process="billing")
    plan = replace(plan, troubles=(Trouble("late", 0.5), guilty, Trouble("store_down", 2.0)))

    def run(plan: Plan) -> Verdict:
        faults = ["exchange 7 (r) took 8.25 s"] if guilty in plan.troubles and plan.requests >= 2 else []
        return Verdict(plan, faults=faults)

    smallest = shrink(run(plan), run)
    assert smallest.plan.troubles == (guilty,)
    assert smallest.plan.requests == 2
    assert kind_of("exchange 7 (r) took 8.25 s") == kind_of("exchange 12 (q) took 99 s")


def test_a_plan_is_the_seeds() -> None:
    assert draw(3) == draw(3) != draw(4)
    assert draw(3, troubles=False).calm
