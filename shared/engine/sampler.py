"""Draws the next token of one row. No state, no random generator: the noise is a function of (seed, position, token).

DIMENSION KEY
    V vocab, C candidates (tokens inside top-p)

Gumbel-max: the token with the largest logit / temperature + noise is a draw from the softmax. Each row is handled alone
in double precision, so a replay, a hit or a neighbour in the step draws the same token. numpy only.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from shared.contracts.messages import Sampling, TokenLogprob

GOLDEN: Final = 0x9E3779B97F4A7C15
"""Increment of SplitMix64: 2^64 over the golden ratio."""
MIX_A: Final = 0xBF58476D1CE4E5B9
MIX_B: Final = 0x94D049BB133111EB
MASK: Final = 2**64 - 1
MANTISSA_BITS: Final = 53
TOP_FIRST: Final = 1024
TOP_GROWTH: Final = 8
"""Top-p sorts this many candidates, and so many times more each time they do not reach it."""

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


def draw(logits_V: npt.NDArray[np.float32], sampling: Sampling, position: int) -> int:
    """The token at `position`. logits_V: finite. Equal logits: the lowest id wins."""
    if sampling.temperature <= 0.0:
        return int(np.argmax(logits_V))
    scaled = logits_V.astype(np.float64) / sampling.temperature
    candidates = _inside_top_p(scaled, sampling.top_p)
    score = scaled[candidates] + gumbel(sampling.seed, position, candidates)
    return int(candidates[np.argmax(score)])


def logprob_of(logits_V: npt.NDArray[np.float32], token: int, top: int) -> TokenLogprob:
    """Natural logarithms at temperature 1 of `token` and of the `top` most likely, lower ids first among equals."""
    exact = logits_V.astype(np.float64)
    logprobs = exact - _log_sum_exp(exact)
    best = _largest(logprobs, top) if top else np.empty(0, np.int64)
    return TokenLogprob(float(logprobs[token]), tuple((int(t), float(logprobs[t])) for t in best))


def gumbel(seed: int, position: int, tokens: Ids) -> Floats:
    """Standard Gumbel noise for these tokens at this position: -log(-log(u)), u in (0, 1) from SplitMix64."""
    key = _mix_int(_mix_int(seed & MASK) ^ (position * GOLDEN & MASK))
    with np.errstate(over="ignore"):
        bits = np.uint64(key) + (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(MIX_A)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(MIX_B)
        bits ^= bits >> np.uint64(31)
    uniform = ((bits >> np.uint64(64 - MANTISSA_BITS)).astype(np.float64) + 0.5) * 2.0**-MANTISSA_BITS
    noise: Floats = -np.log(-np.log(uniform))
    return noise


def _mix_int(value: int) -> int:
    """SplitMix64's finalizer after one increment."""
    value = (value + GOLDEN) & MASK
    value = (value ^ (value >> 30)) * MIX_A & MASK
    value = (value ^ (value >> 27)) * MIX_B & MASK
    return value ^ (value >> 31)


def _inside_top_p(scaled: Floats, top_p: float) -> Ids:
    """The smallest set of most likely tokens whose probabilities reach `top_p`, most likely first; at least one."""
    if top_p >= 1.0:
        return np.arange(len(scaled))
    log_total = _log_sum_exp(scaled)
    count = TOP_FIRST
    while True:
        order = _largest(scaled, count)
        reached = np.cumsum(np.exp(scaled[order] - log_total))
        if reached[-1] >= top_p or count >= len(scaled):
            return order[: int(np.searchsorted(reached, top_p)) + 1]
        count *= TOP_GROWTH


def _largest(values: Floats, count: int) -> Ids:
    """Ids of the `count` largest, largest first, lower ids first among equals."""
    if count < len(values):
        threshold = np.partition(values, len(values) - count)[len(values) - count]
        chosen = np.flatnonzero(values >= threshold)
    else:
        chosen = np.arange(len(values))
    return chosen[np.argsort(-values[chosen], kind="stable")][:count]


def _log_sum_exp(values: Floats) -> float:
    largest = values.max()
    return float(largest + np.log(np.exp(values - largest).sum()))
