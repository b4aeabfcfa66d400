"""The data directory: its modes, its lock, its state."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from nacl.signing import SigningKey

from shared.cli.failure import CommandFailed
from shared.cli.instance import Instance, InstanceState, ProcessState, running
from shared.cli.secrets import DemoAccount, Secrets


def prepared(folder: Path) -> Instance:
    instance = Instance(folder / "data")
    instance.prepare()
    return instance


def test_a_foreign_folder_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with pytest.raises(CommandFailed, match="no DeepServe data directory, but has logs"):
        Instance(tmp_path).prepare()
    assert [p.name for p in tmp_path.iterdir()] == ["logs"]


def test_other_files_and_the_folders_mode_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    tmp_path.chmod(0o750)
    Instance(tmp_path).prepare()
    Instance(tmp_path).prepare()
    assert tmp_path.stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "notes.txt").read_text() == "x"


def test_what_is_private_is_private(tmp_path: Path) -> None:
    instance = prepared(tmp_path)
    Secrets(instance.secrets).create_missing()
    for folder in (instance.secrets, instance.store, instance.logs):
        assert folder.stat().st_mode & 0o777 == 0o700
    files = list(instance.secrets.iterdir())
    assert len(files) == 6
    assert {f.stat().st_mode & 0o777 for f in files} == {0o600}


def test_secrets_are_made_once(tmp_path: Path) -> None:
    instance = prepared(tmp_path)
    secrets = Secrets(instance.secrets)
    secrets.create_missing()
    before = {p.name: p.read_bytes() for p in instance.secrets.iterdir()}
    secrets.create_missing()
    assert {p.name: p.read_bytes() for p in instance.secrets.iterdir()} == before
    assert before["verify.key"] == bytes(SigningKey(before["signing.seed"]).verify_key)
    assert len({before[n] for n in ("cluster.key", "signing.seed", "master.key")}) == 3
    assert all(len(before[n]) == 32 for n in ("cluster.key", "signing.seed", "master.key"))


def test_a_damaged_secret_is_not_replaced(tmp_path: Path) -> None:
    instance = prepared(tmp_path)
    secrets = Secrets(instance.secrets)
    secrets.create_missing()
    secrets.master_key.write_bytes(b"short")
    with pytest.raises(CommandFailed, match=r"master\.key"):
        secrets.create_missing()
    assert secrets.master_key.read_bytes() == b"short"


def test_the_demo_account_is_remembered(tmp_path: Path) -> None:
    secrets = Secrets(prepared(tmp_path).secrets)
    assert secrets.read_demo() is None
    secrets.write_demo(DemoAccount(account="a", api_key="sk-1"))
    assert secrets.read_demo() == DemoAccount(account="a", api_key="sk-1")
    assert secrets.demo.stat().st_mode & 0o777 == 0o600


def test_a_second_supervisor_is_told_which_process_has_the_directory(tmp_path: Path) -> None:
    instance = prepared(tmp_path)
    assert instance.holder() is None
    with instance.locked():
        assert instance.holder() == os.getpid()
        code = (
            "import sys\nfrom pathlib import Path\nfrom shared.cli.instance import Instance\n"
            "with Instance(Path(sys.argv[1])).locked(): pass"
        )
        second = subprocess.run(
            [sys.executable, "-c", code, str(instance.data)], capture_output=True, text=True, check=False, timeout=30
        )
        assert f"process {os.getpid()}" in second.stderr
        assert second.returncode == 1
    assert instance.holder() is None


def test_a_killed_supervisor_leaves_no_lock(tmp_path: Path) -> None:
    instance = prepared(tmp_path)
    code = (
        "import os, sys, signal\nfrom pathlib import Path\nfrom shared.cli.instance import Instance\n"
        "with Instance(Path(sys.argv[1])).locked(): os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(instance.data)], check=False, timeout=30)
    assert done.returncode == -9
    assert instance.holder() is None
    with instance.locked():
        assert instance.holder() == os.getpid()


def test_state_comes_back_whole(tmp_path: Path) -> None:
    instance = prepared(tmp_path)
    assert instance.read_state() is None
    state = InstanceState(
        phase="ready",
        pid=7,
        engine="hash",
        gateway_url="http://127.0.0.1:1",
        services=(ProcessState(name="prefill-1", pid=8, born_s=1.5, state="ready", port=9, restarts=2),),
    )
    instance.write_state(state)
    assert instance.read_state() == state
    assert [p.name for p in instance.run.iterdir()] == ["state.json"]


def test_a_state_without_a_lock_is_no_running_instance(tmp_path: Path) -> None:
    instance = prepared(tmp_path)
    instance.write_state(InstanceState(phase="ready", pid=os.getpid(), engine="torch"))
    with pytest.raises(CommandFailed, match="no instance is running"):
        running(instance)
