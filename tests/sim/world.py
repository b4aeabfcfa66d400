"""A whole service in one loop: the five services' own composition roots, over what is in memory.

Each process runs its real `start` under its real `Service`; only the constructors of adapters (bus, store, database,
HTTP server, key files, engine) give what is in memory. What the processes share (broker, disk, tables) outlives them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

from nacl.signing import SigningKey

import services.billing.main as billing_main
import services.cache_index.main as cache_index_main
import services.decode.main as decode_main
import services.gateway.gateway as gateway_parts
import services.gateway.main as gateway_main
import services.prefill.main as prefill_main
from services.billing.handlers import Secrets
from shared.runtime.config import (
    BillingSettings,
    CacheIndexSettings,
    DecodeSettings,
    GatewaySettings,
    PrefillSettings,
    Settings,
)
from shared.runtime.service import Service
from shared.worker import engine_loop, starting
from tests.fakes import billing_repository
from tests.fakes.books import MemoryDatabase, Tables
from tests.fakes.bus import Broker
from tests.fakes.database import MemoryServer
from tests.fakes.index_repository import IndexRows
from tests.fakes.store import MemoryDisk
from tests.fakes.wire import CALM, Wire
from tests.sim import model
from tests.sim.http import SimHttpServer
from tests.sim.loop import SimClock, SimLoop
from tests.sim.process import SimProcess
from tests.sim.threads import SimThreading
from tests.sim.timeline import Timeline

START_TIMEOUT_S: Final = 120.0
CONNECT_RETRY_S: Final = 0.5
RESTART_S: Final = 1.0
Start = Callable[[Service, Any], Coroutine[Any, Any, None]]
ROLES: Final[dict[str, tuple[type[Settings], Start]]] = {
    "billing": (BillingSettings, billing_main.start),
    "cache_index": (CacheIndexSettings, cache_index_main.start),
    "prefill": (PrefillSettings, prefill_main.start),
    "decode": (DecodeSettings, decode_main.start),
    "gateway": (GatewaySettings, gateway_main.start),
}
NOWHERE: Final = Path("/nowhere")
CLUSTER_KEY: Final = bytes(range(32))
SIGNING_KEY: Final = bytes(range(32, 64))
VERIFY_KEY: Final = bytes(SigningKey(SIGNING_KEY).verify_key)
SECRETS: Final = Secrets(
    signing_key=SIGNING_KEY, verify_key=VERIFY_KEY, master_key=bytes(range(64, 96)), cluster_key=CLUSTER_KEY
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the workers: small, so that they fill up."""

    pages: int = 256
    sequences: int = 8
    step_rows: int = 64
    request_deadline_s: float = 120.0
    rows_per_s: float = 1_000.0
    retention_s: int = 100_000


@dataclasses.dataclass
class Running:
    """One life of a process. `clock` is its own."""

    role: str
    member: SimProcess
    service: Service
    clock: SimClock
    task: asyncio.Task[None]
    ended: bool = False
    was_ready: bool = False


class World:
    """Made inside the simulation's loop, within `World.patched`."""

    def __init__(self, loop: SimLoop, timeline: Timeline, *, wire: Wire = CALM, sizes: Sizes | None = None) -> None:
        self.loop = loop
        self.timeline = timeline
        self.sizes = sizes or Sizes()
        self.wall = SimClock(loop)
        self.broker = Broker(wire=wire, seed=loop.seed)
        self.disk = MemoryDisk(self.wall.now_s, wire=wire)
        self.ledger_server = MemoryServer(wire=wire)
        self.index_server = MemoryServer(wire=wire)
        self.tables = Tables.empty()
        self.index = IndexRows(self.index_server)
        self.prices = model.PRICES
        self.running: dict[str, Running] = {}
        self.faults: list[str] = []
        """What no process may do, such as to end by itself."""
        self.http: dict[str, SimHttpServer] = {}
        self.lives: dict[str, int] = {}
        SimHttpServer.listening = self.http

    def rewire(self, wire: Wire) -> None:
        """Everything goes over this wire from now on."""
        for server in (self.broker, self.disk, self.ledger_server, self.index_server):
            server.wire = wire

    # -- processes ---------------------------------------------------------------------------------------------------

    async def up(self, *names: str) -> None:
        """Starts processes and waits until all are ready. A name is a role and, after a dash, which one."""
        for name in names:
            self.start(name)
        async with asyncio.timeout(START_TIMEOUT_S):
            while any(self.running[name].service.missing() is not None for name in names):
                await asyncio.sleep(0.05)
                for name in names:
                    await self._again(name)

    async def _again(self, name: str) -> None:
        """As the supervisor: a process that ended before it was ready, for want of a server, is started again."""
        running = self.running[name]
        if running.ended and not running.was_ready:
            await asyncio.sleep(RESTART_S)
            self.start(name)

    def start(self, name: str, *, skew_s: float = 0.0) -> Running:
        """A new life of the process; returns before it is ready."""
        role = name.partition("-")[0]
        self.lives[name] = self.lives.get(name, 0) + 1
        member = SimProcess(f"{name}.{self.lives[name]}")
        clock = SimClock(self.loop, skew_s)
        settings = self._settings(role, name)
        start = ROLES[role][1]

        async def live() -> None:
            service.clock = clock  # type: ignore[assignment]
            await service.live(start(service, settings))

        service = member.run(Service, role, settings.drain_timeout_s)
        task = member.start(live(), name)
        running = Running(role, member, service, clock, task)
        task.add_done_callback(lambda ended: self._ended(name, running, ended))
        self.running[name] = running
        self.timeline.note("world", "started", process=member.name)
        return running

    def crash(self, name: str) -> None:
        """As kill -9. Idempotent."""
        running = self.running.get(name)
        if running is not None and running.member.alive:
            self.timeline.note("world", "crashed", process=running.member.name)
            running.member.crash()

    async def drain(self, name: str) -> None:
        """As SIGTERM, until the process has ended."""
        running = self.running[name]
        if running.member.alive and not running.task.done():
            running.member.run(running.service.stop, "SIGTERM")
            await asyncio.wait({running.task}, timeout=300.0)

    def alive(self, name: str) -> bool:
        running = self.running.get(name)
        return running is not None and running.member.alive and not running.task.done()

    def _ended(self, name: str, running: Running, task: asyncio.Task[None]) -> None:
        running.ended = True
        if not running.member.alive or self.loop.afterlife:
            return
        error = None if task.cancelled() else task.exception()
        self.timeline.note("world", "ended", process=running.member.name, error=repr(error) if error else None)
        running.was_ready = running.service._is_ready
        if running.was_ready and (error is not None or not running.service.draining.is_set()):
            self.faults.append(f"{running.member.name} ended by itself: {error!r}")

    def _settings(self, role: str, name: str) -> Settings:
        common: dict[str, Any] = {"nats_url": "nats://sim", "cluster_key_file": NOWHERE, "verify_key_file": NOWHERE}
        database = {"database_url": "postgresql://sim/sim"}
        store = {"store": "dir:/nowhere"}
        own: dict[str, dict[str, Any]] = {
            "billing": {
                **database,
                "retention_agent_s": self.sizes.retention_s,
                "retention_chat_s": self.sizes.retention_s,
                **dict.fromkeys(("signing_key_file", "master_key_file", "admin_token_file"), NOWHERE),
            },
            "cache_index": {**database, **store},
            "gateway": {
                "gateway_id": f"{name}-{self.lives[name]}",
                "model": model.NAME,
                "model_dir": NOWHERE,
                "request_deadline_s": self.sizes.request_deadline_s,
            },
        }
        worker = {
            **store,
            "worker_id": f"{name}-{self.lives[name]}",
            "model": model.NAME,
            "model_dir": NOWHERE,
            "engine": "hash",
            "kv_pages": self.sizes.pages,
            "sequences_max": self.sizes.sequences,
            "step_rows": self.sizes.step_rows,
        }
        return ROLES[role][0](**common, **own.get(role, worker))

    # -- adapters ----------------------------------------------------------------------------------------------------

    @contextmanager
    def patched(self) -> Iterator[None]:
        """For the length of the block the composition roots make adapters of this world."""
        mains = (billing_main, cache_index_main, starting, gateway_main)
        patches: list[tuple[Any, str, Any]] = [
            *((module, "NatsBus", _Connector(self)) for module in mains),
            *(
                (module, "read_key", lambda path, says: CLUSTER_KEY)
                for module in (cache_index_main, starting, gateway_main)
            ),
            *(
                (module, "read_public_key", lambda path, says: VERIFY_KEY)
                for module in (cache_index_main, starting, gateway_main)
            ),
            *((module, "open_store", lambda address: self.disk.connect()) for module in (cache_index_main, starting)),
            *((module, "load_engine", self._load_engine) for module in (prefill_main, decode_main)),
            (billing_main, "read_secrets", lambda settings: SECRETS),
            (billing_main, "read_token", lambda path, says: "admin"),
            (billing_main, "read_prices", lambda path: self.prices),
            (billing_main, "Database", lambda url, name: MemoryDatabase(self.tables, self.ledger_server)),
            (billing_main, "open_books", _open_books),
            (billing_main, "HttpServer", SimHttpServer),
            (cache_index_main, "make_tables", _made),
            (cache_index_main, "make_pool", self._make_pool),
            (cache_index_main, "BlockRepository", lambda pool: self.index.connect()),
            (gateway_main, "load_model", lambda name, folder: model.served_model()),
            (gateway_parts, "HttpServer", SimHttpServer),
            (engine_loop, "threading", SimThreading),
        ]
        with ExitStack() as stack:
            stack.enter_context(billing_repository.installed())
            for owner, name, value in patches:
                stack.enter_context(mock.patch.object(owner, name, value))
            environment = {key: value for key, value in os.environ.items() if not key.startswith("DEEPSERVE_")}
            stack.enter_context(mock.patch.dict(os.environ, environment, clear=True))
            yield

    def _load_engine(self, folder: Path, *, pages: int, sequences_max: int, **others: object) -> Any:
        return model.make_engine(pages, sequences_max, self.sizes.rows_per_s)

    async def _make_pool(self, url: str, *, name: str, durable: bool) -> Any:
        return _Closable()


class _Connector:
    """In place of the class `NatsBus`."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def connect(self, url: str, cluster_key: bytes, name: str) -> Any:
        while not self._world.broker.up:  # noqa: ASYNC110  as the real one, which tries again and again
            await asyncio.sleep(CONNECT_RETRY_S)
        return self._world.broker.connect()


class _Closable:
    async def close(self) -> None:
        return None


async def _made(url: str) -> None:
    return None


async def _open_books(database: MemoryDatabase, prices: str, now: Any) -> int:
    return await database.transact(lambda tables: billing_repository.adopt(tables, prices, now))
