"""The sampler against formulas written another way."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from shared.contracts.messages import Sampling
from shared.engine.sampler import _inside_top_p, _mix_int, draw, gumbel, logprob_of

WORD = 2**64


def sampling(temperature: float, top_p: float = 1.0, seed: int = 11) -> Sampling:
    return Sampling(temperature=temperature, top_p=top_p, seed=seed, stop_tokens=())


def splitmix64(state: int) -> int:
    """Vigna's reference, in plain integers: the output after one step from `state`."""
    z = (state + 0x9E3779B97F4A7C15) % WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % WORD
    return z ^ (z >> 31)


def test_the_mixer_gives_published_values() -> None:
    assert _mix_int(1234567) == 6457827717110365317
    assert _mix_int((1234567 + 0x9E3779B97F4A7C15) % WORD) == 3203168211198807973


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (7, 1), (2**63 + 5, 8191), (-3, 100)])
def test_noise_is_the_counter_based_formula(seed: int, position: int) -> None:
    tokens = np.array([0, 1, 2, 77, 49151])
    key = splitmix64(splitmix64(seed % WORD) ^ (position * 0x9E3779B97F4A7C15) % WORD)
    expected = []
    for token in tokens.tolist():
        bits = splitmix64((key + token * 0x9E3779B97F4A7C15) % WORD)
        uniform = ((bits >> 11) + 0.5) / 2**53
        expected.append(-math.log(-math.log(uniform)))
    assert gumbel(seed, position, tokens) == pytest.approx(expected, rel=1e-12)


def test_noise_of_a_token_does_not_depend_on_the_others() -> None:
    everything = gumbel(5, 9, np.arange(49152))
    assert gumbel(5, 9, np.array([300, 7])).tolist() == [everything[300], everything[7]]


def test_greedy_takes_the_largest_and_the_lowest_id_among_equals() -> None:
    assert draw(np.array([1.0, 3.0, 2.0, 3.0], np.float32), sampling(0.0), 5) == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = [0.0, 1.0, 2.0, -1.0, 0.5]
    draws = 6000
    counts = [0] * len(logits)
    for position in range(draws):
        counts[draw(np.array(logits, np.float32), sampling(temperature), position)] += 1
    weights = [math.exp(x / temperature) for x in logits]
    chi_square = sum(
        (count - draws * w / sum(weights)) ** 2 / (draws * w / sum(weights))
        for count, w in zip(counts, weights, strict=True)
    )
    assert chi_square < 23.5  # 4 degrees of freedom: beyond it once in 10,000; the draws are fixed by the seed


def test_seeds_give_other_draws() -> None:
    logits = np.zeros(1000, np.float32)
    drawn = {draw(logits, sampling(1.0, seed=seed), 3) for seed in range(20)}
    assert len(drawn) > 15


def test_neighbouring_positions_are_not_correlated() -> None:
    logits = np.zeros(2, np.float32)
    bits = [draw(logits, sampling(1.0), position) for position in range(4000)]
    changes = sum(a != b for a, b in pairwise(bits))
    assert abs(changes - 2000) < 4 * math.sqrt(1000)


@pytest.mark.parametrize("top_p", [0.0, 0.1, 0.5, 0.9, 0.999, 1.0 - 1e-12])
def test_top_p_is_the_smallest_sufficient_set(top_p: float) -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(size=3000) * 3
    probabilities = np.exp(logits) / np.exp(logits).sum()
    order = sorted(range(3000), key=lambda i: -probabilities[i])
    expected, mass = [], 0.0
    for i in order:
        expected.append(i)
        mass += probabilities[i]
        if mass >= top_p:
            break
    got = _inside_top_p(logits, top_p).tolist()
    assert got[: len(expected) - 1] == expected[:-1]
    assert abs(len(got) - len(expected)) <= (2 if top_p > 0.9999 else 0)


def test_top_p_looks_beyond_the_first_thousand() -> None:
    assert len(_inside_top_p(np.zeros(5000), 0.49999)) == 2500


def test_draws_stay_inside_top_p() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05])).astype(np.float32)
    drawn = {draw(logits, sampling(1.0, top_p=0.75), position) for position in range(300)}
    assert drawn == {0, 1}


def test_top_p_and_temperature_use_the_scaled_distribution() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2])).astype(np.float32)
    drawn = {draw(logits, sampling(0.1, top_p=0.99), position) for position in range(300)}
    assert drawn == {0}  # 0.5^10 against 0.3^10: the first has 0.994


def test_logprobs_are_exact_at_temperature_one() -> None:
    logits = [2.0, -1.0, 0.5, 2.0]
    total = math.log(sum(math.exp(x) for x in logits))
    got = logprob_of(np.array(logits, np.float32), 2, 3)
    assert got.logprob == pytest.approx(0.5 - total, abs=1e-12)
    assert [token for token, _ in got.top] == [0, 3, 2]
    assert [value for _, value in got.top] == pytest.approx([2 - total, 2 - total, 0.5 - total], abs=1e-12)


def test_logprobs_without_a_list() -> None:
    assert logprob_of(np.zeros(4, np.float32), 1, 0).top == ()


def test_huge_logits_do_not_overflow() -> None:
    assert logprob_of(np.array([3e4, 0.0], np.float32), 0, 1).logprob == 0.0
