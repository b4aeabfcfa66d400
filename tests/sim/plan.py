"""What a simulation does, as data drawn from its seed before it begins: who asks what, and what goes wrong when.

A plan can be made smaller (fewer clients, turns, troubles) and run again: that is how a failing seed is shrunk.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Final, Literal

Kind = Literal["paid", "trial", "empty", "stranger"]
"""Of an account: topped-up money, granted money alone, no money, an API key that nobody has."""
TroubleKind = Literal[
    "crash",
    "broker_crash",
    "broker_down",
    "store_down",
    "store_slow",
    "store_damage",
    "store_loss",
    "ledger_down",
    "index_down",
    "clock_step",
    "core_loss",
    "core_double",
    "work_loss",
    "ack_loss",
    "late",
    "drain",
    "pause",
    "cut_off",
    "new_prices",
    "revoke",
]
PROCESSES: Final = ("billing", "cache_index", "prefill-1", "decode-1", "decode-2", "gateway-1")
_WORDS: Final = (
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "while",
    "rain",
    "fell",
    "over",
    "old",
    "roofs",
    "nobody",
    "saw",
)


@dataclass(frozen=True)
class Turn:
    """One request of a client, `pause_s` after the last one ended. `leave_after`: the client hangs up when it has seen
    so many characters, or after so many seconds."""

    text: str
    pause_s: float
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    stream: bool = True
    stop: str | None = None
    leave_after_chars: int | None = None
    leave_after_s: float | None = None
    retries: int = 2


@dataclass(frozen=True)
class Client:
    """A conversation: each turn sends all before it. `keeps`: answers become part of it (an agent's growing prefix)."""

    account: int
    begins_s: float
    system: str
    turns: tuple[Turn, ...]
    keeps: bool = True
    agent: bool = False
    user: str | None = None


@dataclass(frozen=True)
class Trouble:
    """`process` and `steps` for crashes: the process dies so many callbacks after `at_s`. `for_s`: until it is over
    (or the process is back); `amount`: a chance, a time in seconds, by the kind."""

    kind: TroubleKind
    at_s: float
    for_s: float = 0.0
    process: str | None = None
    steps: int = 0
    amount: float = 0.0


@dataclass(frozen=True)
class Plan:
    seed: int
    accounts: tuple[Kind, ...]
    clients: tuple[Client, ...]
    troubles: tuple[Trouble, ...] = ()
    skews_s: dict[str, float] = field(default_factory=dict)
    delay_s: float = 0.0005
    rows_per_s: float = 1_000.0
    small_pages: bool = False
    retention_s: int = 100_000
    lossy: bool = False
    """Something fails that is not among the troubles."""

    @property
    def calm(self) -> bool:
        return not self.troubles and not self.lossy

    @property
    def requests(self) -> int:
        return sum(len(client.turns) for client in self.clients)

    def without_client(self, index: int) -> Plan:
        return replace(self, clients=self.clients[:index] + self.clients[index + 1 :])

    def without_last_turn(self, index: int) -> Plan:
        client = self.clients[index]
        shorter = replace(client, turns=client.turns[:-1])
        return replace(self, clients=(*self.clients[:index], shorter, *self.clients[index + 1 :]))

    def without_trouble(self, index: int) -> Plan:
        return replace(self, troubles=self.troubles[:index] + self.troubles[index + 1 :])


def draw(seed: int, *, troubles: bool = True) -> Plan:
    """The plan of a seed."""
    dice = random.Random(f"{seed}/plan")
    accounts: tuple[Kind, ...] = ("paid", "paid", "trial", dice.choice(("paid", "empty", "stranger")))
    documents = [_text(dice, dice.randrange(60, 500)) for _ in range(2)]
    clients = tuple(_client(dice, documents) for _ in range(dice.randrange(2, 8)))
    number = dice.choice((0, 1, 2, 3, 4, 6)) if troubles else 0
    return Plan(
        seed=seed,
        accounts=accounts,
        clients=clients,
        troubles=tuple(sorted((_trouble(dice, clients) for _ in range(number)), key=lambda t: t.at_s)),
        skews_s={name: dice.uniform(-2, 2) for name in PROCESSES if dice.random() < 0.3},
        delay_s=dice.choice((0.0002, 0.001, 0.005)),
        rows_per_s=dice.choice((60.0, 150.0, 400.0, 2_000.0)),
        small_pages=dice.random() < 0.2,
        retention_s=dice.choice((8, 100_000, 100_000)),
    )


def _text(dice: random.Random, characters: int) -> str:
    words: list[str] = []
    while sum(len(word) + 1 for word in words) < characters:
        words.append(dice.choice(_WORDS))
    return " ".join(words)[:characters]


def _client(dice: random.Random, documents: list[str]) -> Client:
    agent = dice.random() < 0.5
    turns = tuple(_turn(dice) for _ in range(dice.randrange(2, 5) if agent else dice.randrange(1, 3)))
    return Client(
        account=dice.choices(range(4), weights=(4, 3, 2, 1))[0],
        begins_s=dice.uniform(0, 4),
        system=dice.choice(documents) if dice.random() < 0.7 else _text(dice, dice.randrange(5, 120)),
        turns=turns,
        keeps=dice.random() < 0.8,
        agent=agent,
        user=dice.choice((None, None, "u1", "u2")),
    )


def _turn(dice: random.Random) -> Turn:
    temperature = dice.choice((0.0, 0.0, 0.8))
    leaves = dice.random() < 0.15
    return Turn(
        text=_text(dice, dice.randrange(3, 80)),
        pause_s=dice.choice((0.0, dice.uniform(0, 3))),
        max_tokens=dice.choice((1, 2, dice.randrange(3, 20), dice.randrange(20, 70))),
        temperature=temperature,
        seed=dice.randrange(2**31) if temperature else None,
        stream=dice.random() < 0.7,
        stop=dice.choice("abcdefgh0123") if dice.random() < 0.2 else None,
        leave_after_chars=dice.randrange(1, 20) if leaves and dice.random() < 0.7 else None,
        leave_after_s=dice.uniform(0, 0.3) if leaves else None,
        retries=dice.choice((0, 2)),
    )


def _trouble(dice: random.Random, clients: tuple[Client, ...]) -> Trouble:
    """Most troubles come while somebody is being answered."""
    kind: TroubleKind = dice.choice(
        (
            *("crash",) * 7,
            *("broker_crash",) * 2,
            "broker_down",
            "store_down",
            "store_slow",
            "store_damage",
            "store_loss",
            "ledger_down",
            "index_down",
            "clock_step",
            "core_loss",
            "core_double",
            "work_loss",
            "ack_loss",
            "late",
            "drain",
            *("pause",) * 3,
            *("cut_off",) * 2,
            "new_prices",
            "revoke",
        )
    )
    at_s = dice.choice(clients).begins_s + dice.choice((dice.uniform(0, 0.1), dice.uniform(0, 2), dice.uniform(0, 10)))
    process = dice.choices(PROCESSES, weights=(2, 1, 3, 3, 3, 3))[0]
    amounts = {
        "broker_crash": dice.choice((dice.uniform(0, 0.2), dice.uniform(0, 3))),
        "store_slow": dice.uniform(0.05, 2.0),
        "clock_step": dice.uniform(-30, 30),
        "revoke": float(dice.randrange(3)),
        "late": dice.uniform(0.01, 0.5),
    }
    return Trouble(
        kind=kind,
        at_s=at_s,
        for_s=dice.choice((dice.uniform(0.2, 3), dice.uniform(3, 25))),
        process=process if kind in ("crash", "clock_step", "drain", "pause", "cut_off") else None,
        steps=dice.randrange(60) if kind == "crash" else 0,
        amount=amounts.get(kind, dice.uniform(0.05, 0.6)),
    )
