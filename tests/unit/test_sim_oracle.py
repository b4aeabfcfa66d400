"""The auditor's own formulas against the parts that they judge: both ways to the same numbers, by different code."""

from __future__ import annotations

import json
import random

import pytest

from services.billing import price_list, pricing
from services.gateway.prepare import Models
from shared.contracts.messages import Sampling
from shared.contracts.ports import SequenceSpec
from shared.contracts.usage import Usage
from shared.engine.hash_engine import HashEngine
from tests.sim import model, oracle

MESSAGES = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "Say  hello,\n please! {x} ~"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Again"},
]


async def test_the_tokens_of_a_prompt() -> None:
    body = json.dumps({"model": model.NAME, "messages": MESSAGES, "max_tokens": 5}).encode()
    prepared = await Models([model.served_model()]).prepare(body)
    assert oracle.prompt_tokens(MESSAGES) == prepared.tokens


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_tokens_of_an_answer(temperature: float) -> None:
    prompt = oracle.prompt_tokens(MESSAGES)
    engine = HashEngine(
        weights="sim/1",
        pages=64,
        block_tokens=model.BLOCK_TOKENS,
        vocabulary=model.VOCABULARY,
        context_tokens=model.CONTEXT_TOKENS,
    )
    sampling = Sampling(temperature=temperature, top_p=1.0, seed=2**62 + 5, stop_tokens=(model.STOP_TOKEN,))
    spec = SequenceSpec(
        request="r",  # type: ignore[arg-type]
        tokens=prompt,
        prompt_tokens=len(prompt),
        max_new_tokens=300,
        sampling=sampling,
    )
    engine.add(spec)
    tokens: list[int] = []
    while produced := engine.step(64):
        tokens += [token for news in produced for token in news.tokens]
    assert len(tokens) == 300
    assert oracle.answer(prompt, 300, temperature=temperature, seed=2**62 + 5) == tokens
    shown = model.served_model().text.tokenizer.stream()
    assert oracle.text_of(tokens) == "".join("" if t >= model.FIRST_MARKER else shown.step(t) for t in tokens)


def test_the_cost_of_a_request() -> None:
    draw = random.Random(1)
    for _ in range(200):
        hit, miss = sorted(f"{draw.uniform(0, 9):.{draw.randrange(9)}f}" for _ in range(2))
        if float(hit) > float(miss):
            continue
        output = f"{draw.uniform(0, 9):.{draw.randrange(9)}f}"
        text = f'[[price]]\nmodel = "m"\ncurrency = "USD"\nhit = "{hit}"\nmiss = "{miss}"\noutput = "{output}"'
        prices = price_list.parse(text, 1)["m", "USD"]
        hits, misses, out = (draw.randrange(5_000) for _ in range(3))
        usage = Usage(cached=hits, uncached=misses, not_eligible=0, output=out)
        assert oracle.cost_nano(hits, misses, out, (hit, miss, output)) == pricing.cost_nano(prices, usage)
