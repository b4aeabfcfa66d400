"""Bodies of the administrator's API. Money is a decimal string in whole units, never a number: no float touches it."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.billing.account_repository import AccountBooks
from services.billing.accounts import ApiKey
from services.billing.ledger import Funds, Ledger
from services.billing.pricing import format_amount
from shared.contracts import limits

Amount = Annotated[str, Field(max_length=32, examples=["10", "0.5"])]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


# -- asked ------------------------------------------------------------------------------------------------------------


class NewAccount(Body):
    """`credit`: topped-up money, which makes the account paid. `grant`: money given; with it alone it is a trial."""

    name: str = Field(min_length=1, max_length=limits.ACCOUNT_NAME_CHARS_MAX)
    currency: Literal["USD", "CNY"] | None = None
    concurrency: int | None = Field(default=None, ge=1, le=1_000_000)
    credit: Amount | None = None
    grant: Amount | None = None


class NewCredit(Body):
    amount: Amount
    kind: Literal["topped_up", "granted"]


class NewKey(Body):
    """`traffic_class`: the key's setting; without it each request decides."""

    traffic_class: Literal["agent", "chat"] | None = None


# -- answered ---------------------------------------------------------------------------------------------------------


class AccountView(Body):
    """`total_balance` can be spent; `held` is reserved by requests under way; `spent` was taken by settled ones;
    `uncollected` is late usage that the balance did not cover. `paid`: the account may use the pool."""

    id: str
    name: str
    currency: str
    paid: bool
    total_balance: str
    granted_balance: str
    topped_up_balance: str
    held: str
    spent: str
    uncollected: str
    concurrency: int
    namespace: str
    created_at: datetime


class CreditView(AccountView):
    """The account after the credit. `journal`: the act's number in the journal."""

    amount: str
    kind: str
    journal: int


class KeyView(Body):
    id: str
    account: str
    hint: str
    traffic_class: str | None
    revoked: bool
    created_at: datetime
    revoked_at: datetime | None


class NewKeyView(KeyView):
    """`key`: shown only now."""

    key: str


class UsageView(Body):
    id: int
    request: str
    model: str
    prompt_tokens: int
    cached: int
    uncached: int
    not_eligible: int
    output: int
    reasoning: int
    amount: str
    price_version: int
    worker: str
    device_s: float
    late: bool
    created_at: datetime


class EntryView(Body):
    """One movement of money, from `debit` to `credit`; `act` says why."""

    id: int
    journal: int
    act: str
    debit: str
    credit: str
    amount: str
    request: str | None
    hold: str | None
    idempotency_key: str
    created_at: datetime


class Accounts(Body):
    """`next`: give it as `after` for the following page; null at the end."""

    accounts: list[AccountView]
    next: str | None


class Keys(Body):
    keys: list[KeyView]


class UsagePage(Body):
    usage: list[UsageView]
    next: int | None


class EntriesPage(Body):
    entries: list[EntryView]
    next: int | None


class FindingView(Body):
    name: str
    says: str
    count: int
    samples: list[dict[str, Any]]


class Reconciliation(Body):
    """`sound`: no check found anything."""

    sound: bool
    checks: list[FindingView]


class ErrorText(Body):
    message: str
    type: str
    param: str | None = None
    code: str


class ErrorBody(Body):
    error: ErrorText


def account_view(books: AccountBooks) -> AccountView:
    account, balances = books.account, books.balances
    funds = Funds(balances[Ledger.GRANTED], balances[Ledger.TOPPED_UP])
    return AccountView(
        id=account.id,
        name=account.name,
        currency=account.currency,
        paid=balances[Ledger.FUNDING] < 0 < funds.total_nano,
        total_balance=format_amount(funds.total_nano),
        granted_balance=format_amount(funds.granted_nano),
        topped_up_balance=format_amount(funds.topped_up_nano),
        held=format_amount(balances[Ledger.HELD]),
        spent=format_amount(balances[Ledger.REVENUE]),
        uncollected=format_amount(-balances[Ledger.UNCOLLECTED]),
        concurrency=account.concurrency,
        namespace=account.namespace,
        created_at=account.created_at,
    )


def key_view(key: ApiKey) -> KeyView:
    return KeyView(
        id=key.id,
        account=key.account,
        hint=key.hint,
        traffic_class=key.traffic_class,
        revoked=key.revoked_at is not None,
        created_at=key.created_at,
        revoked_at=key.revoked_at,
    )


def usage_view(row: Any) -> UsageView:
    """`row`: of the usage table."""
    names = set(UsageView.model_fields) - {"amount"}
    return UsageView(amount=format_amount(row.amount_nano), **{name: getattr(row, name) for name in names})


def entry_view(row: Any) -> EntryView:
    """`row`: of the entries table, with the act's columns of the journal."""
    names = set(EntryView.model_fields) - {"amount"}
    return EntryView(amount=format_amount(row.amount_nano), **{name: getattr(row, name) for name in names})
