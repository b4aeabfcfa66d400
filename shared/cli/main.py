"""`deepserve`: reads the arguments, calls the command, says what went wrong in one line. Exit codes: `failure`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Final

from shared.cli import arguments, output
from shared.cli.failure import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_SIGNAL, CommandFailed
from shared.cli.instance import Instance
from shared.contracts.errors import DeepServeError, SettingsError

_PREFIX: Final = "DEEPSERVE_"
_OF_ALL_COMMANDS: Final = "DEEPSERVE_DATA"


def main(argv: list[str] | None = None) -> int:
    """`argv`: for a caller in the same process, whose standard streams and signals are left as they are."""
    if argv is None:
        output.make_lasting()
    options = arguments.parser().parse_args(argv)
    if argv is None and (options.command == "bench" or getattr(options, "detach", False)):
        clean_up_when_ended()
    try:
        check_variables(options.command, os.environ)
        return run(options)
    except CommandFailed as failure:
        detail = f"\n{failure.detail}" if failure.detail else ""
        sys.stderr.write(f"deepserve {options.command}: {failure.message}{detail}\n")
        return failure.exit_code
    except (SettingsError, DeepServeError) as error:
        sys.stderr.write(f"deepserve {options.command}: {error}\n")
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def check_variables(command: str, environment: Mapping[str, str]) -> None:
    """Raises SettingsError for a variable of ours that nobody reads. `doctor` has it among its findings."""
    given = [name for name in environment if name.upper().startswith(_PREFIX) and name != _OF_ALL_COMMANDS]
    if given and command != "doctor":
        from shared.runtime import config

        config.check_unknown(environment)


def clean_up_when_ended() -> None:
    """SIGTERM and SIGHUP end the command like Ctrl-C: what it had started for itself is taken down before it ends. Once
    only: the clean-up has its own deadlines, and a second signal would leave it half done."""

    def on_signal(number: int, _: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(EXIT_SIGNAL + number)

    for each in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(each) is not signal.SIG_IGN:  # nohup
            signal.signal(each, on_signal)


def run(options: argparse.Namespace) -> int:
    """Each command is imported when it runs: `deepserve status` does not wait for the imports of `up`."""
    instance = Instance(arguments.data_directory(options, os.environ))
    match options.command:
        case "up":
            return _up(instance, options)
        case "down":
            from shared.cli.down import down

            return down(instance)
        case "status":
            from shared.cli.status import status

            return status(instance, as_json=options.as_json)
        case "logs":
            from shared.cli.logs import logs

            return logs(instance, options.service, lines=options.lines, follow=options.follow)
        case "admin":
            from shared.cli.admin import admin

            return admin(instance, options)
        case "bench":
            from shared.cli.bench.run import bench

            return bench(instance, options.name, options.json_file, quick=options.quick)
        case _:
            from shared.cli.doctor import doctor

            return doctor(instance)


def _up(instance: Instance, options: argparse.Namespace) -> int:
    from shared.cli import environment, up

    chosen = up.options_of(options, os.environ)
    environment.check({**os.environ, **chosen.variables})
    if not options.detach:
        return up.up(instance, chosen, os.environ, announce=not options.background)
    return up.detach(instance, chosen, timeout_s=options.timeout)


if __name__ == "__main__":
    sys.exit(main())
