"""The invariants (design, section 10), each with its two enforcers of different kinds; a tidy test reads this table."""

from __future__ import annotations

from typing import Final

import msgspec


class Invariant(msgspec.Struct, frozen=True, kw_only=True):
    """`enforcers`: (kind, where); kinds are code, constraint, auditor, reconciliation."""

    number: int
    says: str
    enforcers: tuple[tuple[str, str], ...]


INVARIANTS: Final = (
    Invariant(
        number=1,
        says="A hold has exactly one end; a request never settles above its hold.",
        enforcers=(("constraint", "services/billing/tables.py"), ("code", "services/billing/ledger.py")),
    ),
    Invariant(
        number=2,
        says="Debits equal credits; no balance below its limit, under any concurrency.",
        enforcers=(("constraint", "services/billing/tables.py"), ("code", "services/billing/repository.py")),
    ),
    Invariant(
        number=3,
        says="The tokens a client sees are a gapless prefix, without repeats, of one token sequence.",
        enforcers=(("code", "services/gateway/token_log.py"), ("auditor", "tests/e2e")),
    ),
    Invariant(
        number=4,
        says="An old epoch changes nothing.",
        enforcers=(("code", "services/gateway/request_state.py"), ("constraint", "services/billing/tables.py")),
    ),
    Invariant(
        number=5,
        says="Free pages plus pages in tables are all pages.",
        enforcers=(("code", "shared/engine/page_table.py"), ("auditor", "tests/stateful/test_page_table.py")),
    ),
    Invariant(
        number=6,
        says="An indexed block exists in the store and has the bytes its header says.",
        enforcers=(("code", "shared/worker/block_writer.py"), ("code", "shared/runtime/stores/sealed.py")),
    ),
    Invariant(
        number=7,
        says="No key, row or object crosses a namespace, except reading a shared one; no trial account uses the pool.",
        enforcers=(("code", "services/cache_index/handlers.py"), ("constraint", "services/cache_index/tables.py")),
    ),
    Invariant(
        number=8,
        says="Usage is counted once per request; the classes sum to the prompt.",
        enforcers=(("code", "shared/contracts/usage.py"), ("constraint", "services/billing/tables.py")),
    ),
    Invariant(
        number=9,
        says="The same idempotency key with other content is an error and an alarm.",
        enforcers=(("code", "services/billing/repository.py"), ("constraint", "services/billing/tables.py")),
    ),
    Invariant(
        number=10,
        says="A hit gives the same tokens as a miss.",
        enforcers=(("code", "shared/engine/selftest.py"), ("auditor", "tests/e2e")),
    ),
    Invariant(
        number=11,
        says="Every request ends before its deadline; nothing it held outlives it.",
        enforcers=(("code", "services/gateway/request_flow.py"), ("reconciliation", "services/billing/reconcile.py")),
    ),
)
