"""First light: the whole path with the real model, through the official SDK, on one machine.

Right values come from outside: the prompt's ids from a tokenizer and template spelled out here, the answers of a hit
from a fresh account that hits nothing, the money from the price list by hand.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import asyncpg
import httpx2
import openai
import pytest
import tokenizers

from tests.e2e.instance import Instance

pytestmark = [pytest.mark.model, pytest.mark.servers]

MODEL = "smollm2-135m-instruct"
BLOCK_TOKENS = 64
ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "LICENSE").read_text() + (ROOT / "GLOSSARY.md").read_text()[:3_200]
"""About 3,000 tokens."""
QUESTIONS = (
    "What does this document allow me to do?",
    "And what must I do when I pass the work on to somebody else?",
    "Does it say anything about patents? Answer in one sentence.",
)
TORCH_FREE = ("gateway", "billing", "cache_index")


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    data = tmp_path_factory.mktemp("first-light")
    data.parent.chmod(0o755)
    running = Instance(data)
    running.up()
    try:
        yield running
    finally:
        running.down()


@pytest.fixture(scope="module")
def tokenizer(instance: Instance) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(instance.data / "model" / "tokenizer.json"))


def chat_ids(tokenizer: tokenizers.Tokenizer, messages: list[dict[str, str]]) -> list[int]:
    """SmolLM2's chat template, spelled out; it ends where the assistant's answer begins."""
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return tokenizer.encode(text + "<|im_start|>assistant\n", add_special_tokens=False).ids


def ask(client: openai.OpenAI, messages: list[dict[str, str]], **options: Any) -> Any:
    settings = {"temperature": 0, "max_tokens": 70, "logprobs": True, "top_logprobs": 3} | options
    return client.chat.completions.create(model=MODEL, messages=messages, **settings)  # type: ignore[arg-type]


def tokens_of(answer: Any) -> list[tuple[str, float, tuple[tuple[str, float], ...]]]:
    return [
        (entry.token, entry.logprob, tuple((top.token, top.logprob) for top in entry.top_logprobs))
        for entry in answer.choices[0].logprobs.content
    ]


def cached(answer: Any) -> int:
    usage = answer.usage
    assert usage.prompt_cache_hit_tokens == usage.prompt_tokens_details.cached_tokens
    assert usage.prompt_cache_hit_tokens + usage.prompt_cache_miss_tokens == usage.prompt_tokens
    return int(usage.prompt_cache_hit_tokens)


def common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def conversation(client: openai.OpenAI) -> Iterator[tuple[list[dict[str, str]], Any]]:
    """Three turns over the document: (messages sent, answer)."""
    messages = [{"role": "system", "content": f"Answer from this document.\n\n{DOCUMENT}"}]
    for question in QUESTIONS:
        messages = [*messages, {"role": "user", "content": question}]
        answer = ask(client, messages)
        yield messages, answer
        messages = [*messages, {"role": "assistant", "content": answer.choices[0].message.content}]


def test_three_turns_hit_all_earlier_blocks_and_answer_as_if_they_had_not(
    instance: Instance, tokenizer: tokenizers.Tokenizer
) -> None:
    client = instance.client(instance.account("paying", "--credit", "10"))
    known: list[int] = []
    turns = list(conversation(client))
    for number, (messages, answer) in enumerate(turns, start=1):
        prompt = chat_ids(tokenizer, messages)
        assert answer.usage.prompt_tokens == len(prompt)
        expected = common_prefix(known, prompt) // BLOCK_TOKENS * BLOCK_TOKENS
        assert cached(answer) == expected, f"turn {number}"
        said = tokenizer.encode(answer.choices[0].message.content, add_special_tokens=False).ids
        # The KV of the last token of an answer was never computed: nothing followed it.
        known = [*prompt, *said[: answer.usage.completion_tokens - 1]]
    first_prompt = len(chat_ids(tokenizer, turns[0][0]))
    assert 2_800 < first_prompt < 3_400
    assert cached(turns[1][1]) >= first_prompt // BLOCK_TOKENS * BLOCK_TOKENS

    for number, (messages, answer) in enumerate(turns, start=1):
        fresh = instance.client(instance.account(f"fresh-{number}", "--credit", "10"))
        cold = ask(fresh, messages)
        assert cached(cold) == 0
        assert cold.choices[0].message.content == answer.choices[0].message.content
        assert tokens_of(cold) == tokens_of(answer), f"turn {number}: bit-equal log probabilities"


def test_sampled_answers_are_the_same_from_a_hit_and_from_a_miss(instance: Instance) -> None:
    messages = [{"role": "user", "content": f"Tell a story about this text.\n{DOCUMENT[:3000]}"}]
    paying = instance.client(instance.account("sampled", "--credit", "10"))
    cold = ask(paying, messages, temperature=0.9, top_p=0.95, seed=7)
    warm = ask(paying, messages, temperature=0.9, top_p=0.95, seed=7)
    other = ask(paying, messages, temperature=0.9, top_p=0.95, seed=8)
    assert (cached(cold), cached(warm) > 0) == (0, True)
    assert tokens_of(cold) == tokens_of(warm)
    assert tokens_of(other) != tokens_of(warm)


def test_the_stream_is_the_whole_answer_in_pieces(instance: Instance) -> None:
    client = instance.client(instance.account("streaming", "--credit", "10"))
    messages = [{"role": "user", "content": "Name three colours."}]
    whole = ask(client, messages)
    chunks = list(ask(client, messages, stream=True))
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_stop_string_ends_the_answer_and_the_count(instance: Instance) -> None:
    client = instance.client(instance.account("stopping", "--credit", "10"))
    messages = [{"role": "user", "content": "Name three colours."}]
    whole = ask(client, messages)
    text = whole.choices[0].message.content
    stop = text[len(text) // 2 : len(text) // 2 + 4]
    stopped = ask(client, messages, stop=[stop])
    assert stopped.choices[0].message.content == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage.completion_tokens < whole.usage.completion_tokens


def test_one_token_answers_end_at_prefill(instance: Instance) -> None:
    client = instance.client(instance.account("short", "--credit", "10"))
    answer = ask(client, [{"role": "user", "content": "Say yes."}], max_tokens=1)
    assert answer.usage.completion_tokens == 1
    assert answer.choices[0].finish_reason == "length"


def balance(instance: Instance, api_key: str) -> dict[str, Any]:
    url = instance.status()["gateway_url"] + "/user/balance"
    reply = httpx2.get(url, headers={"Authorization": f"Bearer {api_key}"}, timeout=10)
    assert reply.status_code == 200
    found: dict[str, Any] = json.loads(reply.text)
    return found


async def settled_balance(instance: Instance, api_key: str, expected: Decimal) -> Decimal:
    """The client does not wait for the settlement; this does, within a bound."""
    total = Decimal(-1)
    for _ in range(100):
        total = Decimal((await asyncio.to_thread(balance, instance, api_key))["balance_infos"][0]["total_balance"])
        if total == expected:
            break
        await asyncio.sleep(0.1)
    return total


async def test_money_is_the_price_list_times_the_usage(instance: Instance) -> None:
    """Off-peak prices of DeepSeek's flash, USD a million tokens: hit 0.003, miss 0.15, output 0.60."""
    api_key = instance.account("money", "--credit", "1")
    client = instance.client(api_key)
    spent = Decimal(0)
    for _ in range(2):
        usage = ask(client, [{"role": "user", "content": DOCUMENT[:4000]}]).usage
        spent += (
            Decimal("0.003") * usage.prompt_cache_hit_tokens
            + Decimal("0.15") * usage.prompt_cache_miss_tokens
            + Decimal("0.60") * usage.completion_tokens
        ) / 1_000_000
        await settled_balance(instance, api_key, 1 - spent)
    assert usage.prompt_cache_hit_tokens > 0
    assert await settled_balance(instance, api_key, 1 - spent) == 1 - spent


def database_url(instance: Instance) -> str:
    """From the environment of the running cache_index process."""
    pid = next(s["pid"] for s in instance.status()["services"] if s["name"].startswith("cache_index"))
    pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(pair.decode().split("=", 1) for pair in pairs if b"=" in pair)["DEEPSERVE_DATABASE_URL"]


async def index_rows(instance: Instance) -> int:
    connection = await asyncpg.connect(database_url(instance))
    try:
        return int(await connection.fetchval("SELECT count(*) FROM cache_index.blocks"))
    finally:
        await connection.close()


async def test_a_trial_account_neither_reads_nor_writes_the_pool(instance: Instance) -> None:
    messages = [{"role": "user", "content": DOCUMENT[:6000]}]
    paying = instance.client(instance.account("payer", "--credit", "10"))
    warm = [ask(paying, messages), ask(paying, messages)]
    assert cached(warm[1]) > 0
    objects, rows = instance.pool_objects(), await index_rows(instance)
    assert rows > 0
    assert objects

    trial = instance.client(instance.account("trial", "--grant", "10"))
    answers = [ask(trial, messages), ask(trial, messages)]
    assert [cached(a) for a in answers] == [0, 0]
    assert tokens_of(answers[0]) == tokens_of(warm[1])
    assert instance.pool_objects() == objects
    assert await index_rows(instance) == rows


def test_a_restart_keeps_the_pool_the_key_and_the_isolation(instance: Instance) -> None:
    messages = [{"role": "user", "content": f"Summarise.\n{DOCUMENT[:6000]}"}]
    api_key = instance.account("restarted", "--credit", "10")
    before = ask(instance.client(api_key), messages)
    demo_key = instance.status()["api_key"]
    instance.down()
    instance.up()
    assert instance.status()["api_key"] == demo_key
    after = ask(instance.client(api_key), messages)
    expected = (before.usage.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert cached(after) == expected
    assert tokens_of(after) == tokens_of(before)
    stranger = ask(instance.client(instance.account("stranger", "--credit", "10")), messages)
    assert cached(stranger) == 0


async def test_a_client_that_leaves_stops_the_work_and_pays_for_what_was_produced(instance: Instance) -> None:
    api_key = instance.account("leaving", "--credit", "1")
    client = instance.client(api_key)
    stream = ask(client, [{"role": "user", "content": "Count from one to one thousand."}], stream=True, max_tokens=4000)
    for _ in itertools.islice(stream, 10):
        pass
    stream.close()
    most = 1 - (Decimal("0.15") * 60 + Decimal("0.60") * 2000) / 1_000_000
    for _ in range(200):
        info = (await asyncio.to_thread(balance, instance, api_key))["balance_infos"][0]
        total = Decimal(info["total_balance"])
        if total > most:  # the hold for 4,000 tokens was given back
            break
        await asyncio.sleep(0.1)
    assert most < total <= 1 - Decimal("0.60") * 9 / 1_000_000


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"model": "nope", "messages": [{"role": "user", "content": "x"}]}, 400),
        ({"model": MODEL, "messages": []}, 400),
        ({"model": MODEL}, 422),
        ({"model": MODEL, "messages": [{"role": "user", "content": "x " * 9000}]}, 400),
    ],
)
def test_bad_requests_get_deepseeks_error_body(instance: Instance, body: dict[str, Any], status: int) -> None:
    found = instance.status()
    headers = {"Authorization": f"Bearer {found['api_key']}"}
    reply = httpx2.post(found["gateway_url"] + "/chat/completions", json=body, headers=headers, timeout=30)
    assert reply.status_code == status, reply.text
    assert set(json.loads(reply.text)["error"]) == {"message", "type", "param", "code"}


def test_wrong_keys_and_empty_accounts_are_turned_away(instance: Instance) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(openai.AuthenticationError) as unknown:
        ask(instance.client("sk-" + "0" * 28 + "abcd"), messages)
    assert "****abcd is invalid" in str(unknown.value)
    with pytest.raises(openai.APIStatusError) as poor:
        ask(instance.client(instance.account("poor")), messages)
    assert poor.value.status_code == 402
    assert "Insufficient Balance" in str(poor.value)


def test_only_workers_load_torch_and_memory_is_bounded(instance: Instance) -> None:
    seen = {}
    for service in instance.status()["services"]:
        name, pid = service["name"], service["pid"]
        if not name.startswith((*TORCH_FREE, "prefill", "decode")):
            continue
        maps = Path(f"/proc/{pid}/maps").read_text()
        seen[name] = "libtorch" in maps
        peak = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmHWM"))
        print(name, peak)
    assert {name for name, loaded in seen.items() if not loaded} == {n for n in seen if n.startswith(TORCH_FREE)}
    assert len(seen) == 5


def test_secrets_belong_to_the_owner(instance: Instance) -> None:
    for path in (instance.data / "secrets").iterdir():
        assert os.stat(path).st_mode & 0o077 == 0, path
