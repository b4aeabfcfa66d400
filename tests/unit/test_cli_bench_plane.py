"""The pure parts of `bench plane`: answers in pieces, windows, quantiles, metrics; by hand-made values."""

from __future__ import annotations

import json

import pytest

from shared.cli.bench.gauges import parse, reading
from shared.cli.bench.load import Outcome, Plan, Reply, Sample, Window, request_bytes
from shared.cli.bench.plane import counted, parts_of, quantile, requests_s, tokens_s
from shared.runtime.loop_watch import LoopWatch
from shared.runtime.metrics import Metrics

TIMING = b': timing {"tag_s":0.25,"hold_s":0.5}\n\n'
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
WORD = b'data: {"choices":[{"delta":{"content":"error"}}]}\n\n'
LAST = b'data: {"choices":[],"usage":{"completion_tokens":7,"prompt_cache_hit_tokens":128}}\n\ndata: [DONE]\n\n'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


def chunked(*parts: bytes) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b""))
    return HEAD + b"transfer-encoding: chunked\r\n\r\n" + body


def whole(*parts: bytes) -> bytes:
    body = b"".join(parts)
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize("size", [1, 7, 64, 100_000])
@pytest.mark.parametrize("wire", [chunked(TIMING + ROLE, WORD, LAST), whole(TIMING, ROLE, WORD, LAST)])
def test_an_answer_is_read_however_it_is_cut(wire: bytes, size: int) -> None:
    reply = Reply()
    pieces = [wire[i : i + size] for i in range(0, len(wire), size)]
    first = next(i for i in range(len(pieces)) if b"data: " in wire[: (i + 1) * size])
    for number, piece in enumerate(pieces):
        assert not reply.done
        reply.feed(piece, 100.0 + number)
    assert reply.done
    assert reply.failure is None
    sample = reply.sample(window_s=90.0, sent_s=95.0, now_s=110.0)
    assert sample == Sample(
        begun_s=5.0,
        first_s=5.0 + first,
        whole_s=15.0,
        tokens=7,
        hit_tokens=128,
        parts={"tag_s": 0.25, "hold_s": 0.5},
    )


def test_a_refusal_and_a_broken_answer_are_failures() -> None:
    refusal = Reply()
    refusal.feed(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 8\r\n\r\n", 1.0)
    assert not refusal.done
    refusal.feed(b"overload", 1.0)
    assert refusal.done
    assert "503" in (refusal.failure or "")
    broken = Reply()
    broken.feed(chunked(ROLE, b'data: {"error":{"message":"late"}}\n\n'), 1.0)
    assert broken.done
    assert "late" in (broken.failure or "")


def test_a_window_opens_when_each_client_has_had_an_answer() -> None:
    window = Window(clients=2, seconds=10.0)
    reply = Reply()
    assert window.answered(reply, 0.0, 1.0, first=True)
    assert window.answered(reply, 1.0, 50.0, first=False)
    assert window.answered(reply, 0.0, 60.0, first=True)
    assert window.answered(reply, 60.0, 69.0, first=False)
    assert not window.answered(reply, 69.0, 71.0, first=False)
    assert [sample.begun_s for sample in window.samples()] == [-60.0, -59.0, -60.0, 0.0, 9.0]


def sample(begun_s: float, whole_s: float, tokens: int = 8, **parts: float) -> Sample:
    return Sample(
        begun_s=begun_s,
        first_s=whole_s / 2,
        whole_s=whole_s,
        tokens=tokens,
        hit_tokens=0,
        parts={f"{name}_s": seconds for name, seconds in parts.items()},
    )


def test_what_is_under_way_at_the_ends_counts_in_part() -> None:
    samples = (sample(-9.0, 1.0), sample(-1.0, 4.0, tokens=100), sample(2.0, 2.0, tokens=10), sample(3.0, 2.0))
    outcome = Outcome(samples=samples, seconds=4.0, cpu_s=0.0)
    assert requests_s(outcome) == pytest.approx((0.75 + 1.0 + 0.5) / 4)
    assert tokens_s(outcome) == pytest.approx((75 + 10 + 4) / 4)
    assert counted(outcome) == [samples[2], samples[3]]
    assert counted(Outcome(samples=samples[:2], seconds=4.0, cpu_s=0.0)) == list(samples[:2])


def test_a_quantile_is_the_smallest_sample_that_enough_do_not_exceed() -> None:
    hundred = [float(number) for number in range(100, 0, -1)]
    assert [quantile(hundred, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert quantile([3.0], 0.01) == 3.0
    with pytest.raises(ValueError, match="no samples"):
        quantile([], 0.5)


def test_parts_are_medians_of_what_was_told() -> None:
    told = parts_of([sample(0, 1, tag=0.1, hold=3.0), sample(0, 1, tag=0.3), sample(0, 1, tag=0.2)])
    assert told == {"tag": 0.2, "hold": 3.0}


def test_each_request_has_a_question_of_its_own_and_a_client_its_own_beginning() -> None:
    plan = Plan(host="h", port=1, api_key="k", model="m", clients=2, seconds=1, prompt="Once.", max_tokens=4, run="run")
    contents = []
    for client, number in ((0, 0), (0, 1), (1, 0)):
        head, _, body = request_bytes(plan, client, number).partition(b"\r\n\r\n")
        assert f"Content-Length: {len(body)}".encode() in head
        contents.append(json.loads(body)["messages"][0]["content"])
    assert len(set(contents)) == 3
    assert contents[0].partition("Question")[0] == contents[1].partition("Question")[0]
    assert contents[0][:9] != contents[2][:9]


def test_a_service_s_own_metrics_are_understood() -> None:
    """Against what a service really renders: names and buckets are agreed between the two."""
    metrics = Metrics("test")
    clock = [0.0]
    run = LoopWatch(metrics, thread_s=lambda: clock[0], wall_s=lambda: clock[0]).timed()

    def use(seconds: float) -> None:
        clock[0] += seconds

    for seconds in (0.005, 0.019, 0.030, 0.080):
        run(use, seconds)
    settled = metrics.histogram("settlement_seconds", "…")
    settled.observe(0.5)
    settled.observe(1.5)
    now = reading({"test": 1.0}, {"test": parse(metrics.render().decode())}, 7.0)
    assert now.held_over == {"test": 2.0}
    assert now.held_max_s["test"] == pytest.approx(0.080)
    assert (now.settlements, now.settlement_s) == (2.0, 2.0)
