"""The way of a request over real NATS and Postgres, with the hash engine: wrong KV anywhere is a wrong token.

Right answers come from an engine that sees the prompt alone; right hits from counting blocks by hand.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from shared.contracts.messages import Settle
from shared.contracts.usage import Usage
from tests.fakes.store import MemoryDisk
from tests.integration.path_parts import Account
from tests.integration.path_system import BLOCK, System, answer_alone, system

pytestmark = pytest.mark.servers


def prompt(seed: int, count: int) -> list[int]:
    """Distinct-looking token ids, above the stop token."""
    return [3 + (seed * 7_919 + i * 104_729) % 4_900 for i in range(count)]


@pytest.fixture
async def here(nats_url: str, fresh_database: str) -> AsyncIterator[System]:
    async with system(nats_url, fresh_database, MemoryDisk(lambda: 0.0).connect()) as running:
        yield running


async def test_an_answer_is_the_lone_engines_and_is_settled_once_with_its_count(here: System) -> None:
    account, asked_tokens = Account("a"), prompt(1, 5 * BLOCK + 3)
    asked = await here.gateway.answered(await here.gateway.ask(account, asked_tokens, 20, top_logprobs=2))
    assert asked.answer == answer_alone(asked_tokens, 20)
    assert (asked.finish, asked.hit_tokens) == ("length", 0)
    assert sorted(asked.logprobs) == list(range(20))
    settled = await here.books.ended(asked.request)
    assert isinstance(settled, Settle)
    assert settled.usage == Usage(cached=0, uncached=5 * BLOCK + 3, not_eligible=0, output=20)
    assert [claim.epoch.stage.name for claim in asked.claims] == ["PREFILL", "DECODE"]
