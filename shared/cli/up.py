"""`deepserve up`: one instance in the foreground, or in the background with `--detach`."""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from shared.cli import environment
from shared.cli.arguments import ENGINES, PORT_MAX
from shared.cli.failure import EXIT_INTERRUPTED, EXIT_OK, CommandFailed, UsageError
from shared.cli.instance import Instance, running
from shared.cli.process import tail
from shared.cli.reporter import Reporter
from shared.cli.secrets import Secrets
from shared.cli.supervisor import Options, Supervisor
from shared.contracts import limits

DEFAULT_PORT: Final = 8_000
MODEL: Final = "smollm2-135m-instruct"
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def options_of(given: argparse.Namespace, caller: Mapping[str, str]) -> Options:
    """What the command line says wins over the caller's variables, and those over the defaults. Raises UsageError for
    a variable's value that the command line would refuse."""
    port = given.port if given.port is not None else caller.get("DEEPSERVE_PORT") or DEFAULT_PORT
    engine = given.engine or caller.get("DEEPSERVE_ENGINE") or "torch"
    if not str(port).isdecimal() or int(port) > PORT_MAX:
        raise UsageError(f"DEEPSERVE_PORT={port} is not a whole number from 0 to {PORT_MAX}")
    if engine not in ENGINES:
        raise UsageError(f"DEEPSERVE_ENGINE={engine} is none of {', '.join(ENGINES)}")
    return Options(
        prefill=given.prefill,
        decode=given.decode,
        engine=engine,
        variables={"DEEPSERVE_PORT": str(port), "DEEPSERVE_ENGINE": engine},
    )


def up(instance: Instance, options: Options, caller: Mapping[str, str], *, announce: bool) -> int:
    """Runs until a signal. `announce`: print the API key and a first request (not into a log file)."""
    environment.check({**caller, **options.variables})
    instance.prepare()
    with instance.locked():
        check_port(options.variables["DEEPSERVE_PORT"], caller.get("DEEPSERVE_HOST") or "127.0.0.1")
        return asyncio.run(_supervise(instance, options, caller, announce=announce))


async def _supervise(instance: Instance, options: Options, caller: Mapping[str, str], *, announce: bool) -> int:
    reporter = Reporter()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    supervisor = Supervisor(instance, options, caller, reporter)

    def on_signal() -> None:
        if stop.is_set():
            reporter.say("asked again to stop: not waiting for what runs")
            supervisor.hurry()
        stop.set()

    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal)
    reporter.say(f"deepserve up in {instance.data}")
    try:
        return await _run(supervisor, stop, reporter, announce=announce)
    finally:
        begun_s = reporter.elapsed_s
        reporter.say("stopping: gateway first, then workers, index, books, servers")
        for name in await supervisor.drain():
            reporter.say(f"{name} did not end in time and was killed; its log says what it did last")
        reporter.say(f"stopped ({reporter.elapsed_s - begun_s:.1f} s)")


async def _run(supervisor: Supervisor, stop: asyncio.Event, reporter: Reporter, *, announce: bool) -> int:
    stopped = asyncio.create_task(stop.wait())
    try:
        starting = asyncio.create_task(supervisor.start())
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
            return EXIT_INTERRUPTED
        addresses = starting.result()
        reporter.say("ready")
        if announce:
            sys.stdout.write(first_steps(addresses.gateway_url, addresses.api_key))
            sys.stdout.flush()
        watching = asyncio.create_task(supervisor.watch())
        await asyncio.wait({watching, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()
        watching.cancel()
        return EXIT_OK
    finally:
        stopped.cancel()


def detach(instance: Instance, options: Options, *, timeout_s: float) -> int:
    """Starts `deepserve up` in a session of its own and returns when it is ready.

    Raises CommandFailed with its reason and the end of its log when it is not. Nobody would know of a supervisor whose
    starter has gone: it is stopped when this one fails or is ended, but not when only its output is not read any more.
    """
    instance.prepare()
    if pid := instance.holder():
        raise CommandFailed(f"{instance.data} is already in use by deepserve up, process {pid}")
    log = instance.log("up")
    log.unlink(missing_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "shared.cli.main", "up", "--background", *_as_arguments(instance, options)],
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            env={**os.environ, **options.variables},
            start_new_session=True,
        )
    finally:
        os.close(descriptor)
    try:
        _follow_until_ready(instance, child, log, timeout_s)
        state = running(instance)
        demo = Secrets(instance.secrets).read_demo()
        sys.stdout.write(first_steps(state.gateway_url or "", (demo.api_key if demo else None) or ""))
        sys.stdout.write(f"\nIt runs in the background; stop it with: deepserve down --data {instance.data}\n")
        sys.stdout.flush()
    except BaseException:
        child.terminate()
        child.wait(limits.DOWN_TIMEOUT_S)
        raise
    return EXIT_OK


def _as_arguments(instance: Instance, options: Options) -> list[str]:
    given = {
        "--data": str(instance.data),
        "--port": options.variables["DEEPSERVE_PORT"],
        "--engine": options.engine,
        "--prefill": str(options.prefill),
        "--decode": str(options.decode),
    }
    return [word for pair in given.items() for word in pair]


def _follow_until_ready(instance: Instance, child: subprocess.Popen[bytes], log: Path, timeout_s: float) -> None:
    """Copies the supervisor's lines to our standard error until its state says ready."""
    deadline = time.monotonic() + timeout_s
    with log.open("rb") as lines:
        while True:
            sys.stderr.write(lines.read().decode(errors="replace"))
            sys.stderr.flush()
            if (code := child.poll()) is not None:
                sys.stderr.write(lines.read().decode(errors="replace"))
                raise CommandFailed(f"the instance did not start (exit code {code}); its log is {log}")
            state = instance.read_state()
            if state is not None and state.pid == child.pid and state.phase == "ready":
                return
            if time.monotonic() > deadline:
                raise CommandFailed(f"the instance was not ready after {timeout_s:.0f} s", detail=tail(log))
            time.sleep(limits.READY_POLL_S)


def first_steps(gateway_url: str, api_key: str) -> str:
    return f"""
base URL  {gateway_url}/v1
API key   {api_key}

curl {gateway_url}/v1/chat/completions \\
  -H "Authorization: Bearer {api_key}" -H "Content-Type: application/json" \\
  -d '{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "Name three colours."}}], "stream": true}}'
"""


def check_port(port: str, host: str) -> None:
    """Raises CommandFailed when somebody listens there already: better one line now than a log full of restarts."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
            message = f"port {port} of {host} {reason}; name another with --port (0 picks a free one)"
            raise CommandFailed(message) from error
