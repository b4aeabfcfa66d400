"""Logs: one JSON object a line on standard error, ours and the libraries' alike."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import logging
import structlog
from shared.runtime import log

log.configure("prefill", "info", worker="prefill-1")
ours = structlog.get_logger()
ours.info("handoff.claimed", request="r1", key=bytes([171, 205]))
ours.debug("step.planned")
logging.getLogger("nats").warning("lost %s", "connection")
logging.getLogger("nats").info("chatter")
try:
    secret = "hunter2"
    raise ValueError("broken")
except ValueError:
    ours.error("service.failed", exc_info=True)
"""


def test_every_line_is_one_json_object_with_the_service() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == ""
    assert done.stderr.count("hunter2") == 0
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["event"] for line in lines] == ["handoff.claimed", "lost connection", "service.failed"]
    assert all((line["service"], line["worker"]) == ("prefill", "prefill-1") for line in lines)
    assert [line["level"] for line in lines] == ["info", "warning", "error"]
    assert lines[0]["key"] == "abcd"
    assert lines[0]["timestamp"].endswith("Z")
    assert lines[2]["exception"][0]["exc_value"] == "broken"
