"""The billing process: tags, holds and the books on the bus, the administrator's API on loopback.

The only place that builds its adapters.
"""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import datetime
from importlib.resources import files
from pathlib import Path

from nacl.signing import SigningKey

from services.billing import admin, handlers, price_repository, schema, sweep
from services.billing.accounts import moment
from services.billing.administration import Administration
from services.billing.handlers import Secrets, Statements
from services.billing.money import Money
from services.billing.tables import SCHEMA
from services.billing.tags import TagPolicy
from shared.contracts import subjects
from shared.contracts.errors import SettingsError
from shared.contracts.messages import Revoked, encode
from shared.contracts.tag import Retention
from shared.runtime.bus import NatsBus
from shared.runtime.config import BillingSettings
from shared.runtime.database import Database, lock_schema, transaction
from shared.runtime.health import write_port
from shared.runtime.http_server import HttpServer
from shared.runtime.key_files import read_key, read_public_key, read_token
from shared.runtime.service import Service, run


async def start(service: Service, settings: BillingSettings) -> None:
    """Ready when the books are open, the bus is there, and both sides are served."""
    secrets = read_secrets(settings)
    admin_token = read_token(settings.admin_token_file, "the administrator's token")
    prices = read_prices(settings.prices_file)

    service.waiting_for("Postgres")
    database = Database(settings.database_url, name=service.name)
    service.on_stop("database", database.close)
    await database.wait()
    await open_books(database, prices, moment(service.clock.now_s()))

    service.waiting_for("NATS")
    bus = await NatsBus.connect(settings.nats_url, secrets.cluster_key, service.name)
    service.on_stop("bus", bus.close)

    policy = TagPolicy(
        tag_ttl_s=settings.tag_ttl_s,
        retention=Retention(agent_s=settings.retention_agent_s, chat_s=settings.retention_chat_s),
    )
    money = Money(database, secrets.signing_key, secrets.verify_key, policy, service.clock, os.urandom)
    statements = Statements(database, secrets, policy, service.clock, os.urandom)

    async def broadcast(revoked: Revoked) -> None:
        await bus.send(subjects.REVOKED, encode(revoked))

    administration = Administration(
        database,
        broadcast,
        service.clock,
        os.urandom,
        currency=settings.currency,
        concurrency=settings.account_concurrency,
    )
    server = HttpServer(admin.create_app(administration, admin_token), settings.admin_host, settings.admin_port)
    service.spawn(_serve(service, server), "admin", drains=True)
    await handlers.serve(bus, statements, money)
    service.spawn(sweep.keep_sweeping(database, money, service.clock), "sweep")
    await server.up()
    if settings.admin_port_file is not None:
        write_port(settings.admin_port_file, server.port)
    service.require(lambda: None if bus.connected else "NATS is not connected")
    service.ready()


def read_secrets(settings: BillingSettings) -> Secrets:
    """Raises SettingsError, also when the public key that everybody checks with is not that of the signing key."""
    signing_key = read_key(settings.signing_key_file, "the signing key")
    verify_key = read_public_key(settings.verify_key_file, "billing's verify key")
    if bytes(SigningKey(signing_key).verify_key) != verify_key:
        raise SettingsError(f"{settings.verify_key_file} does not belong to {settings.signing_key_file}")
    return Secrets(
        signing_key=signing_key,
        verify_key=verify_key,
        master_key=read_key(settings.master_key_file, "the master key"),
        cluster_key=read_key(settings.cluster_key_file, "the cluster key"),
    )


def read_prices(path: Path | None) -> str:
    """The text of the price list; the built-in one without a path. Raises SettingsError."""
    if path is None:
        return files("services.billing").joinpath("prices.toml").read_text(encoding="utf-8")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read the price list {path}: {error}") from error


async def open_books(database: Database, prices: str, now: datetime) -> int:
    """Makes what is missing of the schema and adopts the price list; returns its version. Several processes may start
    at once: they do this one after another."""
    async with transaction(database.engine) as connection:
        await lock_schema(connection, SCHEMA)
        await schema.create(connection)
        return await price_repository.adopt(connection, prices, now)


async def _serve(service: Service, server: HttpServer) -> None:
    """Serves until the process drains."""
    serving = asyncio.create_task(server.run(), name="serve")
    draining = asyncio.create_task(service.draining.wait(), name="draining")
    try:
        await asyncio.wait({serving, draining}, return_when=asyncio.FIRST_COMPLETED)
        server.stop()
        await serving
    finally:
        draining.cancel()
        serving.cancel()
        await asyncio.wait({serving, draining})


if __name__ == "__main__":
    sys.exit(run(BillingSettings, start))
