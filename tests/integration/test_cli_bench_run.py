"""`bench plane` from nothing: its own instance, real servers, real processes; that it runs, not what it measures."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.instance import DEEPSERVE

pytestmark = pytest.mark.servers

DEADLINE_S = 240
SERVICES = {"billing", "cache_index", "prefill-1", "decode-1", "gateway"}
SHORT = {"1 clients, 8 tokens", "16 clients, 8 tokens", "64 clients, 8 tokens"}


def test_the_plane_is_measured_on_an_instance_of_its_own(model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = subprocess.run(
        [str(DEEPSERVE), "bench", "plane", "--quick", "--json", str(file), "--data", str(tmp_path / "data")],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, "DEEPSERVE_MODEL_DIR": str(model_dir)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    written = json.loads(file.read_text())
    assert written["machine"] in done.stdout
    figures = written["figures"]
    assert set(figures) == {*SHORT, "32 clients, 256 tokens", "loop_held_max_s", "loop_held_over_20_ms"}
    assert set(figures["loop_held_max_s"]) == SERVICES
    for name in SHORT:
        case = figures[name]
        assert case["hit_tokens_p50"] in (128, 192)
        assert 0 < case["first_p50_s"] <= case["first_p99_s"] <= case["whole_p99_s"]
        parts = case["parts_p50_s"]
        wanted = {"tag", "prepare", "hold", "publish", "worker_queue", "lookup", "delivery", "handoff"}
        assert wanted <= set(parts)
        assert sum(parts[part] for part in ("hold", "lookup", "handoff")) <= 2 * case["whole_p99_s"]
        assert case["settle_mean_s"] > 0
        assert {*SERVICES, "nats", "postgres", "load"} <= set(case["processor_s"])
    assert figures["32 clients, 256 tokens"]["tokens_s"]["median"] > 0
    assert {aim["bound"] for aim in written["aims"]} == {10.0, 20.0, 200.0, 10_000.0}
