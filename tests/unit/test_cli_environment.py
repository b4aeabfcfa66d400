"""Which variables each process gets: least privilege, and the order of who wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.cli import environment
from shared.cli.failure import UsageError
from shared.cli.instance import Instance
from shared.contracts.errors import SettingsError

INSTANCE = Instance(Path("/data"))
SERVERS = environment.Servers(nats_url="nats://n:1", database_url="postgresql://u:pass%40word@h:2/d")
CALLER = {"PATH": "/bin", "HOME": "/home/u", "DEEPSERVE_LOG_LEVEL": "debug", "DEEPSERVE_DATA": "/data"}


def composed(kind: str, **caller: str) -> dict[str, str]:
    return environment.compose(kind, f"{kind}-1", INSTANCE, {**CALLER, **caller}, SERVERS, {"DEEPSERVE_ENGINE": "hash"})


def test_only_billing_and_the_index_see_the_database() -> None:
    for kind in environment.KINDS:
        text = " ".join(composed(kind).values())
        assert ("pass%40word" in text) == (kind in ("billing", "cache_index")), kind


def test_only_billing_sees_the_keys_that_sign_and_wrap() -> None:
    for kind in environment.KINDS:
        made = composed(kind)
        has = {"DEEPSERVE_SIGNING_KEY_FILE", "DEEPSERVE_MASTER_KEY_FILE", "DEEPSERVE_ADMIN_TOKEN_FILE"} & made.keys()
        assert len(has) == (3 if kind == "billing" else 0), kind
        assert made["DEEPSERVE_CLUSTER_KEY_FILE"] == "/data/secrets/cluster.key"


def test_every_process_keeps_the_callers_world_and_knows_where_to_write_its_port() -> None:
    for kind in environment.KINDS:
        made = composed(kind)
        assert (made["PATH"], made["HOME"], made["DEEPSERVE_LOG_LEVEL"]) == ("/bin", "/home/u", "debug")
        assert made["DEEPSERVE_HEALTH_PORT_FILE"] == f"/data/run/{kind}-1.port"
        assert "DEEPSERVE_DATA" not in made


def test_options_win_over_the_caller_and_the_caller_over_the_instance() -> None:
    assert composed("prefill")["DEEPSERVE_STORE"] == "dir:/data/store"
    made = composed("prefill", DEEPSERVE_ENGINE="torch", DEEPSERVE_STORE="dir:/pool", DEEPSERVE_MODEL_DIR="/m")
    assert made["DEEPSERVE_ENGINE"] == "hash"
    assert made["DEEPSERVE_STORE"] == "dir:/pool"
    assert made["DEEPSERVE_MODEL_DIR"] == "/m"


def test_an_empty_variable_is_no_value() -> None:
    assert composed("prefill", DEEPSERVE_STORE="")["DEEPSERVE_STORE"] == "dir:/data/store"


def test_what_the_supervisor_decides_cannot_be_set() -> None:
    with pytest.raises(UsageError, match="DEEPSERVE_HEALTH_PORT"):
        environment.check({"DEEPSERVE_HEALTH_PORT": "1"})


def test_an_unknown_variable_is_an_error() -> None:
    with pytest.raises(SettingsError, match="DEEPSERVE_STOR"):
        environment.check({"DEEPSERVE_STOR": "dir:/x"})
    environment.check(CALLER)
