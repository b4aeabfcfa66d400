"""Starts the processes of an instance in the order of their needs, keeps them alive, and drains them.

    NATS ──────┬──▶ prefill, decode, gateway  (with the model)
    model ─────┘
    NATS, Postgres ──▶ billing, cache_index

What can start together does: loading torch takes the workers longer than initdb takes Postgres. Draining goes the way
of a request, gateway first, so that whoever holds a request still finds all that it needs to finish it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from shared.cli import conversion, environment
from shared.cli.admin_client import AdminClient
from shared.cli.board import Board
from shared.cli.demo import ensure_demo
from shared.cli.down import end_left_over
from shared.cli.embedded_nats import start_nats
from shared.cli.embedded_postgres import start_postgres
from shared.cli.failure import CommandFailed
from shared.cli.instance import Instance
from shared.cli.keeper import ServiceKeeper, ServiceSpec
from shared.cli.probe import read_port
from shared.cli.process import rotate
from shared.cli.reporter import Reporter
from shared.cli.secrets import Secrets
from shared.cli.servers import EmbeddedServer, ServerKeeper
from shared.contracts import limits

DRAIN_ORDER: Final = ("gateway", "prefill", "decode", "cache_index", "billing")
_STILL_WAITING_S: Final = 5.0


@dataclass(frozen=True)
class Options:
    """What the command line says. `variables`: settings given as options, which win over the caller's environment."""

    prefill: int
    decode: int
    engine: str
    variables: Mapping[str, str] = field(default_factory=dict)

    def names(self) -> tuple[str, ...]:
        counts = {"prefill": self.prefill, "decode": self.decode}
        workers = [f"{kind}-{n}" for kind, count in counts.items() for n in range(1, count + 1)]
        return ("billing", "cache_index", *workers, "gateway")


@dataclass(frozen=True)
class Addresses:
    gateway_url: str
    admin_url: str
    api_key: str


class Supervisor:
    """`start`, then `watch` until told to stop, then `drain`, always."""

    def __init__(self, instance: Instance, options: Options, caller: Mapping[str, str], reporter: Reporter) -> None:
        self._instance = instance
        self._options = options
        self._caller = caller
        self._reporter = reporter
        self._secrets = Secrets(instance.secrets)
        self._board = Board(instance, options.engine)
        self._keepers: dict[str, ServiceKeeper] = {}
        self._servers: dict[str, ServerKeeper] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop_timeout_s = stop_timeout_s(caller)

    async def start(self) -> Addresses:
        """All services ready and the demo account there. Raises CommandFailed with the first reason why not."""
        say = self._reporter.say
        if ended := await end_left_over(self._instance.read_state()):
            say(f"ended what a killed supervisor had left behind: {', '.join(ended)}")
        for stale in self._instance.run.glob("*.port"):
            stale.unlink(missing_ok=True)
        self._secrets.create_missing()
        self._board.expect(self._options.names())
        self._own(self._say_what_is_awaited())
        self._own(self._watch_logs())
        try:
            async with asyncio.TaskGroup() as group:
                nats = group.create_task(self._nats())
                postgres = group.create_task(self._postgres())
                model = group.create_task(self._model())
                for name in self._options.names():
                    group.create_task(self._service(name, nats, postgres, model))
        except* CommandFailed as failures:
            raise first_failure(failures) from None
        return await self._announce()

    async def watch(self) -> None:
        """Returns only by an error: a task of the supervisor that ended is a fault of its own."""
        owned = {*self._tasks, *(keeper.task for keeper in self._keepers.values())}
        done, _ = await asyncio.wait(owned, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        raise CommandFailed("a part of the supervisor ended by itself")

    async def drain(self) -> list[str]:
        """Ends everything in order, each within its bound. Returns who had to be killed."""
        self._board.draining()
        killed: list[str] = []
        for kind in DRAIN_ORDER:
            keepers = [k for name, k in self._keepers.items() if kind_of(name) == kind]
            stopped = await asyncio.gather(*(k.stop(self._stop_timeout_s) for k in keepers))
            killed += [k.spec.name for k, by_itself in zip(keepers, stopped, strict=True) if not by_itself]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in ("postgres", "nats"):
            if server in self._servers:
                await self._servers[server].stop()
        self._instance.state.unlink(missing_ok=True)
        return killed

    def hurry(self) -> None:
        """Kills the services now; what they held is repaired as after a crash."""
        for keeper in self._keepers.values():
            keeper.kill()

    # -- the parts ----------------------------------------------------------------------------------------------------

    async def _nats(self) -> str:
        if url := self._caller.get("DEEPSERVE_NATS_URL"):
            return url
        folder = self._instance.nats
        return (await self._server("nats", folder, lambda port: start_nats(folder, port=port))).url

    async def _postgres(self) -> str:
        if url := self._caller.get("DEEPSERVE_DATABASE_URL"):
            return url
        folder, password = self._instance.postgres, self._secrets.postgres_password.read_text()

        def start(port: int) -> EmbeddedServer:
            return start_postgres(folder, port=port, password=password)

        return (await self._server("postgres", folder, start)).url

    async def _server(self, name: str, folder: Path, start: Callable[[int], EmbeddedServer]) -> EmbeddedServer:
        keeper = ServerKeeper(name, start, folder / "server.log", self._board.server, self._reporter.say)
        self._servers[name] = keeper
        server = await keeper.start()
        self._own(keeper.watch(server))
        return server

    async def _model(self) -> None:
        folder = environment.model_dir(self._instance, self._caller)
        if conversion.is_converted(folder):
            return
        if folder != self._instance.model:
            raise CommandFailed(f"DEEPSERVE_MODEL_DIR={folder} holds no converted model")
        self._reporter.say("model: converting the weights, once for this data directory")
        await conversion.convert(folder, environment.without_ours(self._caller), self._reporter.say)

    async def _service(
        self, name: str, nats: asyncio.Task[str], postgres: asyncio.Task[str], model: asyncio.Task[None]
    ) -> None:
        kind = kind_of(name)
        needs_books = kind in ("billing", "cache_index")
        servers = environment.Servers(nats_url=await nats, database_url=await postgres if needs_books else "")
        if not needs_books:
            await model
        begun_s = self._reporter.elapsed_s
        keeper = ServiceKeeper(self._spec(name, kind, servers), self._board.service, self._reporter.say)
        self._keepers[name] = keeper
        refusal = await keeper.started()
        if refusal is not None:
            raise CommandFailed(f"{name} does not start: {refusal}", detail=keeper.tail())
        self._reporter.say(f"{name} is ready ({self._reporter.elapsed_s - begun_s:.1f} s)")

    def _spec(self, name: str, kind: str, servers: environment.Servers) -> ServiceSpec:
        instance = self._instance
        public = environment.public_port_file(instance, name)
        health = instance.port_file(name)
        pins = {"gateway": {"DEEPSERVE_PORT": public}, "billing": {"DEEPSERVE_ADMIN_PORT": public}}.get(kind, {})
        return ServiceSpec(
            name=name,
            module=f"services.{kind}.main",
            environment=environment.compose(kind, name, instance, self._caller, servers, self._options.variables),
            log=instance.log(name),
            port_file=health,
            public_port_file=public if kind == "gateway" else None,
            pins={**pins, "DEEPSERVE_HEALTH_PORT": health},
        )

    async def _announce(self) -> Addresses:
        admin_url = self._url("billing")
        token = self._secrets.admin_token.read_text().strip()

        def demo() -> str:
            with AdminClient(admin_url, token) as client:
                return ensure_demo(client, self._secrets)

        found = Addresses(gateway_url=self._url("gateway"), admin_url=admin_url, api_key=await asyncio.to_thread(demo))
        self._board.ready(found.gateway_url, found.admin_url)
        return found

    def _url(self, name: str) -> str:
        port = read_port(environment.public_port_file(self._instance, name))
        if port is None:
            raise CommandFailed(f"{name} is ready but did not say on which port")
        return f"http://127.0.0.1:{port}"

    # -- what runs beside them ----------------------------------------------------------------------------------------

    def _own(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.add(asyncio.create_task(work))

    async def _watch_logs(self) -> None:
        while True:
            for log in self._instance.all_logs().values():
                await asyncio.to_thread(rotate, log)
            await asyncio.sleep(limits.LOG_WATCH_S)

    async def _say_what_is_awaited(self) -> None:
        """A line now and then while the start is slow."""
        while True:
            await asyncio.sleep(_STILL_WAITING_S)
            if self._board.starting and (waiting := self._board.unready()):
                self._reporter.say(f"waiting for {', '.join(waiting)}")


def kind_of(name: str) -> str:
    """The service's folder: "prefill" of "prefill-2"."""
    return name.split("-", 1)[0]


def stop_timeout_s(caller: Mapping[str, str]) -> float:
    """SIGKILL never comes before a service's own drain has ended."""
    try:
        drain_s = float(caller.get("DEEPSERVE_DRAIN_TIMEOUT_S") or limits.SERVICE_DRAIN_S)
    except ValueError:
        drain_s = limits.SERVICE_DRAIN_S  # the services refuse the value with their own words
    return max(limits.STOP_TIMEOUT_S, drain_s + 5.0)


def first_failure(failures: BaseExceptionGroup[CommandFailed]) -> CommandFailed:
    """The first reason in a group; the others mostly follow from it."""
    for failure in failures.exceptions:
        if isinstance(failure, CommandFailed):
            return failure
        if isinstance(failure, BaseExceptionGroup):
            return first_failure(failure)
    return CommandFailed("the start failed")
