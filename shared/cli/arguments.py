"""The grammar of the command line. Pure: builds the parser, runs nothing."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Final

from shared.cli.bench.catalogue import BENCHES
from shared.contracts import limits

DEFAULT_DATA: Final = "./.data"
ENGINES: Final = ("torch", "hash")
PORT_MAX: Final = 65_535
WORKERS_MAX: Final = 64
LINES_MAX: Final = 1_000_000
_AMOUNT: Final = re.compile(r"[0-9]{1,10}(\.[0-9]{1,9})?")
_IDENTIFIER: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


def parser() -> argparse.ArgumentParser:
    """Every subcommand, at every depth, understands --data."""
    top = argparse.ArgumentParser(
        prog="deepserve",
        description="A complete inference service on this machine: start it, look at it, run its books.",
    )
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _up(commands)
    _add(commands, "down", "stop the instance: drain, then end all its processes")
    _add(commands, "status", "who runs, where, in what state").add_argument(
        "--json", action="store_true", dest="as_json", help="as JSON, with key and token for the owner"
    )
    _logs(commands)
    _admin(commands)
    _bench(commands)
    _add(commands, "doctor", "check what this machine and this data directory need")
    return top


def data_directory(options: argparse.Namespace, environment: Mapping[str, str]) -> Path:
    """--data, else DEEPSERVE_DATA, else ./.data."""
    given: str | None = getattr(options, "data", None)
    return Path(given or environment.get("DEEPSERVE_DATA") or DEFAULT_DATA)


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, says: str
) -> argparse.ArgumentParser:
    made = commands.add_parser(name, help=says, description=says[0].upper() + says[1:] + ".")
    # No default here: a subcommand's default would overwrite what the command above it was given.
    made.add_argument(
        "--data", metavar="DIR", default=argparse.SUPPRESS, help=f"data directory (default {DEFAULT_DATA})"
    )
    return made


def _up(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    made = _add(commands, "up", "start an instance and keep it running until Ctrl-C")
    made.add_argument("--port", type=_port, help="port of the API (default 8000; 0 picks a free one)")
    made.add_argument("--detach", action="store_true", help="return when it is ready; it runs on in the background")
    made.add_argument("--prefill", type=_workers, default=1, metavar="N", help="prefill workers (default 1)")
    made.add_argument("--decode", type=_workers, default=1, metavar="N", help="decode workers (default 1)")
    made.add_argument(
        "--engine", choices=ENGINES, help="hash: an engine double without a model's mathematics, for tests"
    )
    made.add_argument("--timeout", type=_seconds, default=600.0, metavar="S", help="with --detach: wait this long")
    made.add_argument("--background", action="store_true", help=argparse.SUPPRESS)


def _logs(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    made = _add(commands, "logs", "the last lines of the processes' logs")
    made.add_argument("service", nargs="?", help="a process (prefill-1) or a kind (prefill); all without it")
    made.add_argument("-n", "--lines", type=_lines, metavar="N", default=20, help="lines of each log (default 20)")
    made.add_argument("-f", "--follow", action="store_true", help="go on with what is written, until Ctrl-C")


def _admin(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    areas = _add(commands, "admin", "accounts, money and keys").add_subparsers(
        dest="area", metavar="WHAT", required=True
    )
    account = _add(areas, "account", "create, list and credit accounts").add_subparsers(
        dest="action", metavar="ACTION", required=True
    )
    create = _add(account, "create", "make an account; prints its id first")
    create.add_argument("--name", required=True, type=_name)
    create.add_argument("--credit", type=_amount, metavar="AMOUNT", help="topped-up money: makes the account paid")
    create.add_argument("--grant", type=_amount, metavar="AMOUNT", help="granted money: alone it is a trial")
    create.add_argument("--currency", choices=("USD", "CNY"))
    _as_json(_add(account, "list", "all accounts with their balances"))
    credit = _add(account, "credit", "give an account money")
    credit.add_argument("--account", required=True, type=_identifier, metavar="ID")
    credit.add_argument("--amount", required=True, type=_amount)
    credit.add_argument("--granted", action="store_true", help="granted, not topped up: does not make it paid")
    key = _add(areas, "key", "create, list and revoke API keys").add_subparsers(
        dest="action", metavar="ACTION", required=True
    )
    create_key = _add(key, "create", "make an API key; prints it, this once")
    create_key.add_argument("--account", required=True, type=_identifier, metavar="ID")
    create_key.add_argument("--traffic-class", choices=("agent", "chat"), help="retention of all this key's traffic")
    listed = _add(key, "list", "the keys of an account")
    listed.add_argument("--account", required=True, type=_identifier, metavar="ID")
    _as_json(listed)
    revoke = _add(key, "revoke", "end a key at once, everywhere")
    revoke.add_argument("key", type=_identifier, metavar="KEY_ID")


def _bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    made = _add(commands, "bench", "measure; without a name, list what can be measured")
    made.add_argument("name", nargs="?", choices=tuple(BENCHES), metavar="NAME", help=", ".join(BENCHES))
    made.add_argument("--json", type=Path, metavar="FILE", dest="json_file", help="also write the figures to FILE")
    made.add_argument("--quick", action="store_true", help="fewer and smaller runs")


def _as_json(made: argparse.ArgumentParser) -> None:
    made.add_argument("--json", action="store_true", dest="as_json", help="as JSON")


def _port(text: str) -> int:
    return _whole(text, 0, PORT_MAX)


def _lines(text: str) -> int:
    return _whole(text, 1, LINES_MAX)


def _workers(text: str) -> int:
    return _whole(text, 1, WORKERS_MAX)


def _whole(text: str, least: int, most: int) -> int:
    if not text.isdecimal() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
    return int(text)


def _seconds(text: str) -> float:
    return float(_whole(text, 1, 86_400))


def _amount(text: str) -> str:
    """A positive decimal as billing takes it, kept as text: money is never a float."""
    if not _AMOUNT.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a plain decimal with at most 9 decimals")
    most = limits.AMOUNT_NANO_MAX // limits.NANO
    if not 0 < Decimal(text) <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount of money above 0 and at most {most}")
    return text


def _name(text: str) -> str:
    """Printable, so that a list of accounts has one line for each."""
    if not text.strip() or not text.isprintable() or len(text) > limits.ACCOUNT_NAME_CHARS_MAX:
        most = limits.ACCOUNT_NAME_CHARS_MAX
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a name of 1 to {most} printable characters")
    return text


def _identifier(text: str) -> str:
    if not _IDENTIFIER.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not an id")
    return text
