"""`deepserve bench plane`: what everything but the model costs, on the engine's double.

Real processes, real NATS, real Postgres; the double's own work is next to nothing, so that the time to a first token
is what the plane adds. Each client's prompts share a beginning, which is read from the pool. Numbers of clients take
turns in several rounds; a round gives one figure, and the rounds give its spread. Long answers show tokens a second.
"""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from shared.cli.bench.document import document
from shared.cli.bench.gauges import Gauges, Reading
from shared.cli.bench.harness import Aim, Result, Spread, Table, interleaved, spread
from shared.cli.bench.load import ANSWER_TIMEOUT_S, Outcome, Plan, Sample
from shared.cli.bench.target import Target
from shared.cli.failure import CommandFailed
from shared.cli.instance import running
from shared.cli.up import MODEL
from shared.contracts import limits

CLIENTS: Final = (1, 16, 64)
ROUNDS: Final = 3
SECONDS: Final = 3.0
SECONDS_QUICK: Final = 1.0
PROMPT_WORDS: Final = 120
"""About three blocks with their wrapping, two of them full: read from the pool but for a client's first request."""
SHORT_TOKENS: Final = 8
LONG_TOKENS: Final = 256
LONG_CLIENTS: Final = 32
VARIABLES: Final[Mapping[str, str]] = {"DEEPSERVE_SEQUENCES_MAX": "64", "DEEPSERVE_KV_PAGES": "2048"}
"""Of an instance of our own: as many sequences as clients, so that no place is what they wait for; and pages as of a
model, since those of the double are so small that the default memory would hold a million."""
AIM_ADDED_S: Final = 0.010
AIM_REQUESTS: Final = 200.0
AIM_TOKENS: Final = 10_000.0
PARTS: Final = (
    *("tag", "prepare", "queue", "hold", "publish", "worker_queue"),
    *("lookup", "read", "compute", "delivery", "handoff"),
)
"""Of `gateway.stopwatch`. `worker_queue` is from the publish to a worker that has room: the fetch and the claim, and
the publish itself once more."""
_STARTED_S: Final = 30.0


@dataclass(frozen=True)
class Case:
    """One kind of load."""

    clients: int
    max_tokens: int

    @property
    def name(self) -> str:
        return f"{self.clients} clients, {self.max_tokens} tokens"


@dataclass
class Rounds:
    """What the rounds of a case gave."""

    outcomes: list[Outcome] = field(default_factory=list)
    cpu_s: list[dict[str, float]] = field(default_factory=list)
    """By process: processor time that one request took."""
    settle_s: list[float] = field(default_factory=list)


def measure(target: Target, quick: bool) -> Result:
    engine = running(target.instance).engine
    if engine != "hash":
        raise CommandFailed(f"this bench is about the plane without a model; the running instance has engine {engine}")
    gauges = Gauges(target.instance)
    cases = [Case(clients, SHORT_TOKENS) for clients in CLIENTS] + [Case(LONG_CLIENTS, LONG_TOKENS)]
    rounds = {case: Rounds() for case in cases}
    repetitions = 1 if quick else ROUNDS
    first = gauges.read()
    for number, case in enumerate(interleaved(cases, repetitions), start=1):
        sys.stderr.write(f"  {number} of {len(cases) * repetitions}: {case.name}\n")
        before = gauges.read()
        outcome = _drive(target, case, SECONDS_QUICK if quick else SECONDS)
        _note(rounds[case], outcome, before, gauges.read())
    return _result(rounds, first, gauges.read())


def _drive(target: Target, case: Case, seconds: float) -> Outcome:
    """One load in a process of its own. Raises CommandFailed when an answer failed."""
    address = urlsplit(target.gateway_url)
    plan = Plan(
        host=address.hostname or "127.0.0.1",
        port=address.port or 80,
        api_key=target.api_key,
        model=MODEL,
        clients=case.clients,
        seconds=seconds,
        prompt=document(PROMPT_WORDS, lambda words: len(words.split())),
        max_tokens=case.max_tokens,
        run=uuid.uuid4().hex,
    )
    command = [sys.executable, "-m", "shared.cli.bench.load"]
    limit_s = seconds + ANSWER_TIMEOUT_S + _STARTED_S
    try:
        done = subprocess.run(
            command, input=msgspec.json.encode(plan), capture_output=True, timeout=limit_s, check=True
        )
        outcome = msgspec.json.decode(done.stdout, type=Outcome)
    except (subprocess.SubprocessError, msgspec.DecodeError) as error:
        raise CommandFailed(f"the load did not run: {error}") from error
    if outcome.failure is not None:
        raise CommandFailed(f"an answer failed: {outcome.failure}")
    return outcome


def _note(rounds: Rounds, outcome: Outcome, before: Reading, after: Reading) -> None:
    rounds.outcomes.append(outcome)
    used_s = {name: after.cpu_s[name] - before.cpu_s.get(name, 0.0) for name in after.cpu_s}
    all_s = {**used_s, "load": outcome.cpu_s}
    rounds.cpu_s.append({name: seconds / len(outcome.samples) for name, seconds in all_s.items()})
    count = after.settlements - before.settlements
    if count > 0:
        rounds.settle_s.append((after.settlement_s - before.settlement_s) / count)


# -- figures -----------------------------------------------------------------------------------------------------------


def quantile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` of all do not exceed. Raises ValueError without samples."""
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    rank = -(-len(ordered) * share // 1)
    return ordered[min(max(int(rank) - 1, 0), len(ordered) - 1)]


def requests_s(outcome: Outcome) -> float:
    return sum(_inside(sample, outcome.seconds) for sample in outcome.samples) / outcome.seconds


def tokens_s(outcome: Outcome) -> float:
    return sum(sample.tokens * _inside(sample, outcome.seconds) for sample in outcome.samples) / outcome.seconds


def _inside(sample: Sample, seconds: float) -> float:
    """The part of an answer's time that lies in the window: what is under way at its ends counts for as much."""
    inside_s = min(sample.begun_s + sample.whole_s, seconds) - max(sample.begun_s, 0.0)
    return max(inside_s, 0.0) / sample.whole_s


def counted(outcome: Outcome) -> list[Sample]:
    """What was asked for in the window; where that is nothing, because answers take longer, all there is."""
    return [sample for sample in outcome.samples if sample.begun_s >= 0] or list(outcome.samples)


def parts_of(samples: Sequence[Sample]) -> dict[str, float]:
    """Median of each part that was told, in seconds."""
    told = {part: [s.parts[f"{part}_s"] for s in samples if f"{part}_s" in s.parts] for part in PARTS}
    return {part: quantile(values, 0.5) for part, values in told.items() if values}


def _result(rounds: Mapping[Case, Rounds], first: Reading, last: Reading) -> Result:
    short = {case: of for case, of in rounds.items() if case.max_tokens == SHORT_TOKENS}
    added = {case: _over(of, lambda o: quantile([s.first_s for s in counted(o)], 0.5)) for case, of in short.items()}
    rate = {case: _over(of, requests_s) for case, of in rounds.items()}
    tokens = {case: _over(of, tokens_s) for case, of in rounds.items()}
    one, long = next(iter(short)), next(case for case in rounds if case not in short)
    best = max(short, key=lambda case: rate[case].median)
    held = {name: last.held_max_s[name] for name in last.held_max_s}
    over = {name: last.held_over[name] - first.held_over.get(name, 0.0) for name in last.held_over}
    aims = (
        Aim(says="ms added to a request at 1 client, p50", reached=added[one].median * 1e3, bound=10, at_least=False),
        Aim(says=f"requests/s ({best.name})", reached=rate[best].median, bound=AIM_REQUESTS, at_least=True),
        Aim(says=f"tokens/s ({long.name})", reached=tokens[long].median, bound=AIM_TOKENS, at_least=True),
        Aim(
            says="longest hold of a service's event loop, ms of processor time",
            reached=max(held.values()) * 1e3,
            bound=limits.LOOP_HELD_S * 1e3,
            at_least=False,
        ),
    )
    tables = (
        _rates_table(rounds, rate, tokens),
        _parts_table(short),
        _processor_table(rounds),
        _held_table(held, over),
    )
    figures: dict[str, Any] = {case.name: _figures(of, rate[case], tokens[case]) for case, of in rounds.items()}
    figures["loop_held_max_s"], figures["loop_held_over_20_ms"] = held, over
    return Result(name="plane", tables=tables, figures=figures, aims=aims, notes=_notes(rounds))


def _over(rounds: Rounds, figure: Any) -> Spread:
    return spread([figure(outcome) for outcome in rounds.outcomes])


def _all(rounds: Rounds) -> list[Sample]:
    return [sample for outcome in rounds.outcomes for sample in counted(outcome)]


def _rates_table(rounds: Mapping[Case, Rounds], rate: Mapping[Case, Spread], tokens: Mapping[Case, Spread]) -> Table:
    rows = []
    for case, of in rounds.items():
        samples = _all(of)
        first, whole = [s.first_s for s in samples], [s.whole_s for s in samples]
        rows.append(
            (
                case.name,
                _ranged(rate[case]),
                _ranged(tokens[case]),
                *(_ms(quantile(values, share)) for values in (first, whole) for share in (0.5, 0.99)),
                str(len(samples)),
            )
        )
    columns = ("load", "requests/s", "tokens/s", "first p50 ms", "p99", "whole p50 ms", "p99 ", "answers")
    return Table(title="At the client: median (range) of the rounds", columns=columns, rows=tuple(rows))


def _parts_table(short: Mapping[Case, Rounds]) -> Table:
    found = {case: parts_of(_all(of)) for case, of in short.items()}
    told = [part for part in PARTS if all(part in parts for parts in found.values())]
    rows = tuple(
        (case.name, *(_ms(found[case][part]) for part in told), _ms(_mean(of.settle_s))) for case, of in short.items()
    )
    return Table(title="Where it goes, ms: median of all answers", columns=("load", *told, "settle"), rows=rows)


def _processor_table(rounds: Mapping[Case, Rounds]) -> Table:
    """What a busy machine does not change: the work itself."""
    names = list(next(iter(rounds.values())).cpu_s[0])
    rows = tuple((case.name, *(_ms(_median(of, name)) for name in names)) for case, of in rounds.items())
    columns = ("load", *names[:-1], "(load itself)")
    return Table(title="Processor time of a request in each process, ms", columns=columns, rows=rows)


def _median(of: Rounds, name: str) -> float:
    return quantile([used.get(name, 0.0) for used in of.cpu_s], 0.5)


def _held_table(held: Mapping[str, float], over: Mapping[str, float]) -> Table:
    rows = tuple((name, f"{held[name] * 1e3:.1f}", f"{over[name]:.0f}") for name in held)
    columns = ("process", "longest ms", "over 20 ms")
    return Table(title="Event loop held by one callback, processor time", columns=columns, rows=rows)


def _figures(of: Rounds, rate: Spread, tokens: Spread) -> dict[str, Any]:
    samples = _all(of)
    return {
        "requests_s": rate,
        "tokens_s": tokens,
        "first_p50_s": quantile([s.first_s for s in samples], 0.5),
        "first_p99_s": quantile([s.first_s for s in samples], 0.99),
        "whole_p50_s": quantile([s.whole_s for s in samples], 0.5),
        "whole_p99_s": quantile([s.whole_s for s in samples], 0.99),
        "hit_tokens_p50": quantile([s.hit_tokens for s in samples], 0.5),
        "parts_p50_s": parts_of(samples),
        "settle_mean_s": _mean(of.settle_s),
        "processor_s": {name: _median(of, name) for name in of.cpu_s[0]},
        "answers": len(samples),
    }


def _notes(rounds: Mapping[Case, Rounds]) -> tuple[str, ...]:
    samples = [sample for of in rounds.values() for sample in _all(of)]
    hits = sum(1 for sample in samples if sample.hit_tokens) / len(samples)
    share = max(used["load"] / max(sum(used.values()), 1e-9) for of in rounds.values() for used in of.cpu_s)
    return (
        f"{hits:.0%} of the answers had a prefix from the pool",
        f"the load itself took at most {share:.0%} of the processor time that was used",
        "worker_queue holds publish too; settle is the mean at the workers, after the answer",
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


def _ranged(of: Spread) -> str:
    return f"{of.median:,.0f} ({of.low:,.0f}–{of.high:,.0f})"
