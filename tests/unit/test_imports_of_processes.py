"""The floors hold: import contracts, and processes that never load torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCH_FREE = (
    "services.gateway.main",
    "services.billing.main",
    "services.cache_index.main",
    "shared.cli.main",
    "shared.cli.up",
    "shared.cli.bench.run",
)


@pytest.mark.parametrize("module", TORCH_FREE)
def test_a_fresh_interpreter_does_not_load_torch(module: str) -> None:
    code = (
        f"import sys, {module}; print(sorted(n for n in sys.modules if n.split('.')[0] in ('torch', 'transformers')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_import_contracts_are_kept() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([str(program)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
