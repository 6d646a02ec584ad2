"""`recserve bench` and `recserve ab`, against a made-up server and a real one."""

import dataclasses
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp import web
from typer.testing import CliRunner

from recserve.bundle.bundle import Bundle
from recserve.cli import app
from recserve.load import generator as load
from recserve.service import Service
from recserve.service.slate_log.reader import read_log
from tests.support.grids import chosen
from tests.support.http_server import http_server
from tests.support.live_server import live
from tests.support.tiny_bundle import tiny_bundle

FIXTURES = Path(__file__).parents[1] / "experiments" / "fixtures"


@pytest.fixture
def users(tmp_path):
    path = tmp_path / "users.parquet"
    rows = [{"user_id": f"u{n}", "item_id": f"i{n % 7}"} for n in range(60) for _ in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.fixture
def exact_times(monkeypatch):
    """Requests take 2 ms, slow ones 20 ms, however busy this machine is."""
    real = load._Sender.send

    async def send(self, number, place, call, scheduled):
        exchange = await real(self, number, place, call, scheduled)
        latency_s = (0.02 if b"slow" in call.body else 0.002) * (1 + number % 7 / 100)
        return dataclasses.replace(exchange, sent=scheduled, done=scheduled + latency_s)

    monkeypatch.setattr(load._Sender, "send", send)


async def recserve(request):
    """Answers as recserve does; the strategy `slow` adds an item that does not exist."""
    if request.path == "/health/ready":
        return web.json_response({"ready": True})
    if request.path == "/version":
        return web.json_response({"version": "9"})
    if request.path.startswith("/v1/items/"):
        return web.json_response({}, status=404 if request.path.endswith("ghost") else 200)
    if request.path != "/v1/recommend":
        return web.json_response({"error": {"message": "no such route"}}, status=404)
    body = await request.json()
    slow = body.get("strategy") == "slow"
    items = [{"item_id": f"i{n}"} for n in range(4)] + [{"item_id": "ghost"}] * slow
    return web.json_response({"items": items, "timing_ms": {"total": 2.0}, "model_version": "m"})


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


SHORT = ("--duration", "1.5", "--warmup", "0.2", "--rate", "80", "--no-calibrate")


def test_bench_prints_json_and_writes_report_and_records(users, tmp_path):
    report, records = tmp_path / "r.html", tmp_path / "r.parquet"
    with http_server(recserve) as url:
        result = invoke(
            "bench", url, "--data", users, *SHORT, "--exact", 5, "--json",
            "--fields", '{"k": 4}', "--report", report, "--records", records,
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (arm,) = found["summaries"]
    assert arm["errors"] == {} and arm["num_requests"] > 50
    assert arm["items"]["illegal_share"] == 0.0 and arm["items"]["short_share"] == 0.0
    assert found["exactness"][0]["mean_overlap"] == 1.0
    assert found["servers"][url]["version"] == {"version": "9"}
    assert report.read_text().startswith("<!doctype html>")
    table = pq.read_table(records)
    assert table.num_rows == arm["num_requests"]
    assert table["error"].null_count == table.num_rows


@pytest.mark.parametrize("mode", chosen(("blocks", "paired", "split"), "paired"))
def test_ab_finds_the_slower_arm_and_its_items_that_do_not_exist(users, exact_times, mode):
    with http_server(recserve) as url:
        result = invoke(
            "ab", url, "--data", users, "--arm", 'fast={"strategy": "beam"}', "--arm",
            'slow={"strategy": "slow"}', "--mode", mode, "--statistic", "p50", *SHORT,
            "--exact", 5, "--json",
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (comparison,) = found["comparisons"]
    assert comparison["kind"] == "do_not_ship"  # an item that does not exist
    assert "Do not ship slow: quality. " in comparison["verdict"]
    assert "slow is slower than fast" in comparison["verdict"]
    assert [arm["items"]["illegal_share"] for arm in found["summaries"]] == [0.0, 0.2]
    overlaps = [g for g in comparison["guardrails"] if g["name"] == "overlap of slates"]
    assert overlaps[0]["treatment"] == pytest.approx(0.8)


def test_bench_reads_streams_and_closed_loops():
    stream = (FIXTURES / "vllm_chat_stream.txt").read_bytes()

    async def vllm(request):
        if request.path != "/v1/chat/completions":
            return web.Response(status=404)
        return web.Response(body=stream, content_type="text/event-stream")

    with http_server(vllm) as url:
        prompts = FIXTURES / "prompts.jsonl"
        result = invoke(
            "bench", url, "--data", prompts, "--arrivals", "closed", "--workers", 2,
            "--duration", 0.3, "--warmup", 0.1, "--no-calibrate", "--json",
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    (arm,) = json.loads(result.stdout)["summaries"]
    drafting = arm["text"]["drafting"]
    assert set(drafting) == {"writing", "math", "all"}
    assert drafting["all"]["tokens_per_step"] == pytest.approx(1 + 5 / 3)
    assert arm["text"]["output_tokens"]["mean"] == 8.0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--header", "novalue"), "Name: value"),
        (("--fields", "{"), "not JSON"),
        (("--warmup", "9", "--duration", "3"), "warm-up"),
    ],
)
def test_wrong_flags_are_named(users, flags, message):
    result = invoke("bench", "http://127.0.0.1:9", "--data", users, *flags)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_a_real_server_is_driven_and_its_slates_are_exact(tmp_path):
    folder = tiny_bundle(tmp_path)
    with Service.open(folder) as service, live(service) as client:
        url = str(client.base_url).rstrip("/")
        result = invoke(
            "ab", url, "--data", folder, "--arm", 'beam={"strategy": "beam"}', "--arm",
            'narrow={"strategy": "beam", "beam_width": 10}', "--mode", "paired", "--duration", 2,
            "--warmup", 0.5, "--rate", 10, "--no-calibrate", "--exact", 5, "--json",
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [arm["errors"] for arm in found["summaries"]] == [{}, {}]
    assert [arm["items"]["illegal_share"] for arm in found["summaries"]] == [0.0, 0.0]
    assert found["exactness"][0] == {"count": 5, "mean_overlap": 1.0, "identical_share": 1.0}
    assert found["ratio"]["alarm"] is False


def test_slates_of_auto_are_exact_with_the_weight_that_auto_has(tmp_path):
    folder = tiny_bundle(tmp_path)
    bundle = Bundle.open(folder)
    one = {"strategy": "beam", "dense_weight": 50.0}
    bundle.commit("recommender", {"auto": {"kept": one, "filtered": one}})
    with Service.open(folder) as service, live(service) as client:
        url = str(client.base_url).rstrip("/")
        result = invoke(
            "bench", url, "--data", folder, "--duration", 2, "--warmup", 0.5, "--rate", 10,
            "--no-calibrate", "--exact", 8, "--json",
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["exactness"][0]
    assert found == {"count": 8, "mean_overlap": 1.0, "identical_share": 1.0}


@pytest.mark.parametrize("command", ["bench", "ab"])
def test_load_leaves_no_trace_in_experiments_and_slate_log(tmp_path, command):
    folder, log = tiny_bundle(tmp_path), tmp_path / "slates"
    arms = [{"name": "wide"}, {"name": "narrow", "fields": {"beam_width": 10}}]
    one = {"name": "width", "use": "recommend", "arms": arms, "coverage": 1.0}
    flags = ["--duration", 1, "--warmup", 0.2, "--rate", 20, "--no-calibrate", "--exact", 5]
    if command == "ab":
        flags += ["--arm", "a={}", "--arm", "b={}", "--mode", "paired"]
    with Service.open(folder) as service, live(service, experiments=[one], slate_log=log) as client:
        user = client.get("/playground/samples").json()["users"][0]
        url = str(client.base_url).rstrip("/")
        result = invoke(command, url, "--data", folder, *flags, "--json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["summaries"][0]["num_requests"] > 5
        body = {"user": {"id": user}, "k": 3, "request_id": "of-a-user"}
        assert client.post("/v1/recommend", json=body).status_code == 200
        (found,) = client.get("/v1/experiments").json()["experiments"]
        assert sum(arm["requests"] for arm in found["arms"]) == 1
        assert sum(arm["answers"] for arm in found["arms"]) == 1
    assert read_log(log, "slates").num_rows == 1


AB_FILE = """
url: {url}
data: {data}
mode: paired
rate: 100
duration: 2
warmup: 0.2
calibrate: false
exact: 0
fields: {{k: 4}}
arms:
  - name: fast
    fields: {{strategy: quick}}
  - name: slow
    fields: {{strategy: slow}}
"""


def test_ab_reads_a_file_and_options_win(users, tmp_path):
    path = tmp_path / "ab.yaml"
    with http_server(recserve) as url:
        path.write_text(AB_FILE.format(url=url, data=users))
        result = invoke("ab", "--config", path, "--rate", 60, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [arm["name"] for arm in found["arms"]] == ["fast", "slow"]
    assert found["arms"][1]["fields"] == {"strategy": "slow"}
    assert found["configuration"]["mode"] == "paired"
    assert found["configuration"]["rate per second"] == 60
    assert found["configuration"]["request fields"] == {"k": 4}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rat: 5", "unknown key rat; did you mean rate?"),
        ("arms: [{name: a}]", "expected a list of at least two arms"),
        ("arms: [{name: a, weight: 1}, {name: b}]", "expected name, and optionally url and fields"),
        ("- a", "expected a mapping, got list"),
        ("rate: fast", "unable to parse string as a number"),
    ],
)
def test_ab_refuses_a_wrong_file(users, tmp_path, text, words):
    path = tmp_path / "ab.yaml"
    path.write_text(text)
    result = invoke("ab", "http://127.0.0.1:9", "--data", users, "--arm", "a={}", "--config", path)
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("│", " ").split())


def test_ab_stops_early_where_the_difference_is_sure(users, exact_times):
    with http_server(recserve) as url:
        result = invoke(
            "ab", url, "--data", users, "--mode", "paired", "--stop-early", "--exact", 0,
            "--duration", 20, "--warmup", "0.2", "--rate", 100, "--no-calibrate", "--json",
            "--statistic", "p50",
            "--arm", 'a={"strategy": "quick"}', "--arm", 'b={"strategy": "slow"}',
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (comparison,) = found["comparisons"]
    assert "b is slower than a" in comparison["verdict"] and comparison["sequential"] is True
    assert comparison["looks"][-1]["num_blocks"] < 60
    assert found["summaries"][0]["num_requests"] < 1500
    assert any("The run stopped after" in note for note in comparison["notes"])


def test_a_closed_loop_cannot_stop_early(users):
    arms = ("--arm", "a={}", "--arm", "b={}")
    loop = ("--arrivals", "closed", "--stop-early")
    result = invoke("ab", "http://127.0.0.1:9", "--data", users, *arms, *loop)
    assert result.exit_code == 2 and "closed loop" in result.output


def test_bench_compares_with_a_saved_run(users, exact_times, tmp_path):
    records, report = tmp_path / "old.parquet", tmp_path / "r.html"
    common = ("--data", users, *SHORT, "--exact", 0, "--json", "--fields")
    with http_server(recserve) as url:
        first = invoke("bench", url, *common, '{"strategy": "quick"}', "--records", records)
        assert first.exit_code == 0, first.output
        second = invoke(
            "bench", url, *common, '{"strategy": "slow"}', "--against", records, "--report", report
        )
    assert second.exit_code == 0, second.output
    (comparison,) = json.loads(second.stdout)["comparisons"]
    assert (comparison["control"], comparison["treatment"]) == ("saved run", "this run")
    p50 = next(e for e in comparison["effects"]["latency"] if e["statistic"] == "p50")
    assert p50["relative"]["low"] > 1  # 20 ms against 2 ms
    assert any("one after the other" in note for note in comparison["notes"])
    assert "this run" in report.read_text() and "saved run" in report.read_text()
    wrong = invoke("bench", "http://127.0.0.1:9", "--data", users, "--against", users)
    assert wrong.exit_code != 0 and "expected" in str(wrong.exception)


def test_ab_prints_the_verdict_and_tables(users):
    with http_server(recserve) as url:
        result = invoke(
            "ab", url, "--data", users, "--arm", "a={}", "--arm", "b={}", *SHORT, "--exact", 0
        )
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert re.search(r"(between b and a|compare b with a) in p99 latency", said), said
    assert "latency in ms" in result.stdout
