"""Settings: one frozen class for each process, read once from `DEEPSERVE_…` variables.

Every field has its unit in the name, a bound and a reason. A variable with our prefix that no process and no command
knows is an error that names the nearest known one: a misspelt setting must not be a silent default. Secrets are never
values of variables but paths of files; `effective()` is what may be logged.
"""

from __future__ import annotations

import difflib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, TypeVar
from urllib.parse import urlsplit, urlunsplit

from pydantic import AfterValidator, Field, StringConstraints, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.contracts import limits
from shared.contracts.errors import SettingsError

PREFIX: Final = "DEEPSERVE_"
COMMAND_LINE_VARIABLES: Final = frozenset({"DEEPSERVE_DATA"})
"""What `deepserve` itself reads: the data directory where `--data` is not given."""

S = TypeVar("S", bound="Settings")


def _nats_url(text: str) -> str:
    for url in text.split(","):
        if urlsplit(url.strip()).scheme not in ("nats", "tls", "ws", "wss") or not urlsplit(url.strip()).hostname:
            raise ValueError("must be nats://[user:password@]host:port, several of them separated by commas")
    return text


def _database_url(text: str) -> str:
    if urlsplit(text).scheme not in ("postgresql", "postgres") or not urlsplit(text).path.strip("/"):
        raise ValueError("must be postgresql://[user:password@]host:port/database")
    return text


def _store(text: str) -> str:
    scheme, _, place = text.partition(":")
    if scheme != "dir" or not place:
        raise ValueError("must be dir:PATH")
    return text


NatsUrl = Annotated[str, AfterValidator(_nats_url)]
DatabaseUrl = Annotated[str, AfterValidator(_database_url)]
StoreAddress = Annotated[str, AfterValidator(_store)]
Port = Annotated[int, Field(ge=0, le=65_535)]
Identifier = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=128)]


class Settings(BaseSettings):
    """What every process needs."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, env_ignore_empty=True, extra="forbid", protected_namespaces=()
    )
    role: ClassVar[str]

    # -- where the others are ------------------------------------------------------------------------------------------
    nats_url: NatsUrl = Field(description="NATS servers, separated by commas; user and password may be in the URL.")
    cluster_key_file: Path = Field(
        description="32 random bytes that all services share: seals work messages and namespace keys in transit."
    )
    verify_key_file: Path = Field(description="Billing's public Ed25519 key, 32 bytes: checks tags and grants offline.")

    # -- how it is watched and stopped ---------------------------------------------------------------------------------
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Lines below this level are not written."
    )
    health_port: Port = Field(
        default=0, description="Loopback port of /healthz, /readyz and /metrics; 0 picks a free one."
    )
    health_port_file: Path | None = Field(
        default=None, description="File that receives the bound health port, for whoever started the process."
    )
    drain_timeout_s: float = Field(
        default=limits.SERVICE_DRAIN_S,
        gt=0,
        le=3_600,
        description="From the signal to stop until what still runs is cancelled; below the supervisor's patience.",
    )

    def effective(self) -> dict[str, object]:
        """All values for one log line at start, without passwords."""
        return {name: _loggable(getattr(self, name)) for name in type(self).model_fields}


class GatewaySettings(Settings):
    """The edge: HTTP, admission, streams."""

    role = "gateway"

    # -- who and where it is -------------------------------------------------------------------------------------------
    gateway_id: Identifier = Field(
        default_factory=lambda: f"gateway-{secrets.token_hex(8)}",
        description="Names its subjects. New for each process: an old one's answers must not reach a new one.",
    )
    host: str = Field(default="127.0.0.1", description="Address of the public API; loopback by default.")
    port: Port = Field(default=8_000, description="Port of the public API; 0 picks a free one.")
    port_file: Path | None = Field(default=None, description="File that receives the bound port of the public API.")

    # -- what it serves ------------------------------------------------------------------------------------------------
    model: ModelName = Field(default="smollm2-135m-instruct", description="The model's name for clients and prices.")
    model_dir: Path = Field(description="The converted model's folder, for tokenizer and chat template.")
    owned_by: str = Field(
        default="deepserve", min_length=1, max_length=64, description="`owned_by` of each entry of /models."
    )
    cors_origins: tuple[str, ...] = Field(
        default=(), max_length=64, description="Origins whose browser pages may call, as a JSON list; none by default."
    )

    # -- how much it takes on ------------------------------------------------------------------------------------------
    request_deadline_s: float = Field(
        default=limits.REQUEST_DEADLINE_S, gt=0, le=86_400, description="Every request ends before this age."
    )
    queued_requests_max: int = Field(
        default=limits.QUEUED_REQUESTS_MAX,
        ge=1,
        le=1_000_000,
        description="Waiting over all accounts; then 503.",
    )
    keep_alive_s: float = Field(
        default=limits.KEEP_ALIVE_S, gt=0, le=60, description="Silence after which a client is told that we live."
    )


class WorkerSettings(Settings):
    """What prefill and decode share: a model, an engine, the pool."""

    # -- who it is -----------------------------------------------------------------------------------------------------
    worker_id: Identifier = Field(description="Names its subjects; made new for each process unless given.")

    # -- the model and its engine --------------------------------------------------------------------------------------
    model: ModelName = Field(default="smollm2-135m-instruct", description="The served name; part of the work subjects.")
    model_dir: Path = Field(description="The converted model's folder.")
    engine: Literal["torch", "hash"] = Field(
        default="torch", description="`hash` is the double that needs no weights: for tests and measurements."
    )
    engine_threads: int = Field(default=2, ge=1, le=1_024, description="CPU threads of one forward pass.")
    numeric_domain: str = Field(
        default="cpu-bf16",
        min_length=1,
        max_length=64,
        description="Workers whose results are bit-equal share one, and then blocks; part of the fingerprint.",
    )
    kv_bytes: int = Field(
        default=512 * 2**20, ge=2**20, le=2**43, description="Memory for KV pages; bounds the tokens under way."
    )
    kv_pages: int | None = Field(
        default=None, ge=1, le=10_000_000, description="An exact number of pages instead of `kv_bytes`."
    )
    sequences_max: int = Field(default=16, ge=1, le=4_096, description="Requests in the engine at once.")
    step_rows: int = Field(default=512, ge=8, le=65_536, description="Rows of one step: throughput against latency.")

    # -- the pool ------------------------------------------------------------------------------------------------------
    store: StoreAddress = Field(description="The block store: dir:PATH.")
    heap_kept_bytes: int = Field(
        default=256 * 2**20,
        ge=0,
        le=2**31 - 1,
        description="Freed memory that is kept for the next blocks; 0 leaves it to the C library, which is slower.",
    )


class PrefillSettings(WorkerSettings):
    """Reads prompts."""

    role = "prefill"

    worker_id: Identifier = Field(
        default_factory=lambda: f"prefill-{secrets.token_hex(8)}",
        description="Names its subjects; made new for each process unless given.",
    )


class DecodeSettings(WorkerSettings):
    """Writes answers."""

    role = "decode"

    worker_id: Identifier = Field(
        default_factory=lambda: f"decode-{secrets.token_hex(8)}",
        description="Names its subjects; made new for each process unless given.",
    )


class CacheIndexSettings(Settings):
    """Which blocks exist, for whom, how long."""

    role = "cache_index"

    # -- what it keeps -------------------------------------------------------------------------------------------------
    database_url: DatabaseUrl = Field(description="Postgres; the index lives in the schema `cache_index`.")
    store: StoreAddress = Field(description="The block store whose objects the sweeper deletes: dir:PATH.")

    # -- how it sweeps -------------------------------------------------------------------------------------------------
    sweep_interval_s: float = Field(
        default=limits.SWEEP_INTERVAL_S, gt=0, le=86_400, description="Between two rounds of freeing expired blocks."
    )


class BillingSettings(Settings):
    """Accounts, tags, grants, the ledger."""

    role = "billing"

    # -- what it keeps -------------------------------------------------------------------------------------------------
    database_url: DatabaseUrl = Field(description="Postgres; the books live in the schema `billing`.")
    signing_key_file: Path = Field(description="32-byte Ed25519 seed: signs tags and grants. Billing alone has it.")
    master_key_file: Path = Field(description="32 random bytes that wrap the namespace keys. Billing alone has it.")

    # -- its admin side ------------------------------------------------------------------------------------------------
    admin_host: str = Field(default="127.0.0.1", description="Address of the admin API; loopback by default.")
    admin_port: Port = Field(default=0, description="Port of the admin API; 0 picks a free one.")
    admin_port_file: Path | None = Field(default=None, description="File that receives the bound admin port.")
    admin_token_file: Path = Field(description="The bearer token that every admin call needs.")

    # -- what things cost and how long they are kept -------------------------------------------------------------------
    prices_file: Path | None = Field(default=None, description="TOML price list; without it the built-in one counts.")
    currency: Literal["USD", "CNY"] = Field(default="USD", description="Currency of new accounts.")
    account_concurrency: int = Field(
        default=limits.ACCOUNT_CONCURRENCY_DEFAULT,
        ge=1,
        le=1_000_000,
        description="Requests that a new account may have under way at once.",
    )
    tag_ttl_s: float = Field(
        default=limits.TAG_TTL_S, ge=1, le=3_600, description="Life of a tag: a lost revocation is over after it."
    )
    retention_agent_s: int = Field(
        default=limits.RETENTION_AGENT_S, ge=1, le=366 * 86_400, description="Blocks of agent traffic, from last use."
    )
    retention_chat_s: int = Field(
        default=limits.RETENTION_CHAT_S, ge=1, le=366 * 86_400, description="Blocks of chat traffic, from last use."
    )


PROCESSES: Final = (GatewaySettings, PrefillSettings, DecodeSettings, CacheIndexSettings, BillingSettings)


def known_variables() -> frozenset[str]:
    """Variables of all processes and of the command line: each process gets the same environment."""
    fields = (name for kind in PROCESSES for name in kind.model_fields)
    return COMMAND_LINE_VARIABLES | {PREFIX + name.upper() for name in fields}


def check_unknown(environment: Mapping[str, str]) -> None:
    """Raises SettingsError for a variable with our prefix that nobody reads."""
    known = known_variables()
    for name in sorted(environment):
        if name.upper().startswith(PREFIX) and name not in known:
            near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.0)
            raise SettingsError(f"unknown variable {name}; the closest known one is {near[0]}")


def load(kind: type[S]) -> S:
    """The process's settings from its environment. Raises SettingsError that names every wrong variable."""
    check_unknown(os.environ)
    try:
        return kind.model_validate({})
    except ValidationError as error:
        raise SettingsError(_explain(error)) from error


def _explain(error: ValidationError) -> str:
    lines = []
    for fault in error.errors(include_url=False, include_context=False):
        variable = PREFIX + "_".join(str(part) for part in fault["loc"]).upper()
        if fault["type"] == "missing":
            lines.append(f"{variable} is not set")
        else:
            lines.append(f"{variable}: {fault['msg']}")
    return "; ".join(lines)


def _loggable(value: object) -> object:
    if isinstance(value, str) and "@" in value:
        return ",".join(without_password(url) for url in value.split(","))
    return str(value) if isinstance(value, Path) else value


def without_password(url: str) -> str:
    """The URL without user and password: both are secrets where a token stands for a user."""
    parts = urlsplit(url)
    _, at, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"***@{host}" if at else host))
