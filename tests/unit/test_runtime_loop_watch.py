"""The watch of the event loop: on both loops, against clocks of the system and against clocks made by hand."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import structlog
import uvloop

from shared.contracts import limits
from shared.runtime.loop_watch import LoopWatch, named
from shared.runtime.metrics import Metrics

LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
BUSY_S = 0.06
"""Of processor time; what is seen may be less by limits.LOOP_LOOK_S, and more by what surrounds it."""


def use_processor(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def watched(
    new_loop: Callable[[], asyncio.AbstractEventLoop], work: Callable[[], Coroutine[Any, Any, Any]]
) -> LoopWatch:
    watch = LoopWatch(Metrics("test"))

    async def main() -> None:
        watch.install(asyncio.get_running_loop())
        await asyncio.sleep(0)
        watch.begin()
        await work()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    return watch


@LOOPS
def test_a_busy_step_of_a_task_is_seen(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def step() -> None:
        await asyncio.sleep(0)
        use_processor(BUSY_S)
        await asyncio.sleep(0)

    with structlog.testing.capture_logs() as lines:
        watch = watched(new_loop, lambda: asyncio.create_task(step(), name="busy"))
    assert BUSY_S - limits.LOOP_LOOK_S <= watch.longest_s < 2 * BUSY_S
    [line] = [line for line in lines if line["event"] == "loop.held"]
    assert line["task"] == "busy"
    assert line["callback"].endswith("step")
    assert "(sleep)" in line["waits_at"]
    assert line["held_s"] >= BUSY_S - limits.LOOP_LOOK_S


@LOOPS
@pytest.mark.parametrize("how", ["soon", "later", "at", "threadsafe"])
def test_a_busy_callback_is_seen_once_however_it_came(
    new_loop: Callable[[], asyncio.AbstractEventLoop], how: str
) -> None:
    metrics = Metrics("test")
    watch = LoopWatch(metrics)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        watch.install(loop)
        done = asyncio.Event()

        def busy() -> None:
            use_processor(BUSY_S)
            done.set()

        match how:
            case "soon":
                loop.call_soon(busy)
            case "later":
                loop.call_later(0.001, busy)
            case "at":
                loop.call_at(loop.time() + 0.001, busy)
            case _:
                threading.Thread(target=loop.call_soon_threadsafe, args=(busy,)).start()
        await asyncio.wait_for(done.wait(), 10)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    assert watch.longest_s >= BUSY_S - limits.LOOP_LOOK_S
    text = metrics.render().decode()
    longer = {line.split()[-1] for line in text.splitlines() if 'loop_held_seconds_bucket{le="0.05"}' in line}
    counted = {line.split()[-1] for line in text.splitlines() if "loop_held_seconds_count" in line}
    assert float(counted.pop()) - float(longer.pop()) == 1
    [said] = [line for line in text.splitlines() if line.startswith("deepserve_loop_held_max_seconds ")]
    assert float(said.split()[1]) == watch.longest_s


@LOOPS
def test_a_thread_that_waits_holds_nothing(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """A blocking wait stands for a thread that the system does not let run: the wall moves, its clock does not."""

    async def wait() -> None:
        await asyncio.sleep(0)
        threading.Event().wait(BUSY_S)

    assert watched(new_loop, wait).longest_s < limits.LOOP_HELD_S


@LOOPS
def test_work_of_other_threads_holds_nothing(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def wait() -> None:
        await asyncio.to_thread(use_processor, BUSY_S)

    assert watched(new_loop, wait).longest_s < limits.LOOP_HELD_S


@LOOPS
def test_many_short_steps_are_no_hold(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def steps() -> None:
        for _ in range(30):
            use_processor(0.002)
            await asyncio.sleep(0)

    assert watched(new_loop, steps).longest_s < limits.LOOP_HELD_S


@LOOPS
def test_data_that_arrives_is_watched(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    class Busy(asyncio.Protocol):
        def __init__(self) -> None:
            self.got = asyncio.Event()

        def data_received(self, data: bytes) -> None:
            use_processor(BUSY_S)
            self.got.set()

    async def talk() -> None:
        protocol = Busy()
        server = await asyncio.get_running_loop().create_server(lambda: protocol, "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"x")
        await asyncio.wait_for(protocol.got.wait(), 10)
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()

    assert watched(new_loop, talk).longest_s >= BUSY_S - limits.LOOP_LOOK_S


@LOOPS
def test_results_errors_and_contexts_are_as_without_it(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        caught: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, told: caught.append(told))
        loop.call_soon(lambda: 1 / 0)
        handle = loop.call_later(0, lambda: caught.append({"message": "cancelled, and still called"}))
        handle.cancel()
        await asyncio.sleep(0.01)
        assert [type(told["exception"]) for told in caught] == [ZeroDivisionError]
        with pytest.raises(ValueError, match="mine"):
            await asyncio.create_task(_raise(ValueError("mine")))

    watched(new_loop, work)


async def _raise(error: Exception) -> None:
    await asyncio.sleep(0)
    raise error


class Clocks:
    """`wall_s` and `thread_s` move as told."""

    def __init__(self) -> None:
        self.wall = 100.0
        self.thread = 5.0
        self.thread_reads = 0

    def pass_by(self, wall_s: float, thread_s: float) -> None:
        self.wall += wall_s
        self.thread += thread_s

    def read_thread(self) -> float:
        self.thread_reads += 1
        return self.thread


def by_hand() -> tuple[LoopWatch, Clocks, Callable[..., None]]:
    clocks = Clocks()
    watch = LoopWatch(Metrics("test"), thread_s=clocks.read_thread, wall_s=lambda: clocks.wall)
    watch.begin()
    return watch, clocks, watch.timed()


def test_the_slow_clock_is_read_seldom() -> None:
    _, clocks, run = by_hand()
    for _ in range(1_000):
        run(clocks.pass_by, 0.00001, 0.00001)
    assert clocks.thread_reads <= 12


def test_a_hold_is_exact_to_a_millisecond_and_never_too_long() -> None:
    watch, clocks, run = by_hand()
    run(clocks.pass_by, 0.0005, 0.0005)
    run(clocks.pass_by, 0.0300, 0.0250)
    assert 0.0240 <= watch.longest_s <= 0.0250 + 1e-9


def test_lines_are_bounded_in_rate_and_say_what_was_left_out() -> None:
    watch, clocks, run = by_hand()
    with structlog.testing.capture_logs() as lines:
        for _ in range(5):
            run(clocks.pass_by, 0.05, 0.05)
        clocks.pass_by(limits.LOOP_SAY_EVERY_S, 0.0)
        run(clocks.pass_by, 0.05, 0.05)
    assert [line["unsaid"] for line in lines] == [0, 4]
    assert [line["callback"] for line in lines] == ["Clocks.pass_by"] * 2
    assert watch.longest_s == pytest.approx(0.05)


def test_a_callback_without_a_name_is_named_by_its_type() -> None:
    class Odd:
        def __call__(self) -> None: ...

    assert named(Odd()) == {"callback": "Odd"}


def test_a_start_may_take_its_time() -> None:
    clocks = Clocks()
    watch = LoopWatch(Metrics("test"), thread_s=clocks.read_thread, wall_s=lambda: clocks.wall)
    run = watch.timed()
    with structlog.testing.capture_logs() as lines:
        run(clocks.pass_by, 0.5, 0.5)
        watch.begin()
        run(clocks.pass_by, 0.03, 0.03)
    assert [line["held_s"] for line in lines] == [0.03]
    assert watch.longest_s == pytest.approx(0.03)
