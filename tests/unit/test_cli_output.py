"""Standard streams whose reader leaves, or that were never open."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shared.cli import main
from shared.cli.output import LastingFile

DEADLINE_S = 60.0


def test_what_nobody_reads_is_dropped() -> None:
    reading, writing = os.pipe()
    with LastingFile(writing, "w") as file:
        assert file.write(b"read") == 4
        assert os.read(reading, 10) == b"read"
        os.close(reading)
        assert file.write(b"dropped") == 7


def test_a_full_disk_stays_an_error() -> None:
    with LastingFile("/dev/full", "w") as file, pytest.raises(OSError, match="No space left"):
        file.write(b"x")


def run(line: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """A shell line with `$RUN` as the command; its data directory is `tmp_path`/data."""
    command = f"{sys.executable} -m shared.cli.main"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DEEPSERVE_")}
    environment |= {"RUN": command, "DEEPSERVE_DATA": str(tmp_path / "data")}
    return subprocess.run(
        ["bash", "-c", line], env=environment, capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("$RUN up --detach --prefill 0 2>&1 | true; exit ${PIPESTATUS[0]}", 2),
        ("DEEPSERVE_ENGINE=magic $RUN up --detach 2>&1 | true; exit ${PIPESTATUS[0]}", 2),
        ("DEEPSERVE_PROT=1 $RUN up --detach >&- 2>&-", 1),
        ("$RUN status 2>&1 | true; exit ${PIPESTATUS[0]}", 1),
        ("$RUN status >&- 2>&- <&-", 1),
        ("$RUN bench | true; exit ${PIPESTATUS[0]}", 0),
        ("$RUN bench >&-", 0),
        ("$RUN --help | true; exit ${PIPESTATUS[0]}", 0),
    ],
)
def test_the_exit_code_is_that_of_the_work(line: str, code: int, tmp_path: Path) -> None:
    done = run(line, tmp_path)
    assert (done.returncode, done.stderr) == (code, "")


def test_a_file_opened_later_is_never_taken_for_standard_output(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom shared.cli.output import make_lasting\nmake_lasting()\n"
        "opened = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)\nprint('text', flush=True)\nsys.exit(opened < 3)"
    )
    file = tmp_path / "file"
    done = subprocess.run(
        ["bash", "-c", 'exec "$0" -c "$1" "$2" >&-', sys.executable, code, str(file)], check=False, timeout=DEADLINE_S
    )
    assert done.returncode == 0
    assert file.read_bytes() == b""


def test_a_follower_ends_with_its_reader(tmp_path: Path) -> None:
    logs = tmp_path / "data" / "logs"
    logs.mkdir(parents=True)
    (logs / "gateway.log").write_text("one\ntwo\n")
    done = run("$RUN logs gateway -f | head -1; exit ${PIPESTATUS[0]}", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "one\n", "")


def test_terminated_is_an_exit_that_runs_the_clean_up() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        main.clean_up_when_ended()
        with pytest.raises(SystemExit) as ended:
            os.kill(os.getpid(), signal.SIGTERM)
        assert ended.value.code == 143
        os.kill(os.getpid(), signal.SIGTERM)  # ignored: the clean-up goes on
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
