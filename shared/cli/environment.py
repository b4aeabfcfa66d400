"""Which variables each process of an instance gets. Pure: the caller's environment comes in, nobody's is changed.

A process gets the caller's variables that its settings class knows, and no other of ours: the database's password
reaches billing and cache_index alone. What the supervisor must decide itself cannot be set from outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shared.cli.failure import UsageError
from shared.cli.instance import Instance
from shared.cli.secrets import Secrets
from shared.runtime import config

OWNED: Final = frozenset(
    {
        "DEEPSERVE_HEALTH_PORT",
        "DEEPSERVE_HEALTH_PORT_FILE",
        "DEEPSERVE_PORT_FILE",
        "DEEPSERVE_ADMIN_PORT_FILE",
        "DEEPSERVE_WORKER_ID",
        "DEEPSERVE_GATEWAY_ID",
    }
)
KINDS: Final[Mapping[str, type[config.Settings]]] = {kind.role: kind for kind in config.PROCESSES}


@dataclass(frozen=True)
class Servers:
    """Where the outside of an instance is: embedded, or named by the caller."""

    nats_url: str
    database_url: str


def check(environment: Mapping[str, str]) -> None:
    """Raises SettingsError for an unknown variable, UsageError for one that the supervisor sets itself."""
    config.check_unknown(environment)
    taken = sorted(OWNED & environment.keys())
    if taken:
        raise UsageError(f"`deepserve up` sets {', '.join(taken)} itself, for each process; unset it")


def model_dir(instance: Instance, environment: Mapping[str, str]) -> Path:
    """The converted model: the caller's folder, else the instance's own."""
    return Path(environment.get("DEEPSERVE_MODEL_DIR") or instance.model).absolute()


def compose(
    kind: str,
    name: str,
    instance: Instance,
    caller: Mapping[str, str],
    servers: Servers,
    options: Mapping[str, str],
) -> dict[str, str]:
    """The environment of process `name` of service `kind`. `options`: variables given on the command line, which win
    over the caller's; the instance's own defaults yield to both."""
    secrets = Secrets(instance.secrets)
    defaults = {
        "DEEPSERVE_NATS_URL": servers.nats_url,
        "DEEPSERVE_DATABASE_URL": servers.database_url,
        "DEEPSERVE_STORE": f"dir:{instance.store}",
        "DEEPSERVE_MODEL_DIR": str(instance.model),
        "DEEPSERVE_CLUSTER_KEY_FILE": str(secrets.cluster_key),
        "DEEPSERVE_VERIFY_KEY_FILE": str(secrets.verify_key),
        "DEEPSERVE_SIGNING_KEY_FILE": str(secrets.signing_seed),
        "DEEPSERVE_MASTER_KEY_FILE": str(secrets.master_key),
        "DEEPSERVE_ADMIN_TOKEN_FILE": str(secrets.admin_token),
    }
    own = {
        "DEEPSERVE_HEALTH_PORT": "0",
        "DEEPSERVE_HEALTH_PORT_FILE": str(instance.port_file(name)),
        "DEEPSERVE_PORT_FILE": str(public_port_file(instance, name)),
        "DEEPSERVE_ADMIN_PORT_FILE": str(public_port_file(instance, name)),
    }
    given = {key: value for key, value in caller.items() if value}
    ours = {**defaults, **given, **options, **own}
    knows = {config.PREFIX + field.upper() for field in KINDS[kind].model_fields}
    return {**without_ours(caller), **{key: value for key, value in ours.items() if key in knows}}


def without_ours(environment: Mapping[str, str]) -> dict[str, str]:
    """The rest: PATH, HOME and what else has nothing to do with us."""
    return {key: value for key, value in environment.items() if not key.upper().startswith(config.PREFIX)}


def public_port_file(instance: Instance, name: str) -> Path:
    """Where gateway and billing write the port that others call, beside the health port."""
    return instance.run / f"{name}.public.port"
