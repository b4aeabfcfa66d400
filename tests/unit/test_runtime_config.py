"""Settings: what is unknown, missing or out of bounds is refused by name, and no secret reaches the log."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from shared.contracts.errors import SettingsError
from shared.runtime.config import (
    PROCESSES,
    BillingSettings,
    CacheIndexSettings,
    DecodeSettings,
    GatewaySettings,
    PrefillSettings,
    Settings,
    load,
    without_password,
)
from shared.runtime.key_files import read_key, read_public_key, read_token

COMPLETE = {
    "DEEPSERVE_NATS_URL": "nats://deepserve:hunter2@127.0.0.1:4222",
    "DEEPSERVE_DATABASE_URL": "postgresql://deepserve:hunter3@127.0.0.1:5432/deepserve",
    "DEEPSERVE_STORE": "dir:/data/store",
    "DEEPSERVE_CLUSTER_KEY_FILE": "/keys/cluster",
    "DEEPSERVE_SIGNING_KEY_FILE": "/keys/signing",
    "DEEPSERVE_VERIFY_KEY_FILE": "/keys/verify",
    "DEEPSERVE_MASTER_KEY_FILE": "/keys/master",
    "DEEPSERVE_ADMIN_TOKEN_FILE": "/keys/admin",
    "DEEPSERVE_MODEL_DIR": "/data/model",
}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in COMPLETE.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.parametrize("kind", PROCESSES)
def test_one_environment_serves_every_process(environment: pytest.MonkeyPatch, kind: type[Settings]) -> None:
    settings = load(kind)
    assert settings.nats_url == COMPLETE["DEEPSERVE_NATS_URL"]
    assert settings.cluster_key_file == Path("/keys/cluster")


@pytest.mark.parametrize("kind", PROCESSES)
def test_every_field_says_what_it_is(kind: type[Settings]) -> None:
    for name, field in kind.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name


def test_ids_are_new_for_each_process_and_named_after_the_role(environment: pytest.MonkeyPatch) -> None:
    first, second = load(PrefillSettings), load(PrefillSettings)
    assert first.worker_id != second.worker_id
    assert first.worker_id.startswith("prefill-")
    assert load(DecodeSettings).worker_id.startswith("decode-")
    assert load(GatewaySettings).gateway_id.startswith("gateway-")
    environment.setenv("DEEPSERVE_WORKER_ID", "left")
    assert load(PrefillSettings).worker_id == "left"


def test_an_unknown_variable_is_an_error_that_names_the_nearest(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("DEEPSERVE_ENGINE_THREAD", "4")
    with pytest.raises(SettingsError, match=r"DEEPSERVE_ENGINE_THREAD;.*DEEPSERVE_ENGINE_THREADS"):
        load(GatewaySettings)


def test_the_command_lines_own_variable_is_known(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("DEEPSERVE_DATA", "/data")
    load(GatewaySettings)


def test_everything_that_is_missing_is_named(environment: pytest.MonkeyPatch) -> None:
    environment.delenv("DEEPSERVE_STORE")
    environment.setenv("DEEPSERVE_DATABASE_URL", "")
    with pytest.raises(SettingsError, match=r"DEEPSERVE_DATABASE_URL is not set; DEEPSERVE_STORE is not set"):
        load(CacheIndexSettings)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("DEEPSERVE_PORT", "65536", GatewaySettings),
        ("DEEPSERVE_KEEP_ALIVE_S", "0", GatewaySettings),
        ("DEEPSERVE_GATEWAY_ID", "a.b", GatewaySettings),
        ("DEEPSERVE_STORE", "rados:pool", PrefillSettings),
        ("DEEPSERVE_STORE", "dir:", PrefillSettings),
        ("DEEPSERVE_ENGINE", "vllm", DecodeSettings),
        ("DEEPSERVE_SEQUENCES_MAX", "many", DecodeSettings),
        ("DEEPSERVE_NATS_URL", "127.0.0.1:4222", BillingSettings),
        ("DEEPSERVE_DATABASE_URL", "sqlite:///x", BillingSettings),
        ("DEEPSERVE_LOG_LEVEL", "loud", BillingSettings),
    ],
)
def test_a_value_out_of_its_bound_is_named(
    environment: pytest.MonkeyPatch, name: str, value: str, kind: type[Settings]
) -> None:
    environment.setenv(name, value)
    with pytest.raises(SettingsError, match=f"^{name}: "):
        load(kind)


def test_settings_are_frozen(environment: pytest.MonkeyPatch) -> None:
    settings = load(GatewaySettings)
    with pytest.raises(ValidationError):
        settings.port = 1


def test_the_effective_settings_hold_no_password(environment: pytest.MonkeyPatch) -> None:
    shown = load(BillingSettings).effective()
    assert "hunter" not in str(shown)
    assert shown["nats_url"] == "nats://***@127.0.0.1:4222"
    assert shown["database_url"] == "postgresql://***@127.0.0.1:5432/deepserve"
    assert shown["retention_agent_s"] == 3 * 24 * 3600
    assert shown["retention_chat_s"] == 7 * 24 * 3600


def test_the_fault_of_a_wrong_url_does_not_repeat_its_password(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("DEEPSERVE_DATABASE_URL", "mysql://a:hunter2@h/d")
    with pytest.raises(SettingsError) as refused:
        load(BillingSettings)
    assert "hunter2" not in str(refused.value)


def test_a_token_that_stands_for_a_user_is_a_password() -> None:
    assert without_password("nats://s3cret@h:4222") == "nats://***@h:4222"
    assert without_password("nats://h:4222") == "nats://h:4222"


def _file(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_keys_are_read_raw_or_as_digits(tmp_path: Path) -> None:
    key = bytes(range(32))
    assert read_key(_file(tmp_path / "raw", key), "key") == key
    assert read_key(_file(tmp_path / "hex", key.hex().encode() + b"\n"), "key") == key
    assert read_public_key(_file(tmp_path / "public", key, 0o644), "key") == key
    assert read_token(_file(tmp_path / "token", b" secret\n"), "token") == "secret"


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        (bytes(31), 0o600, "must hold 32 bytes"),
        (b"zz" * 32, 0o600, "must hold 32 bytes"),
        (bytes(32), 0o644, "make it 0600"),
        (bytes(5000), 0o600, "larger than"),
    ],
)
def test_a_key_file_that_is_wrong_says_how(tmp_path: Path, content: bytes, mode: int, says: str) -> None:
    path = _file(tmp_path / "key", content, mode)
    with pytest.raises(SettingsError, match=f"cluster key: .*{says}"):
        read_key(path, "cluster key")


def test_a_missing_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"master key: cannot read .*nowhere"):
        read_key(tmp_path / "nowhere", "master key")
    with pytest.raises(SettingsError, match="is empty"):
        read_token(_file(tmp_path / "blank", b"\n"), "admin token")


def test_origins_for_browsers_are_a_json_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPSERVE_CORS_ORIGINS", '["https://console.example"]')
    field = GatewaySettings.model_fields["cors_origins"]
    assert field.default == ()
    for name in ("NATS_URL", "CLUSTER_KEY_FILE", "VERIFY_KEY_FILE", "MODEL_DIR"):
        monkeypatch.setenv(f"DEEPSERVE_{name}", "nats://127.0.0.1:4222" if name == "NATS_URL" else "/tmp/x")
    assert GatewaySettings().cors_origins == ("https://console.example",)  # type: ignore[call-arg]
