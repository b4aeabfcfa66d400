"""The demo account: created once, with credit, and remembered with its API key where only the owner can read it."""

from __future__ import annotations

from typing import Final

from shared.cli.admin_client import AdminClient
from shared.cli.secrets import DemoAccount, Secrets

DEMO_NAME: Final = "demo"
DEMO_CREDIT: Final = "10"


def ensure_demo(client: AdminClient, secrets: Secrets) -> str:
    """The demo's API key. Blocking. The books are the truth: a remembered account that they do not have (another
    database) is created there."""
    demo = secrets.read_demo()
    if demo is None or not client.knows(demo.account):
        account = client.create_account(DEMO_NAME, {"credit": DEMO_CREDIT})["id"]
        demo = DemoAccount(account=str(account))
        secrets.write_demo(demo)
    if demo.api_key is not None:
        return demo.api_key
    api_key = str(client.create_key(demo.account, None)["key"])
    secrets.write_demo(DemoAccount(account=demo.account, api_key=api_key))
    return api_key
