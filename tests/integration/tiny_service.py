"""The smallest process that a supervisor can keep: writes its port, answers /readyz, ends on SIGTERM.

`DEEPSERVE_PORT` asks for a port; `TINY_CRASH=1` ends it at once with code 3; `TINY_STUBBORN=1` ignores SIGTERM.
"""

from __future__ import annotations

import http.server
import os
import signal
import sys
from pathlib import Path


class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"ready")

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: the log belongs to the test."""


def main() -> None:
    if os.environ.get("TINY_CRASH"):
        print("no reason to live", flush=True)
        sys.exit(3)
    if os.environ.get("TINY_STUBBORN"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = http.server.HTTPServer(("127.0.0.1", int(os.environ.get("DEEPSERVE_PORT", "0"))), Ready)
    path = Path(os.environ["DEEPSERVE_PORT_FILE"])
    fresh = path.with_suffix(".fresh")
    fresh.write_text(str(server.server_port))
    fresh.replace(path)
    server.serve_forever()


if __name__ == "__main__":
    main()
