"""The model's conversion: once for a data directory, in a process of its own, with its progress shown."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from shared.cli.failure import CommandFailed
from shared.contracts import limits


def is_converted(folder: Path) -> bool:
    """The converter gives the folder its name only when all of it is there."""
    return (folder / "model.json").is_file()


async def convert(folder: Path, environment: dict[str, str], say: Callable[[str], None]) -> None:
    """Makes `folder`. Raises CommandFailed with the converter's last words."""
    # A try that was killed leaves its partial folder; nobody else works in this data directory.
    for partial in folder.parent.glob(f".{folder.name}.partial-*"):
        await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "shared.engine.convert",
        "--source",
        "smollm2",
        "--out",
        str(folder),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    last = "it said nothing"
    try:
        async with asyncio.timeout(limits.CONVERT_TIMEOUT_S):
            if process.stdout is None:
                raise CommandFailed("the converter has no output")
            async for line in process.stdout:
                last = line.decode(errors="replace").rstrip() or last
                say(f"model: {last}")
            code = await process.wait()
    except TimeoutError as error:
        raise CommandFailed(f"the model's conversion took longer than {limits.CONVERT_TIMEOUT_S:.0f} s") from error
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if code != 0 or not is_converted(folder):
        raise CommandFailed(f"the model could not be converted (exit code {code}): {last}")
