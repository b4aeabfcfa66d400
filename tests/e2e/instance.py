"""A real instance of DeepServe, started and driven as a user does: by the `deepserve` command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai

DEEPSERVE = Path(sys.executable).with_name("deepserve")
UP_DEADLINE_S = 240
"""The first start converts the weights; a CI machine may be busy."""


class Instance:
    """`deepserve up --detach` over one data directory."""

    def __init__(self, data: Path, *options: str) -> None:
        self.data = data
        self.options = options

    def command(self, *arguments: str, check: bool = True, timeout_s: float = 60) -> str:
        """The command's standard output. Raises AssertionError with everything it printed when it fails."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DEEPSERVE_")}
        done = subprocess.run(
            [str(DEEPSERVE), *arguments, "--data", str(self.data)],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=environment,
            check=False,
        )
        if check:
            assert done.returncode == 0, (
                f"deepserve {arguments} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
            )
        return done.stdout

    def up(self) -> None:
        self.command("up", "--detach", "--port", "0", *self.options, timeout_s=UP_DEADLINE_S)

    def down(self) -> None:
        self.command("down", timeout_s=120)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.command("status", "--json"))
        return found

    def account(self, name: str, *money: str) -> str:
        """A new account's API key; `money` as ("--credit", "5")."""
        account = self.command("admin", "account", "create", "--name", name, *money).split()[0]
        printed = self.command("admin", "key", "create", "--account", account)
        return next(word for word in printed.split() if word.startswith("sk-"))

    def client(self, api_key: str) -> openai.OpenAI:
        return openai.OpenAI(api_key=api_key, base_url=self.status()["gateway_url"] + "/v1", max_retries=0, timeout=300)

    def pool_objects(self) -> set[str]:
        """Names of the objects in the embedded directory store's pool."""
        return {path.name for path in (self.data / "store" / "pool").rglob("*") if path.is_file()}
