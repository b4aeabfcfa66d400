"""`deepserve admin …`: accounts, money and keys, through billing's administration API."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import msgspec

from shared.cli.admin_client import AdminClient
from shared.cli.failure import EXIT_OK, CommandFailed
from shared.cli.instance import Instance, running
from shared.cli.secrets import Secrets


def connect(instance: Instance) -> AdminClient:
    """The client of the instance that runs here. Raises CommandFailed when there is none, or it is not the caller's."""
    state = running(instance)
    if state.admin_url is None:
        raise CommandFailed(f"the instance in {instance.data} is still starting; try again in a moment")
    secrets = Secrets(instance.secrets)
    token = secrets.read_text(secrets.admin_token)
    if token is None:
        raise CommandFailed(f"cannot read {secrets.admin_token}: only the owner of the data directory administers it")
    return AdminClient(state.admin_url, token)


def admin(instance: Instance, options: argparse.Namespace) -> int:
    with connect(instance) as client:
        ACTIONS[options.area, options.action](client, options)
    return EXIT_OK


def _create_account(client: AdminClient, options: argparse.Namespace) -> None:
    wanted = {"credit": options.credit, "grant": options.grant, "currency": options.currency}
    account = client.create_account(options.name, {name: value for name, value in wanted.items() if value})
    _say(account["id"])
    _say(_account_line(account))


def _list_accounts(client: AdminClient, options: argparse.Namespace) -> None:
    accounts = list(client.accounts())
    if options.as_json:
        _say_json(accounts)
    for account in [] if options.as_json else accounts:
        _say(f"{account['id']}  {_account_line(account)}")


def _credit_account(client: AdminClient, options: argparse.Namespace) -> None:
    account = client.credit(options.account, options.amount, "granted" if options.granted else "topped_up")
    _say(_account_line(account))


def _create_key(client: AdminClient, options: argparse.Namespace) -> None:
    made = client.create_key(options.account, options.traffic_class)
    _say(made["key"])
    sys.stderr.write(f"{made['id']} for {options.account}; the key is shown only now, billing keeps its digest\n")


def _list_keys(client: AdminClient, options: argparse.Namespace) -> None:
    keys = client.keys(options.account)
    if options.as_json:
        _say_json(keys)
    for key in [] if options.as_json else keys:
        state = "revoked" if key["revoked"] else "active"
        _say(f"{key['id']}  sk-…{key['hint']}  {key['traffic_class'] or 'agent or chat'}  {state}")


def _revoke_key(client: AdminClient, options: argparse.Namespace) -> None:
    client.revoke_key(options.key)
    _say(f"{options.key} revoked")


ACTIONS = {
    ("account", "create"): _create_account,
    ("account", "list"): _list_accounts,
    ("account", "credit"): _credit_account,
    ("key", "create"): _create_key,
    ("key", "list"): _list_keys,
    ("key", "revoke"): _revoke_key,
}


def _account_line(account: dict[str, Any]) -> str:
    money = f"{account['total_balance']} {account['currency']}"
    parts = f"topped up {account['topped_up_balance']}, granted {account['granted_balance']}"
    kind = "paid" if account["paid"] else "trial"
    return f"{account['name']}  {kind}  {money} ({parts})  held {account['held']}  spent {account['spent']}"


def _say(text: object) -> None:
    sys.stdout.write(f"{text}\n")


def _say_json(value: object) -> None:
    _say(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
