"""Real books in a fresh database, driven through the classes that answer billing's subjects."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.resources import files

import asyncpg
import msgspec
from nacl.signing import SigningKey

from services.billing.accounts import key_digest, moment
from services.billing.admin_schemas import NewAccount, NewKeyView
from services.billing.administration import Administration
from services.billing.handlers import Secrets, Statements
from services.billing.main import open_books as open_books_of
from services.billing.money import Money
from services.billing.tags import TagPolicy
from shared.contracts.epoch import Epoch, Stage
from shared.contracts.ids import RequestId, WorkerId
from shared.contracts.messages import Authorize, Hold, Release, Revoked, Settle, Settled
from shared.contracts.tag import Retention
from shared.contracts.usage import Usage
from shared.runtime.database import Database

MODEL = "smollm2-135m-instruct"
PRICES = files("services.billing").joinpath("prices.toml").read_text()
POLICY = TagPolicy(tag_ttl_s=60, retention=Retention(agent_s=259_200, chat_s=604_800))
SEED = bytes(range(32))
SECRETS = Secrets(
    signing_key=SEED,
    verify_key=bytes(SigningKey(SEED).verify_key),
    master_key=bytes(range(32, 64)),
    cluster_key=bytes(range(64, 96)),
)


class SetClock:
    """Time stands still until a test moves it."""

    def __init__(self, now_s: float = 1_800_000_000.0) -> None:
        self.time_s = now_s

    def now_s(self) -> float:
        return self.time_s

    def monotonic_s(self) -> float:
        return self.time_s


@dataclass
class Books:
    """`url`: of the database, for tests that look past the code."""

    url: str
    database: Database
    clock: SetClock
    heard: list[Revoked] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.money = Money(
            self.database, SECRETS.signing_key, SECRETS.verify_key, POLICY, self.clock, entropy=os.urandom
        )
        self.statements = Statements(self.database, SECRETS, POLICY, self.clock, entropy=os.urandom)
        self.administration = Administration(
            self.database, self._hear, self.clock, os.urandom, currency="USD", concurrency=500
        )

    async def _hear(self, revoked: Revoked) -> None:
        self.heard.append(revoked)

    async def customer(self, **money: str) -> Customer:
        """A new account with a key; `money`: credit, grant, currency."""
        wanted = NewAccount(name="customer", **money)  # type: ignore[arg-type]
        account = await self.administration.create_account(wanted, os.urandom(8).hex())
        key = await self.administration.create_key(account.id, None)
        return Customer(self, account.id, key)

    async def rows(self, query: str, *arguments: object) -> list[asyncpg.Record]:
        """Straight from the database, past all of billing's code."""
        connection = await asyncpg.connect(self.url, timeout=10)
        try:
            return list(await connection.fetch(query, *arguments))
        finally:
            await connection.close(timeout=5)

    async def faults(self) -> dict[str, int]:
        """Checks of the reconciliation that found something."""
        found = await self.administration.reconciliation()
        return {check.name: check.count for check in found.checks if check.count}


@dataclass
class Customer:
    books: Books
    account: str
    key: NewKeyView

    async def tag(self) -> str:
        message = Authorize(key_digest=key_digest(self.key.key), key_hint=self.key.hint)
        return (await self.books.statements.authorize(message)).tag

    async def hold_message(self, request: str, **change: object) -> Hold:
        """1,000 prompt tokens and at most 100 output tokens: 1,000 × 150 + 100 × 600 = 210,000 nano-units."""
        message = Hold(
            tag=await self.tag(),
            request=RequestId(request),
            model=MODEL,
            user_id=None,
            traffic_class="chat",
            prompt_tokens=1_000,
            max_output_tokens=100,
            deadline_s=self.books.clock.now_s() + 600,
        )
        return msgspec.structs.replace(message, **change)

    async def hold(self, request: str, **change: object) -> str:
        """The grant."""
        return (await self.books.money.hold(await self.hold_message(request, **change))).grant

    async def settle(self, grant: str, usage: Usage, attempt: int = 1) -> Settled:
        return await self.books.money.settle(settlement(grant, usage, attempt))

    async def release(self, grant: str) -> Settled:
        return await self.books.money.release(Release(grant=grant, reason="cancelled"))

    async def balances(self) -> Mapping[str, int]:
        query = "SELECT ledger, balance_nano FROM billing.balances WHERE account = $1"
        return {row["ledger"]: row["balance_nano"] for row in await self.books.rows(query, self.account)}

    async def entries(self) -> list[tuple[str, str, str, int]]:
        """(act, debit, credit, amount in nano-units), oldest first."""
        query = """SELECT j.act, e.debit, e.credit, e.amount_nano FROM billing.entries e
                   JOIN billing.journal j ON j.id = e.journal WHERE e.account = $1 ORDER BY e.id"""
        return [tuple(row) for row in await self.books.rows(query, self.account)]


def settlement(grant: str, usage: Usage, attempt: int = 1) -> Settle:
    return Settle(
        grant=grant, epoch=Epoch(attempt, Stage.DECODE, 1), usage=usage, worker=WorkerId("decode-1"), device_s=0.25
    )


def usage(cached: int = 0, uncached: int = 1_000, output: int = 40) -> Usage:
    """By default 1,000 × 150 + 40 × 600 = 174,000 nano-units."""
    return Usage(cached=cached, uncached=uncached, not_eligible=0, output=output)


@asynccontextmanager
async def open_books(url: str) -> AsyncIterator[Books]:
    database = Database(url)
    clock = SetClock()

    await open_books_of(database, PRICES, moment(clock.now_s()))
    yield Books(url, database, clock)
    await database.close()
