"""The simulated loop: virtual time, one order for each seed, crashes without clean-up."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.sim import threads
from tests.sim.loop import EPOCH_S, Deadlock, SimClock, SimLoop, SimulationFailed, TooManySteps, run_simulation
from tests.sim.process import SimProcess


def test_time_jumps_to_the_next_timer() -> None:
    async def main(loop: SimLoop) -> tuple[float, float]:
        await asyncio.sleep(3_000)
        return loop.time(), time.time()

    started = time.perf_counter()
    assert run_simulation(1, main) == (3_000.0, EPOCH_S + 3_000.0)
    assert time.perf_counter() - started < 1.0


def test_nothing_ready_and_no_timer_is_a_deadlock() -> None:
    async def main(loop: SimLoop) -> None:
        await loop.create_future()

    with pytest.raises(SimulationFailed, match="not finished"):
        run_simulation(1, main)

    loop = SimLoop(1)
    with pytest.raises(Deadlock):
        loop.run_until_complete(loop.create_future())
    loop.close()


def test_a_loop_that_never_waits_is_found() -> None:
    async def main(loop: SimLoop) -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(TooManySteps) as failure:
        run_simulation(7, main)
    assert "seed 7" in failure.value.__notes__[0]


async def _race(loop: SimLoop) -> list[int]:
    order: list[int] = []

    async def racer(number: int) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
            order.append(number)

    async with asyncio.TaskGroup() as group:
        for number in range(4):
            group.create_task(racer(number))
    return order


def test_the_seed_draws_the_order_of_ready_tasks() -> None:
    runs = {seed: run_simulation(seed, _race) for seed in range(20)}
    assert len({tuple(order) for order in runs.values()}) > 10
    assert all(run_simulation(seed, _race) == order for seed, order in runs.items())
    assert run_simulation(1, _race, shuffle=False) == [0, 1, 2, 3] * 3


def test_plain_callbacks_keep_their_order() -> None:
    async def main(loop: SimLoop) -> list[int]:
        queue: asyncio.Queue[int] = asyncio.Queue()
        noise = [asyncio.create_task(asyncio.sleep(0)) for _ in range(5)]
        for number in range(20):
            loop.call_soon_threadsafe(queue.put_nowait, number)
        found = [await queue.get() for _ in range(20)]
        await asyncio.gather(*noise)
        return found

    assert all(run_simulation(seed, main) == list(range(20)) for seed in range(10))


def test_sets_of_tasks_have_one_order() -> None:
    async def main(loop: SimLoop) -> list[str]:
        async def work() -> None:
            await asyncio.sleep(1)

        tasks = {asyncio.create_task(work(), name=str(n)) for n in range(50)}
        done, _ = await asyncio.wait(tasks)
        return [task.get_name() for task in done]

    assert run_simulation(3, main) == run_simulation(3, main)


def test_entropy_and_clocks_come_from_the_seed() -> None:
    async def main(loop: SimLoop) -> tuple[object, ...]:
        await asyncio.sleep(1.5)
        return os.urandom(8), secrets.token_hex(8), str(uuid.uuid4()), time.monotonic(), time.perf_counter_ns()

    first = run_simulation(5, main)
    assert first == run_simulation(5, main)
    assert first[:3] != run_simulation(6, main)[:3]
    assert first[3:] == (1.5, 1_500_000_000)
    assert os.urandom(8) != os.urandom(8)


def test_two_processes_with_other_hash_seeds_agree() -> None:
    program = (
        "from tests.unit.test_sim_loop import _race\n"
        "from tests.sim.loop import run_simulation\n"
        "print([run_simulation(seed, _race) for seed in range(5)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("0", "12345")
    }
    assert len(outputs) == 1


def test_a_crashed_process_stops_between_two_awaits_without_clean_up() -> None:
    async def main(loop: SimLoop) -> list[str]:
        said: list[str] = []
        process = SimProcess("p")
        process.at_death(lambda: said.append("noticed"))

        async def child() -> None:
            try:
                await asyncio.sleep(5)
                said.append("child")
            finally:
                said.append("clean-up")

        async def work() -> None:
            spawned = asyncio.create_task(child())
            await asyncio.sleep(1)
            assert not spawned.done()
            said.append("worked")
            await asyncio.sleep(2)
            said.append("too late")

        process.start(work())
        await asyncio.sleep(2)
        process.crash()
        await asyncio.sleep(10)
        return list(said)

    assert run_simulation(1, main) == ["worked", "noticed"]


@pytest.mark.parametrize("step", range(6))
def test_a_process_can_be_crashed_at_any_step(step: int) -> None:
    async def main(loop: SimLoop) -> int:
        process = SimProcess("p")
        process.crash_at_step = step
        count = 0

        async def work() -> None:
            nonlocal count
            while True:
                count += 1
                await asyncio.sleep(0)

        process.start(work())
        await asyncio.sleep(1)
        assert not process.alive
        return count

    assert run_simulation(1, main) == step


def test_the_wall_clock_of_a_process_may_be_wrong() -> None:
    async def main(loop: SimLoop) -> tuple[float, float, float]:
        clock = SimClock(loop, skew_s=2.0)
        before = clock.now_s()
        clock.step(-30.0)
        return before - EPOCH_S, clock.now_s() - EPOCH_S, clock.monotonic_s()

    assert run_simulation(1, main) == (2.0, -28.0, 0.0)


def test_a_lost_exception_is_remembered() -> None:
    async def main(loop: SimLoop) -> list[str]:
        def broken() -> None:
            raise ValueError("a bug")

        loop.call_soon(broken)
        await asyncio.sleep(1)
        return loop.faults

    assert "a bug" in run_simulation(1, main)[0]


def test_short_work_of_the_default_executor_runs_later_on_the_loop() -> None:
    async def main(loop: SimLoop) -> tuple[int, int]:
        return await asyncio.to_thread(threading.get_ident), threading.get_ident()

    there, here = run_simulation(1, main)
    assert there == here


def test_a_thread_of_its_own_takes_turns_with_the_loop() -> None:
    async def main(loop: SimLoop) -> tuple[list[str], float]:
        said: list[str] = []
        condition = threads.SimCondition()

        def work() -> str:
            with condition:
                condition.wait()
            said.append("woken")
            time.sleep(2.5)
            said.append("rested")
            return "done"

        with ThreadPoolExecutor(1) as executor:
            future = loop.run_in_executor(executor, work)
            await asyncio.sleep(1)
            said.append("waking")
            condition.notify()
            said.append(await future)
        return said, loop.time()

    said, now_s = run_simulation(1, main)
    assert said == ["waking", "woken", "rested", "done"]
    assert now_s == 3.5


def test_a_thread_that_still_waits_is_ended() -> None:
    async def main(loop: SimLoop) -> None:
        condition = threads.SimCondition()
        with ThreadPoolExecutor(1) as executor:
            loop.run_in_executor(executor, condition.wait)
            await asyncio.sleep(1)

    before = threading.active_count()
    run_simulation(1, main)
    assert threading.active_count() == before


def test_sleeping_on_the_loop_is_an_error() -> None:
    async def main(loop: SimLoop) -> None:
        time.sleep(0.1)  # noqa: ASYNC251

    with pytest.raises(RuntimeError, match="on the event loop"):
        run_simulation(1, main)
