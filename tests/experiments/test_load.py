"""The load generator: schedules, what counts as latency, errors by kind, pairs, limits."""

import asyncio
from pathlib import Path

import pytest
from aiohttp import web

from recserve.load.calibration import lateness
from recserve.load.generator import (
    Call,
    LoadOptions,
    Shot,
    drive,
    poisson_arrivals,
    trace_arrivals,
)
from recserve.load.targets import find_target
from tests.support.http_server import http_server

SLATE = {"items": [{"item_id": "a"}], "timing_ms": {"total": 1.0}}
STREAM = (Path(__file__).parent / "fixtures" / "vllm_chat_stream.txt").read_bytes()
RECOMMEND = find_target("recommend")


async def slate(request: web.Request) -> web.Response:
    return web.json_response(SLATE)


def shots(url, times, arms=(0,)):
    path = RECOMMEND.path
    return [
        Shot(at_s=t, calls=tuple(Call(url=url + path, body=b"{}", arm=arm) for arm in arms))
        for t in times
    ]


def send(url, plan, target=RECOMMEND, progress=None, **options):
    return asyncio.run(drive(plan, target, LoadOptions(**options), progress))


def test_an_open_loop_sends_every_shot_at_or_after_its_time():
    states = []
    with http_server(slate) as url:
        run = send(url, shots(url, [0.0, 0.01, 0.01, 0.2]), progress=states.append)
    assert len(run.exchanges) == 4
    assert all(one.error is None and one.reply.item_ids == ("a",) for one in run.exchanges)
    assert all(one.sent >= one.scheduled and one.done >= one.sent for one in run.exchanges)
    assert states[-1].done == states[-1].total == 4


def test_latency_counts_from_the_scheduled_time_when_the_server_stalls():
    """Ten requests in 90 ms, one place in flight, 50 ms each: the last waits for all others."""

    async def slow(request):
        await asyncio.sleep(0.05)
        return web.json_response(SLATE)

    with http_server(slow) as url:
        run = send(url, shots(url, [n / 100 for n in range(10)]), max_in_flight=1)
    last = max(run.exchanges, key=lambda one: one.shot)
    assert run.peak_in_flight == 1
    # Nine requests before it and its own take 500 ms at least; it was scheduled at 90 ms.
    assert last.latency_ms >= 400
    assert (last.done - last.sent) * 1e3 < last.latency_ms - 300
    assert lateness(run.exchanges).p99_ms > 100


def test_a_closed_loop_keeps_its_number_of_workers():
    """Each request waits for three others; a fifth would be seen."""
    flying, most, four = 0, 0, asyncio.Barrier(4)

    async def count(request):
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        await four.wait()
        flying -= 1
        return web.json_response(SLATE)

    with http_server(count) as url:
        run = send(url, shots(url, [0.0] * 40), workers=4)
    assert most == run.peak_in_flight == 4
    assert len(run.exchanges) == 40


def test_a_closed_loop_ends_at_its_time():
    async def slow(request):
        await asyncio.sleep(0.02)
        return web.json_response(SLATE)

    with http_server(slow) as url:
        run = send(url, shots(url, [0.0] * 10_000), workers=2, stop_after_s=0.2)
    assert 0 < len(run.exchanges) < 100


def test_the_calls_of_a_pair_follow_one_another():
    with http_server(slate) as url:
        run = send(url, shots(url, [0.0, 0.0], arms=(1, 0)))
    for shot in (0, 1):
        first, second = sorted(
            (one for one in run.exchanges if one.shot == shot), key=lambda one: one.place
        )
        assert (first.arm, second.arm) == (1, 0)
        assert second.scheduled == first.done


def test_failures_are_counted_by_kind():
    async def fail(request):
        kind = (await request.json())["kind"]
        if kind == "busy":
            return web.json_response({"error": {"message": "queue full"}}, status=429)
        if kind == "cut":
            request.transport.close()
        if kind == "shape":
            return web.json_response({"no": "slate"})
        return web.Response(text="not json")

    kinds = ["busy", "cut", "shape", "text"]
    with http_server(fail) as url:
        plan = [
            Shot(0.0, (Call(url=url, body=f'{{"kind": "{kind}"}}'.encode(), sample=n),))
            for n, kind in enumerate(kinds)
        ]
        run = send(url, plan)
    found = {kinds[one.sample]: one for one in run.exchanges}
    assert {kind: one.error for kind, one in found.items()} == {
        "busy": "http_429",
        "cut": "disconnect",
        "shape": "malformed",
        "text": "malformed",
    }
    assert found["busy"].detail == "queue full"


def test_an_answer_that_takes_too_long_is_a_timeout():
    async def hang(request):
        await asyncio.sleep(60)

    with http_server(hang) as url:
        (one,) = send(url, shots(url, [0.0]), timeout_s=0.2).exchanges
    assert one.error == "timeout" and one.latency_ms >= 190


def test_a_kept_connection_that_the_server_closed_is_no_failure():
    """llama.cpp's server closes the connection after a stream, and the next request meets that."""
    seen, closed = set(), []

    async def once_per_connection(request):
        if request.transport in seen:
            closed.append(True)
            request.transport.close()
        seen.add(request.transport)
        return web.json_response(SLATE)

    with http_server(once_per_connection) as url:
        run = send(url, shots(url, [0.0] * 40), workers=8)
    assert closed
    assert [one.error for one in run.exchanges] == [None] * 40


def stream_handler(data, pause=0.0):
    async def handle(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in data.split(b"\n\n"):
            await response.write(event + b"\n\n")
            await asyncio.sleep(pause)
        return response

    return handle


def test_a_stream_has_times_of_its_pieces_and_its_counts():
    chat = find_target("chat")
    with http_server(stream_handler(STREAM, 0.02)) as url:
        plan = [Shot(0.0, (Call(url=url + chat.path, body=b"{}"),))]
        run = send(url, plan, target=chat)
    one = run.exchanges[0]
    assert one.error is None
    assert (one.reply.output_tokens, one.reply.num_drafts) == (8, 3)
    assert len(one.pieces) == 3
    assert one.pieces[-1] - one.pieces[0] >= 0.03
    assert one.scheduled < one.pieces[0] < one.done


def test_a_stream_without_its_end_marker_is_malformed():
    chat = find_target("chat")
    with http_server(stream_handler(STREAM.replace(b"data: [DONE]", b""))) as url:
        plan = [Shot(0.0, (Call(url=url + chat.path, body=b"{}"),))]
        run = send(url, plan, target=chat)
    assert run.exchanges[0].error == "malformed"


def test_headers_are_sent():
    seen = {}

    async def note(request):
        seen.update(request.headers)
        return web.json_response(SLATE)

    with http_server(note) as url:
        send(url, shots(url, [0.0]), headers={"Authorization": "Bearer k"})
    assert seen["Authorization"] == "Bearer k"
    assert seen["Content-Type"] == "application/json"


def test_poisson_arrivals_have_the_rate_and_exponential_gaps():
    """Kolmogorov-Smirnov test of 20,000 gaps, p > 0.001."""
    import numpy as np
    from scipy import stats

    times = poisson_arrivals(rate=200.0, duration_s=100.0, seed=1)
    assert times.max() < 100 and (np.diff(times) >= 0).all()
    assert abs(len(times) - 20_000) < 5 * np.sqrt(20_000)
    assert stats.kstest(np.diff(times), stats.expon(scale=1 / 200).cdf).pvalue > 0.001
    assert (poisson_arrivals(200.0, 100.0, seed=1) == times).all()


def test_traces_are_read_in_three_forms(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    plain = tmp_path / "times.txt"
    plain.write_text("5.5\n5.0\n7.0\n")
    lines = tmp_path / "trace.jsonl"
    lines.write_text('{"timestamp": 5000}\n{"timestamp": 5500}\n{"timestamp": 7000}\n')
    table = tmp_path / "trace.parquet"
    pq.write_table(pa.table({"arrival_time": [5.0, 5.5, 7.0]}), table)
    for path in (plain, lines, table):
        assert trace_arrivals(path).tolist() == [0.0, 0.5, 2.0]
    assert trace_arrivals(plain, rate=2.0).tolist() == [0.0, 0.25, 1.0]
    assert trace_arrivals(plain, duration_s=1.0).tolist() == [0.0, 0.5]
    lines.write_text('{"other": 1}\n')
    with pytest.raises(ValueError, match="expected one of the columns"):
        trace_arrivals(lines)
