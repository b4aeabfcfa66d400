"""Index, prefill and decode of one small system, in this process, over real servers; the ends are `path_parts`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import asyncpg

from services.cache_index.handlers import IndexHandlers
from services.cache_index.handlers import serve as serve_index
from services.cache_index.repository import BlockRepository
from services.cache_index.schema import make_tables
from services.cache_index.sweeper import Sweeper
from services.decode.worker import DecodeWorker
from services.prefill.worker import PrefillWorker
from shared.contracts import subjects
from shared.contracts.ids import WorkerId
from shared.contracts.messages import Role, Sampling
from shared.contracts.ports import BlockStore, Bus, SequenceSpec
from shared.engine.hash_engine import HashEngine
from shared.runtime import signing
from shared.runtime.bus import NatsBus
from shared.runtime.clock import SystemClock
from shared.runtime.database import make_pool
from shared.worker.running import Means, Worker
from tests.integration.path_parts import MODEL, Books, GatewayStandIn

BLOCK = 8
CONTEXT = 512
VOCABULARY = 5_000


def make_engine(pages: int = 256, rows_per_s: float | None = None) -> HashEngine:
    """`rows_per_s`: how fast it pretends to be, for tests that must be faster than an answer."""
    return HashEngine(
        model=MODEL,
        pages=pages,
        sequences_max=16,
        block_tokens=BLOCK,
        vocabulary=VOCABULARY,
        context_tokens=CONTEXT,
        rows_per_s=rows_per_s,
        sleep=time.sleep,
    )


def answer_alone(prompt: list[int], count: int, temperature: float = 0.0) -> list[int]:
    """The right answer: of an engine that sees this prompt alone, from its first token."""
    engine = make_engine()
    sampling = Sampling(temperature=temperature, top_p=1.0, seed=7, stop_tokens=(2,))
    engine.add(
        SequenceSpec(request="alone", tokens=prompt, prompt_tokens=len(prompt), max_new_tokens=count, sampling=sampling)  # type: ignore[arg-type]
    )
    tokens: list[int] = []
    while produced := engine.step(64):
        tokens += [t for p in produced for t in p.tokens]
    return tokens


@dataclass
class System:
    bus: Bus
    books: Books
    gateway: GatewayStandIn
    store: BlockStore
    pool: asyncpg.Pool[Any]
    cluster_key: bytes
    prefill: Worker
    decode: Worker
    drains: dict[str, asyncio.Event] = field(default_factory=dict)

    async def rows(self) -> list[asyncpg.Record]:
        return await self.pool.fetch("SELECT * FROM cache_index.blocks ORDER BY namespace, position")

    async def first_commit(self) -> asyncio.Event:
        """Set when a block's row is asked for: some prompt is being computed."""
        committed = asyncio.Event()

        async def on_commit(subject: str, payload: bytes) -> None:
            committed.set()

        await self.bus.subscribe(subjects.INDEX_COMMIT, on_commit)
        return committed

    async def objects(self, space: Any) -> list[str]:
        return [found.name async for found in self.store.list(space)]


def make_worker(role: Role, name: str, bus: Bus, store: BlockStore, books: Books, engine: HashEngine) -> Worker:
    return Worker(
        Means(
            role=role,
            worker=WorkerId(name),
            model=MODEL,
            bus=bus,
            store=store,
            engine=engine,
            clock=SystemClock(),
            cluster_key=books.cluster_key,
            verify_key=books.verify_key,
            entropy=os.urandom,
            step_rows=32,
            capacity=16,
            grace_s=1.0,
        )
    )


@asynccontextmanager
async def working(worker: Worker, drain: asyncio.Event) -> AsyncIterator[None]:
    """The worker runs until the block ends, then drains."""
    handle = (PrefillWorker if worker.role == "prefill" else DecodeWorker)(worker.floor).handle
    ready = asyncio.Event()
    task = asyncio.create_task(worker.run(handle, drain, ready.set))
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED, timeout=10)
    try:
        yield
    finally:
        waiting.cancel()
        drain.set()
        await asyncio.wait({task}, timeout=20)
        assert task.done()
        task.result()


@asynccontextmanager
async def system(
    nats_url: str,
    database_url: str,
    store: BlockStore,
    *,
    pages: int = 256,
    rows_per_s: float | None = None,
    index: bool = True,
) -> AsyncIterator[System]:
    cluster_key = os.urandom(32)
    async with AsyncExitStack() as stack:
        buses = {}
        for name in ("billing", "cache_index", "prefill", "decode", "gateway"):
            buses[name] = await NatsBus.connect(nats_url, cluster_key, name)
            stack.push_async_callback(buses[name].close)
        books = Books(buses["billing"], cluster_key)
        for stop in await books.serve():
            stack.push_async_callback(stop)
        await make_tables(database_url)
        pool = await make_pool(database_url, name="cache_index", durable=False)
        stack.push_async_callback(pool.close)
        repository = BlockRepository(pool)
        sweeper = Sweeper(repository, store, SystemClock(), interval_s=3_600.0)
        verifier = signing.Verifier(books.verify_key)
        handlers = IndexHandlers(repository, verifier.grant, sweeper.discard, SystemClock())
        for stop in await serve_index(buses["cache_index"], handlers) if index else ():
            stack.push_async_callback(stop)
        prefill = make_worker("prefill", "prefill-1", buses["prefill"], store, books, make_engine(pages, rows_per_s))
        decode = make_worker("decode", "decode-1", buses["decode"], store, books, make_engine(pages, rows_per_s))
        drains = {"prefill": asyncio.Event(), "decode": asyncio.Event()}
        gateway = await stack.enter_async_context(GatewayStandIn(buses["gateway"], books).running())
        await stack.enter_async_context(working(prefill, drains["prefill"]))
        await stack.enter_async_context(working(decode, drains["decode"]))
        yield System(buses["gateway"], books, gateway, store, pool, cluster_key, prefill, decode, drains)
