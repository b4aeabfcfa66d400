"""`deepserve`: reads the arguments, calls the command, says what went wrong in one line. Exit codes: `failure`."""

from __future__ import annotations

import argparse
import os
import sys

from shared.cli import arguments
from shared.cli.failure import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK, CommandFailed
from shared.cli.instance import Instance
from shared.contracts.errors import DeepServeError, SettingsError


def main(argv: list[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    options = arguments.parser().parse_args(given)
    try:
        return run(options)
    except CommandFailed as failure:
        detail = f"\n{failure.detail}" if failure.detail else ""
        sys.stderr.write(f"deepserve {options.command}: {failure.message}{detail}\n")
        return failure.exit_code
    except (SettingsError, DeepServeError) as error:
        sys.stderr.write(f"deepserve {options.command}: {error}\n")
        return EXIT_FAILURE
    except BrokenPipeError:
        # The reader of a pipe went away: what it did not read is not our failure.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return EXIT_OK
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


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
    from shared.cli import up

    chosen = up.options_of(options, os.environ)
    if not options.detach:
        return up.up(instance, chosen, os.environ, announce=not options.background)
    return up.detach(instance, chosen, timeout_s=options.timeout)


if __name__ == "__main__":
    sys.exit(main())
