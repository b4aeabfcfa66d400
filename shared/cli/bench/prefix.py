"""`deepserve bench prefix`: time to first token of a prefix miss against a hit, for the same prompt.

Each repetition asks under a `user_id` that was never used, which is a namespace of its own: its first request misses
honestly, its second hits every full block of the prompt. Sizes are interleaved. The hit's parts are the service's own
clock; the tail's compute is what a hit would cost if everything around it were free.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from shared.cli.bench.client import Answer, ChatClient
from shared.cli.bench.document import document
from shared.cli.bench.harness import Aim, Result, Spread, Table, interleaved, milliseconds, spread
from shared.cli.bench.target import Target
from shared.cli.failure import CommandFailed
from shared.cli.up import MODEL
from shared.contracts import limits
from shared.text.tokenizer import Tokenizer

SIZES: Final = (1_000, 3_000, 7_000)
SIZES_QUICK: Final = (1_000, 3_000)
REPETITIONS: Final = 7
REPETITIONS_QUICK: Final = 3
AIM_SIZE: Final = 3_000
AIM_SPEEDUP: Final = 10.0
AIM_OVER_COMPUTE: Final = 1.5
ANSWER_TOKENS: Final = 4
HIT_ATTEMPTS_MAX: Final = 5
"""The first tries of a hit may come before the miss's last block was committed; they are not counted."""
HIT_RETRY_S: Final = 0.2
PARTS: Final = (
    *("tag", "prepare", "queue", "hold", "worker_queue"),
    *("lookup", "read", "compute", "delivery", "handoff"),
)


@dataclass
class Case:
    """Samples of one size."""

    tokens: int
    prompt: str
    misses: list[Answer] = field(default_factory=list)
    hits: list[Answer] = field(default_factory=list)
    late: int = 0


def measure(target: Target, quick: bool) -> Result:
    client = ChatClient(target.gateway_url, target.api_key, MODEL)
    try:
        cases = _cases(client, target, SIZES_QUICK if quick else SIZES)
        repetitions = REPETITIONS_QUICK if quick else REPETITIONS
        for number, case in enumerate(interleaved(cases, repetitions), start=1):
            sys.stderr.write(f"  {number} of {len(cases) * repetitions}: {case.tokens:,} tokens, miss and hit\n")
            _repeat(client, case)
    finally:
        client.close()
    return _result(cases)


def _cases(client: ChatClient, target: Target, sizes: Sequence[int]) -> list[Case]:
    """Prompts of the wanted sizes, the chat template's own tokens included. Its first request also warms the path."""
    tokenizer = Tokenizer.load(target.instance.model / "tokenizer.json")

    def count(text: str) -> int:
        return len(tokenizer.encode_text(text))

    probe = "Hello."
    wrapping = client.ask(probe, max_tokens=ANSWER_TOKENS, user_id=_fresh_user()).prompt_tokens - count(probe)
    return [Case(size, _prompt(size - wrapping, count)) for size in sizes]


def _prompt(tokens: int, count: Callable[[str], int]) -> str:
    return document(tokens, count)


def _fresh_user() -> str:
    return f"bench-{uuid.uuid4()}"


def _repeat(client: ChatClient, case: Case) -> None:
    user = _fresh_user()
    miss = client.ask(case.prompt, max_tokens=ANSWER_TOKENS, user_id=user)
    if miss.hit_tokens:
        raise CommandFailed(f"a namespace that was never used hit {miss.hit_tokens} tokens: isolation is broken")
    case.misses.append(miss)
    expected = (miss.prompt_tokens - 1) // limits.BLOCK_TOKENS_DEFAULT * limits.BLOCK_TOKENS_DEFAULT
    for _ in range(HIT_ATTEMPTS_MAX):
        hit = client.ask(case.prompt, max_tokens=ANSWER_TOKENS, user_id=user)
        if hit.hit_tokens == expected:
            case.hits.append(hit)
            return
        case.late += 1
        time.sleep(HIT_RETRY_S)
    raise CommandFailed(
        f"the second request hit {hit.hit_tokens} of {expected} tokens: is the account paid, the store up?"
    )


def _result(cases: Sequence[Case]) -> Result:
    misses = {case.tokens: spread([a.first_token_s for a in case.misses]) for case in cases}
    hits = {case.tokens: spread([a.first_token_s for a in case.hits]) for case in cases}
    parts = {case.tokens: _parts(case.hits) for case in cases}
    aims = [
        Aim(
            says=f"miss / hit, time to first token at {AIM_SIZE:,} tokens",
            reached=misses[AIM_SIZE].median / hits[AIM_SIZE].median,
            bound=AIM_SPEEDUP,
            at_least=True,
        )
    ]
    aims += [
        Aim(
            says=f"hit's time to first token / its tail's compute at {case.tokens:,} tokens",
            # Both are of one request, so its noise cancels out: the median of the ratios.
            reached=spread([hit.first_token_s / hit.timing["compute_s"] for hit in case.hits]).median,
            bound=AIM_OVER_COMPUTE,
            at_least=False,
        )
        for case in cases
        if "compute" in parts[case.tokens]
    ]
    late = sum(case.late for case in cases)
    return Result(
        name="prefix",
        tables=(_times(cases, misses, hits), _parts_table(cases, hits, parts)),
        figures={str(case.tokens): _figures(case, misses, hits, parts) for case in cases},
        aims=tuple(aims),
        notes=(f"{late} hits came before the miss's blocks were committed and are not counted",) if late else (),
    )


def _parts(hits: Sequence[Answer]) -> dict[str, Spread]:
    """The parts that the service told, in seconds."""
    told = [part for part in PARTS if all(f"{part}_s" in hit.timing for hit in hits)]
    return {part: spread([hit.timing[f"{part}_s"] for hit in hits]) for part in told}


def _times(cases: Sequence[Case], misses: dict[int, Spread], hits: dict[int, Spread]) -> Table:
    rows = []
    for case in cases:
        miss, hit = misses[case.tokens], hits[case.tokens]
        tokens = case.hits[0]
        rows.append(
            (
                f"{case.tokens:,}",
                f"{tokens.prompt_tokens:,}",
                f"{tokens.hit_tokens:,}",
                milliseconds(miss),
                milliseconds(hit),
                f"{miss.median / hit.median:.1f}",
                str(hit.samples),
            )
        )
    columns = ("size", "prompt tokens", "hit tokens", "miss ms", "hit ms", "ratio", "samples")
    return Table(title="Time to first token at the client: median (range)", columns=columns, rows=tuple(rows))


def _parts_table(cases: Sequence[Case], hits: dict[int, Spread], parts: dict[int, dict[str, Spread]]) -> Table:
    told = [part for part in PARTS if all(part in parts[case.tokens] for case in cases)]
    rows = tuple(
        (
            f"{case.tokens:,}",
            milliseconds(hits[case.tokens]),
            *(_tenths(parts[case.tokens][part]) for part in told),
        )
        for case in cases
    )
    return Table(title="Parts of a hit in ms: median", columns=("size", "hit ms", *told), rows=rows)


def _tenths(of: Spread) -> str:
    return f"{of.median * 1e3:,.1f}"


def _figures(
    case: Case, misses: dict[int, Spread], hits: dict[int, Spread], parts: dict[int, dict[str, Spread]]
) -> dict[str, Any]:
    return {
        "prompt_tokens": case.hits[0].prompt_tokens,
        "hit_tokens": case.hits[0].hit_tokens,
        "miss_first_token_s": misses[case.tokens],
        "hit_first_token_s": hits[case.tokens],
        "ratio": misses[case.tokens].median / hits[case.tokens].median,
        "hit_parts_s": parts[case.tokens],
        "late_hits": case.late,
    }
