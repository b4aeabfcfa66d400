"""The way of a request over real NATS and Postgres, with the hash engine: wrong KV anywhere is a wrong token.

Right answers come from an engine that sees the prompt alone; right hits from counting blocks by hand.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.decode.worker import DecodeWorker
from shared.contracts import limits, messages
from shared.contracts.block import object_name, pack_tokens
from shared.contracts.epoch import Epoch, Stage
from shared.contracts.errors import Overloaded
from shared.contracts.messages import BlockRef, DecodeWork, Release, Sampling, Settle, TokenEntry
from shared.contracts.ports import Space
from shared.contracts.usage import Usage
from shared.runtime.stores.directory import open_directory
from tests.fakes.store import FINE, Fate, MemoryDisk, flipped, torn
from tests.integration.path_parts import MODEL, Account
from tests.integration.path_system import BLOCK, System, answer_alone, make_engine, make_worker, system, working

pytestmark = pytest.mark.servers


def prompt(seed: int, count: int) -> list[int]:
    """Distinct-looking token ids, above the stop token."""
    return [3 + (seed * 7_919 + i * 104_729) % 4_900 for i in range(count)]


@pytest.fixture
async def here(nats_url: str, fresh_database: str, tmp_path: Path) -> AsyncIterator[System]:
    async with system(nats_url, fresh_database, open_directory(tmp_path)) as running:
        yield running


@pytest.fixture
async def slow(nats_url: str, fresh_database: str, tmp_path: Path) -> AsyncIterator[System]:
    """Two milliseconds a decode step."""
    async with system(nats_url, fresh_database, open_directory(tmp_path), rows_per_s=500) as running:
        yield running


@pytest.fixture
def disk() -> MemoryDisk:
    """Of `frail`: fails as a test says."""
    return MemoryDisk(lambda: 0.0)


@pytest.fixture
async def frail(nats_url: str, fresh_database: str, disk: MemoryDisk) -> AsyncIterator[System]:
    async with system(nats_url, fresh_database, disk.connect()) as running:
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


async def test_the_next_turn_hits_exactly_the_earlier_full_blocks_of_prompt_and_answer(here: System) -> None:
    account, first_prompt = Account("a"), prompt(2, 6 * BLOCK + 5)
    first = await here.gateway.answered(await here.gateway.ask(account, first_prompt, 30))
    # The KV of the last answer token was never computed: nothing followed it.
    computed = len(first_prompt) + 29
    second_prompt = [*first_prompt, *first.answer, *prompt(3, 11)]
    second = await here.gateway.answered(await here.gateway.ask(account, second_prompt, 25))
    assert second.hit_tokens == computed // BLOCK * BLOCK
    assert second.answer == answer_alone(second_prompt, 25)
    settled = await here.books.ended(second.request)
    assert isinstance(settled, Settle)
    assert (settled.usage.cached, settled.usage.prompt_tokens) == (second.hit_tokens, len(second_prompt))

    other = await here.gateway.answered(await here.gateway.ask(Account("b"), second_prompt, 25))
    assert (other.hit_tokens, other.answer) == (0, second.answer)


async def test_a_repeated_prompt_of_whole_blocks_computes_its_last_block_again(here: System) -> None:
    account, whole = Account("a"), prompt(4, 4 * BLOCK)
    for hit_tokens in (0, 3 * BLOCK):
        asked = await here.gateway.answered(await here.gateway.ask(account, whole, 12))
        assert (asked.hit_tokens, asked.answer) == (hit_tokens, answer_alone(whole, 12))
    rows = await here.rows()
    assert [row["position"] for row in rows] == list(range((4 * BLOCK + 11) // BLOCK))
    assert len(await here.objects("pool")) == len(rows)


async def test_a_trial_account_leaves_no_row_and_no_object_and_gets_the_same_answer(here: System) -> None:
    trial, asked_tokens = Account("t", paid=False), prompt(5, 5 * BLOCK + 2)
    for _ in range(2):
        asked = await here.gateway.answered(await here.gateway.ask(trial, asked_tokens, 40))
        assert (asked.hit_tokens, asked.answer) == (0, answer_alone(asked_tokens, 40))
        settled = await here.books.ended(asked.request)
        assert isinstance(settled, Settle)
        assert settled.usage == Usage(cached=0, uncached=0, not_eligible=len(asked_tokens), output=40)
    assert await here.rows() == []
    assert await here.objects("pool") == []
    await gone(here, "handoff")
    assert here.decode.floor.counters.snapshot() == {}


async def gone(here: System, space: Space) -> None:
    """Handoff objects are deleted at the end of a request, after its settlement: before its work message is ended."""
    await here.gateway.idle("decode-1")
    assert await here.objects(space) == []


async def test_with_the_store_down_decode_computes_the_whole_prompt(frail: System, disk: MemoryDisk) -> None:
    account, asked_tokens = Account("a"), prompt(6, 5 * BLOCK + 2)
    disk.fate = lambda operation, space, name: Fate(applied=False, error=Overloaded("down"))
    asked = await frail.gateway.answered(await frail.gateway.ask(account, asked_tokens, 20))
    assert (asked.hit_tokens, asked.answer) == (0, answer_alone(asked_tokens, 20))
    assert frail.decode.floor.counters.snapshot()["write.failed"] > 0
    assert await frail.rows() == []


@pytest.mark.parametrize("damage", [flipped, torn, lambda data: b""])
async def test_damaged_objects_are_misses_and_never_wrong_tokens(frail: System, disk: MemoryDisk, damage: Any) -> None:
    account, asked_tokens = Account("a"), prompt(7, 5 * BLOCK + 2)
    await frail.gateway.answered(await frail.gateway.ask(account, asked_tokens, 4))
    victim = (await frail.rows())[2]
    name = object_name(victim["key"], victim["put_id"])
    disk.fate = lambda operation, space, found: Fate(damage=damage) if (operation, found) == ("get", name) else FINE
    asked = await frail.gateway.answered(await frail.gateway.ask(account, asked_tokens, 20))
    assert (asked.hit_tokens, asked.answer) == (2 * BLOCK, answer_alone(asked_tokens, 20))


def places(rows: list[Any]) -> dict[int, str]:
    """Position → the object that its row names."""
    return {row["position"]: object_name(row["key"], row["put_id"]) for row in rows}


def empty(folder: Path) -> None:
    for inner in folder.iterdir():
        shutil.rmtree(inner)


@pytest.mark.parametrize("damaged", [{2}, {0}, {1, 2, 4}])
async def test_a_damaged_object_is_written_again_and_the_others_stay(
    frail: System, disk: MemoryDisk, damaged: set[int]
) -> None:
    account, asked_tokens = Account("a"), prompt(40, 5 * BLOCK + 2)
    await frail.gateway.answered(await frail.gateway.ask(account, asked_tokens, 4))
    before = places(await frail.rows())
    for position in damaged:
        disk.write("pool", before[position], flipped(disk.objects["pool", before[position]][0]))
    for hit_blocks in (min(damaged), 5):
        asked = await frail.gateway.answered(await frail.gateway.ask(account, asked_tokens, 4))
        assert (asked.hit_tokens, asked.answer) == (hit_blocks * BLOCK, answer_alone(asked_tokens, 4))
    await frail.gateway.idle("prefill-1")
    after = places(await frail.rows())
    assert {position for position in before if before[position] != after[position]} == damaged
    assert disk.names("pool") == sorted(after.values())


async def test_a_store_that_was_emptied_is_filled_again_by_the_next_request(here: System, tmp_path: Path) -> None:
    account, asked_tokens = Account("a"), prompt(41, 30 * BLOCK)
    await here.gateway.answered(await here.gateway.ask(account, asked_tokens, 4))
    empty(tmp_path)
    for hit_blocks in (0, 29):
        asked = await here.gateway.answered(await here.gateway.ask(account, asked_tokens, 4))
        assert (asked.hit_tokens, asked.answer) == (hit_blocks * BLOCK, answer_alone(asked_tokens, 4))
    assert sorted(await here.objects("pool")) == sorted(places(await here.rows()).values())


async def test_a_grant_that_may_not_write_mends_nothing(frail: System, disk: MemoryDisk) -> None:
    account, asked_tokens = Account("a"), prompt(42, 4 * BLOCK + 2)
    reader = Account("r", writes=False, namespace=account.namespace)
    await frail.gateway.answered(await frail.gateway.ask(account, asked_tokens, 4))
    before = places(await frail.rows())
    await frail.store.delete("pool", before[1])
    for _ in range(2):
        asked = await frail.gateway.answered(await frail.gateway.ask(reader, asked_tokens, 4))
        assert (asked.hit_tokens, asked.answer) == (BLOCK, answer_alone(asked_tokens, 4))
    assert places(await frail.rows()) == before


async def test_a_store_that_cannot_read_now_replaces_nothing(frail: System, disk: MemoryDisk) -> None:
    account, asked_tokens = Account("a"), prompt(43, 4 * BLOCK + 2)
    await frail.gateway.answered(await frail.gateway.ask(account, asked_tokens, 4))
    before = places(await frail.rows())
    unwell = Fate(applied=False, error=Overloaded("busy"))
    disk.fate = lambda operation, space, name: unwell if (operation, name) == ("get", before[1]) else FINE
    asked = await frail.gateway.answered(await frail.gateway.ask(account, asked_tokens, 4))
    assert (asked.hit_tokens, asked.answer) == (BLOCK, answer_alone(asked_tokens, 4))
    assert places(await frail.rows()) == before


async def test_decode_mends_what_was_lost_after_prefill_had_read_it(frail: System, disk: MemoryDisk) -> None:
    account, asked_tokens = Account("a"), prompt(44, 5 * BLOCK + 2)
    await frail.gateway.answered(await frail.gateway.ask(account, asked_tokens, 4))
    before = places(await frail.rows())
    reads: list[str] = []

    def lost_before_its_second_read(operation: str, space: str, name: str) -> Fate:
        if operation == "get" and name in (before[1], before[3]):
            reads.append(name)
            if reads.count(name) == 2:
                disk.objects.pop(("pool", name))
        return FINE

    disk.fate = lost_before_its_second_read
    for _ in range(2):
        asked = await frail.gateway.answered(await frail.gateway.ask(account, asked_tokens, 4))
        assert (asked.hit_tokens, asked.answer) == (5 * BLOCK, answer_alone(asked_tokens, 4))
        await frail.gateway.idle("decode-1")
    assert frail.decode.floor.counters.snapshot()["commit.mended"] == 2
    after = places(await frail.rows())
    assert {position for position in before if before[position] != after[position]} == {1, 3}
    assert disk.names("pool") == sorted(after.values())


async def test_many_requests_at_once_each_get_their_own_answer(here: System) -> None:
    accounts = [Account("a"), Account("b"), Account("t", paid=False)]
    prompts = [prompt(100 + i, 20 + 13 * i) for i in range(12)]
    asked = [await here.gateway.ask(accounts[i % 3], prompts[i], 15 + i) for i in range(12)]
    for i, one in enumerate(asked):
        await here.gateway.answered(one)
        assert one.answer == answer_alone(prompts[i], 15 + i), f"request {i}"
    for one in asked:
        assert isinstance(await here.books.ended(one.request), Settle)
    shared_steps = [batch for batch in here.gateway.batches if len({e.request for e in batch.entries}) > 1]
    assert shared_steps, "one message a step carries several sequences"
    assert here.decode.floor.pages.free == here.decode.floor.engine.pages_free == 256
    assert here.prefill.floor.pages.free == here.prefill.floor.engine.pages_free == 256


async def test_one_token_answers_end_at_prefill_and_fill_the_pool(here: System) -> None:
    account, asked_tokens = Account("a"), prompt(8, 3 * BLOCK + 1)
    asked = await here.gateway.answered(await here.gateway.ask(account, asked_tokens, 1))
    assert (asked.finish, asked.answer) == ("length", answer_alone(asked_tokens, 1))
    settled = await here.books.ended(asked.request)
    assert isinstance(settled, Settle)
    assert settled.usage.output == 1
    assert [claim.epoch.stage.name for claim in asked.claims] == ["PREFILL"]
    again = await here.gateway.answered(await here.gateway.ask(account, asked_tokens, 1))
    assert again.hit_tokens == 3 * BLOCK


async def test_a_stop_string_ends_the_work_and_names_the_count(slow: System) -> None:
    account, asked_tokens = Account("a"), prompt(9, 2 * BLOCK)
    asked = await slow.gateway.answered(await slow.gateway.ask(account, asked_tokens, 400, stop_at=6))
    settled = await slow.books.ended(asked.request)
    assert isinstance(settled, Settle)
    assert settled.usage.output == 6
    assert asked.received < 50, "the worker stopped soon"
    await slow.gateway.until(lambda: slow.decode.floor.engine.pages_free == 256)


async def test_lost_token_messages_are_said_again(here: System) -> None:
    lost: list[int] = []

    def deaf(entry: TokenEntry) -> bool:
        """Every third entry that is said for the first time."""
        if entry.first in lost or len(lost) > 8 or entry.first % 3:
            return False
        lost.append(entry.first)
        return True

    account, asked_tokens = Account("a"), prompt(10, 2 * BLOCK + 1)
    here.gateway.deaf_to = deaf
    asked = await here.gateway.ask(account, asked_tokens, 30)
    async with asyncio.timeout(20):
        while asked.final is None:
            await asyncio.sleep(0.05)
            if asked.epoch is not None:
                await here.gateway.resend(asked, asked.received)
    assert lost
    assert asked.answer == answer_alone(asked_tokens, 30)
    settled = await here.books.ended(asked.request)
    assert isinstance(settled, Settle)
    assert settled.usage.output == 30


async def test_a_lost_gateway_ends_its_work_and_pays_what_it_acknowledged(
    slow: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PEER_LEASE_S", 1.5)
    account = Account("a")
    asked_tokens = prompt(11, 4)
    slow.gateway.deaf_to = lambda entry: entry.first >= 5
    asked = await slow.gateway.ask(account, asked_tokens, 500)
    await slow.gateway.until(lambda: asked.received == 5)
    slow.gateway.silence()
    settled = await slow.books.ended(asked.request)
    assert isinstance(settled, Settle)
    assert settled.usage.output == 5
    await gone(slow, "handoff")


async def test_a_drained_decode_worker_gives_its_request_to_another_without_a_seam(slow: System) -> None:
    account, asked_tokens = Account("a"), prompt(12, 3 * BLOCK + 3)
    slow.gateway.deaf_to = lambda entry: entry.first >= 40 and entry.epoch.delivery == 1
    asked = await slow.gateway.ask(account, asked_tokens, 200)
    await slow.gateway.until(lambda: asked.received == 40)
    other = make_worker("decode", "decode-2", slow.bus, slow.store, slow.books, make_engine())
    other_drain = asyncio.Event()
    async with working(other, other_drain):
        slow.drains["decode"].set()
        await slow.gateway.until(lambda: len(asked.claims) == 3)
        await slow.gateway.answered(asked)
    assert asked.answer == answer_alone(asked_tokens, 200)
    assert [claim.worker for claim in asked.claims] == ["prefill-1", "decode-1", "decode-2"]
    settled = await slow.books.ended(asked.request)
    assert isinstance(settled, Settle)
    assert (settled.usage.output, settled.worker) == (200, "decode-2")


async def test_answers_that_outgrow_the_pages_leave_and_come_back_without_a_seam(
    nats_url: str, fresh_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 pages of 8 tokens, and three sequences that need 13 each: no two of them fit to their ends."""
    monkeypatch.setattr(limits, "ANSWER_TOKENS_EXPECTED", 8)
    prompts = [prompt(20 + i, 20) for i in range(3)]
    async with system(nats_url, fresh_database, open_directory(tmp_path), pages=16, rows_per_s=200) as small:
        asked = [await small.gateway.ask(Account(f"a{i}"), prompts[i], 80) for i in range(3)]
        for i, one in enumerate(asked):
            await small.gateway.answered(one)
            assert (one.finish, one.answer) == ("length", answer_alone(prompts[i], 80))
        assert small.decode.floor.counters.snapshot()["answer.preempted"] > 0
        await small.gateway.idle("decode-1")
        assert small.decode.floor.pages.free == small.decode.floor.engine.pages_free == 16


async def test_a_prompt_that_never_fits_is_refused_and_its_hold_released(
    nats_url: str, fresh_database: str, tmp_path: Path
) -> None:
    async with system(nats_url, fresh_database, open_directory(tmp_path)) as here:
        asked = await here.gateway.answered(await here.gateway.ask(Account("a"), prompt(30, 512), 10))
        assert asked.error == "InvalidRequest"
        assert isinstance(await here.books.ended(asked.request), Release)


async def test_a_dead_index_costs_a_miss_and_nothing_else(nats_url: str, fresh_database: str, tmp_path: Path) -> None:
    account, asked_tokens = Account("a"), prompt(31, 3 * BLOCK + 1)
    async with system(nats_url, fresh_database, open_directory(tmp_path), index=False) as here:
        for _ in range(2):
            asked = await here.gateway.answered(await here.gateway.ask(account, asked_tokens, 20))
            assert (asked.hit_tokens, asked.answer) == (0, answer_alone(asked_tokens, 20))
        counts = here.prefill.floor.counters.snapshot()
        assert counts["lookup.failed"] == 2
        # Decode reads what prefill wrote by its name: the rows are only for others.
        assert not any(name.startswith("miss") for name in here.decode.floor.counters.snapshot())


async def test_another_namespaces_handoff_is_not_read(here: System) -> None:
    """A handoff that names a foreign namespace (a worker taken over) is computed from its token ids."""
    victim, thief = Account("victim"), Account("thief")
    asked_tokens = prompt(32, 3 * BLOCK + 1)
    await here.gateway.answered(await here.gateway.ask(victim, asked_tokens, 4))
    refs = tuple(
        BlockRef(source="pool", namespace=victim.namespace, key=row["key"], put_id=row["put_id"])
        for row in (await here.rows())[:3]
    )
    asked = here.gateway.note(thief, asked_tokens, 12)
    work = DecodeWork(
        request=asked.request,
        attempt=1,
        gateway=here.gateway.id,
        model=MODEL,
        tokens=pack_tokens(asked_tokens),
        blocks=refs,
        tail=None,
        handoff_key=bytes(32),
        first_token=answer_alone(asked_tokens, 1)[0],
        hit_tokens=0,
        sampling=Sampling(temperature=0.0, top_p=1.0, seed=7, stop_tokens=(2,)),
        grant=asked.grant,
        published_at_s=0.0,
    )
    await here.bus.publish("decode.hash.any", messages.encode(work), "theft")
    asked.tokens[0] = work.first_token
    await here.gateway.answered(asked)
    assert asked.answer == answer_alone(asked_tokens, 12)
    assert victim.namespace in here.books.namespace_keys
    assert here.books.keys_given[thief.name] <= {thief.namespace}


class ByHand:
    """A delivery that a test hands to a worker itself."""

    def __init__(self, payload: bytes, number: int) -> None:
        self.payload = payload
        self.subject = "decode.hash.any"
        self.number = number
        self.ends: list[str] = []

    async def ack(self) -> None:
        self.ends.append("ack")

    async def nak(self, delay_s: float) -> None:
        self.ends.append("nak")

    async def drop(self) -> None:
        self.ends.append("drop")

    async def in_progress(self) -> None:
        """Nothing lapses here."""


async def test_a_newer_delivery_in_the_same_worker_takes_over_and_the_older_settles_nothing(slow: System) -> None:
    asked_tokens = prompt(33, 3 * BLOCK + 1)
    asked = slow.gateway.note(Account("t", paid=False), asked_tokens, 150)
    work = DecodeWork(
        request=asked.request,
        attempt=1,
        gateway=slow.gateway.id,
        model=MODEL,
        tokens=pack_tokens(asked_tokens),
        blocks=(),
        tail=None,
        handoff_key=bytes(32),
        first_token=answer_alone(asked_tokens, 1)[0],
        hit_tokens=0,
        sampling=Sampling(temperature=0.0, top_p=1.0, seed=7, stop_tokens=(2,)),
        grant=asked.grant,
        published_at_s=0.0,
    )
    asked.tokens[0] = work.first_token
    handle = DecodeWorker(slow.decode.floor).handle
    older, newer = (ByHand(messages.encode(work), number) for number in (1, 2))
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        tasks.create_task(handle(older))
        await slow.gateway.until(lambda: asked.received > 20)
        tasks.create_task(handle(newer))
        await slow.gateway.answered(asked)
    assert asked.answer == answer_alone(asked_tokens, 150)
    assert (older.ends, newer.ends) == ([], ["ack"])
    settled = await slow.books.ended(asked.request)
    assert isinstance(settled, Settle)
    assert (settled.epoch.delivery, settled.usage.output) == (2, 150)


async def test_unreadable_and_stale_work_is_dropped(here: System) -> None:
    handle = DecodeWorker(here.decode.floor).handle
    garbage = ByHand(b"\x00", 1)
    await handle(garbage)
    asked = here.gateway.note(Account("a"), prompt(34, 4), 5)
    asked.epoch = Epoch(2, Stage.PREFILL, 1)
    work = DecodeWork(
        request=asked.request,
        attempt=1,
        gateway=here.gateway.id,
        model=MODEL,
        tokens=pack_tokens(prompt(34, 4)),
        blocks=(),
        tail=None,
        handoff_key=bytes(32),
        first_token=5,
        hit_tokens=0,
        sampling=Sampling(temperature=0.0, top_p=1.0, seed=7, stop_tokens=()),
        grant=asked.grant,
        published_at_s=0.0,
    )
    stale = ByHand(messages.encode(work), 1)
    await handle(stale)
    other_grant = here.gateway.note(Account("b"), prompt(34, 4), 5).grant
    foreign = ByHand(messages.encode(msgspec.structs.replace(work, grant=other_grant)), 1)
    await handle(foreign)
    assert garbage.ends == stale.ends == foreign.ends == ["drop"]
    assert here.books.settled == {}


async def test_a_cancel_during_prefill_stops_it_within_a_step_and_pays_the_prompt(slow: System) -> None:
    asked_tokens = prompt(35, 500)  # a second of prefill, in sixteen steps
    computing = await slow.first_commit()
    asked = await slow.gateway.ask(Account("a"), asked_tokens, 10)
    async with asyncio.timeout(10):
        await computing.wait()
    await slow.gateway.finalize(asked, 0, "cancelled")
    settled = await slow.books.ended(asked.request)
    assert isinstance(settled, Settle)
    assert settled.usage == Usage(cached=0, uncached=500, not_eligible=0, output=0)
    assert settled.epoch.stage is Stage.PREFILL
    assert asked.tokens == {}
    assert settled.device_s < 0.9
    await slow.gateway.idle("prefill-1")
    assert slow.prefill.floor.engine.pages_free == 256
