"""The grammar of the command line: where --data may stand, what is refused, what the exit codes are."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from shared.cli.arguments import data_directory, parser
from shared.cli.main import main

COMMANDS = (
    "up",
    "down",
    "status",
    "logs",
    "admin account create --name n",
    "admin account list",
    "admin account credit --account a --amount 1",
    "admin key create --account a",
    "admin key list --account a",
    "admin key revoke k",
    "bench",
    "bench prefix",
    "doctor",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_subcommand_understands_data_at_its_end(command: str) -> None:
    options = parser().parse_args([*command.split(), "--data", "/somewhere"])
    assert data_directory(options, {}) == Path("/somewhere")


def test_data_may_stand_after_each_nested_subcommand() -> None:
    words = ["admin", "account", "create"]
    for place in range(1, 4):
        line = [*words[:place], "--data", "/here", *words[place:], "--name", "n"]
        assert data_directory(parser().parse_args(line), {}) == Path("/here"), line


def test_the_innermost_data_wins() -> None:
    options = parser().parse_args(["admin", "--data", "/outer", "account", "list", "--data", "/inner"])
    assert data_directory(options, {}) == Path("/inner")


def test_without_data_the_variable_counts_and_then_the_default() -> None:
    options = parser().parse_args(["status"])
    assert data_directory(options, {"DEEPSERVE_DATA": "/from/variable"}) == Path("/from/variable")
    assert data_directory(options, {}) == Path(".data")


@pytest.mark.parametrize(
    "line",
    [
        "",
        "nonsense",
        "admin",
        "admin account",
        "admin account create",
        "up --port 70000",
        "up --port -1",
        "up --prefill 0",
        "up --engine magic",
        "bench nonsense",
        "admin account create --name n --credit 0",
        "admin account create --name n --credit -3",
        "admin account create --name n --credit NaN",
        "admin account create --name n --credit much",
        "admin account create --name n --credit 1e400",
        "admin account create --name n --credit 1e3",
        "admin account create --name n --credit 0.0000000001",
        "admin account create --name n --grant 1000000000.000000001",
        "admin account create --name n --grant 1.",
        "admin account create --name=",
        "admin account create --name=a\nb",
        "admin account create --name=" + "n" * 201,
        "admin account credit --account= --amount 1",
        "admin account credit --account a/../b --amount 1",
        "admin account credit --account a --amount 00000000000",
        "admin key revoke x?y",
        "logs -n 0",
        "logs -n -1",
    ],
)
def test_wrong_usage_ends_with_code_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split(" ") if line else [])
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("amount", ["0.1", "0.000000001", "1000000000", "5.00"])
def test_money_stays_text(amount: str) -> None:
    options = parser().parse_args(["admin", "account", "create", "--name", "Firm & Söhne", "--credit", amount])
    assert options.credit == amount
    assert options.name == "Firm & Söhne"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_subcommand_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    assert "--data" in capsys.readouterr().out


def test_a_failure_is_one_line_and_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--data", str(tmp_path / "nothing")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("deepserve status: no instance is running in ")
    assert captured.err.count("\n") == 1


def test_down_without_an_instance_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["down", "--data", str(tmp_path / "nothing")]) == 0
    assert "no instance is running" in capsys.readouterr().out


def test_bench_without_a_name_lists_the_benches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--data", str(tmp_path)]) == 0
    assert {"prefix", "memory"} <= {line.split()[0] for line in capsys.readouterr().out.splitlines()}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_variable_stops_every_command_with_the_nearest_known_one(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPSERVE_DATABSE_URL", "postgresql://x/y")
    assert main([*command.split(), "--data", str(tmp_path / "data")]) == 1
    said = capsys.readouterr()
    assert "DEEPSERVE_DATABSE_URL" in said.err + said.out
    assert "DEEPSERVE_DATABASE_URL" in said.err + said.out
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(("name", "value"), [("PORT", "eighty"), ("PORT", "65536"), ("ENGINE", "magic")])
def test_a_variable_is_refused_like_its_option(
    name: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"DEEPSERVE_{name}", value)
    assert main(["up", "--detach", "--data", str(tmp_path / "data")]) == 2
    assert f"DEEPSERVE_{name}={value}" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_parsing_runs_nothing() -> None:
    assert isinstance(parser(), argparse.ArgumentParser)
