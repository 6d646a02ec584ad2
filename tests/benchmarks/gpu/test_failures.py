"""Where something fails in benchmarks/gpu.py: all the rest is left, and a row that says why."""

import logging

import pytest
import torch

from benchmarks.gpu import searches as gpu_searches
from benchmarks.gpu import suite as gpu
from benchmarks.gpu import text as gpu_text
from benchmarks.kernels import attention_rows, small_kernels
from benchmarks.kernels.attention_rows import FLEX_SHAPES
from benchmarks.support import timing
from benchmarks.support.failures import attempted, complaints, once
from benchmarks.support.timing import Deadline
from recserve.engine.beam_search_graph import BeamSearchGraphs
from recserve.engine.text_step_graph import TextStepGraphs

pytestmark = pytest.mark.slow


def failing(method, name):
    """A recorder that has no room for buckets whose names begin so."""

    def record(self, *arguments):
        if any(getattr(one, "name", "").startswith(name) for one in arguments):
            raise RuntimeError("no room for this one")
        return method(self, *arguments)

    return record


def split(rows):
    rows = list(rows)
    return [row for row in rows if "ok" not in row], [row for row in rows if "ok" in row]


def test_text_steps_are_measured_with_what_was_recorded(monkeypatch):
    monkeypatch.setattr(TextStepGraphs, "_build", failing(TextStepGraphs._build, "16x8"))
    monkeypatch.setattr(gpu_text, "PARAMETERS", {"greedy": gpu_text.PARAMETERS["greedy"]})
    rows, (failed,) = split(gpu_text.text_rows("cpu", True, Deadline()))
    assert "16x8" in failed["name"] and not failed["ok"] and "no room" in failed["note"]
    assert [row["recorded"] for row in rows] == [True, True, False, False]
    assert rows[0]["replayed"] > 0.5 and rows[0]["host_us"]  # 2x1 and 16x1 came before it
    tasks = {task.name: task for task in gpu_text.text_checks("cpu", smoke=True)}
    check = tasks["text steps: all recorded"].checked()
    assert not check.ok and "16x8" in check.note and "no room" in check.note


def test_searches_are_measured_with_what_was_recorded(monkeypatch):
    monkeypatch.setattr(BeamSearchGraphs, "_build", failing(BeamSearchGraphs._build, "nezha"))
    rows, (failed,) = split(gpu_searches.search_rows("cpu", True, Deadline()))
    assert "nezha 1x10" in failed["name"] and "no room" in failed["note"]
    assert len(rows) == 5 and [row.get("replayed") for row in rows[:2]] == [15, 0]
    tasks = {task.name: task for task in gpu_searches.search_checks("cpu", smoke=True)}
    check = tasks["recorded search nezha of items, plain: as cpu"].checked()
    assert not check.ok and "not replayed" in check.note and "no room" in check.note


def test_one_kernel_that_fails_is_one_row(monkeypatch):
    def broken(*_):
        raise RuntimeError("of its numbers")

    monkeypatch.setattr(small_kernels, "_head_topk", broken)
    rows, (failed,) = split(small_kernels.small_kernels("cpu", smoke=True))
    assert failed["name"].startswith("head_topk") and "of its numbers" in failed["note"]
    assert {row["kernel"].split()[0] for row in rows} >= {"accept", "best_children"}
    monkeypatch.setattr(attention_rows.attention, "ours", broken)
    monkeypatch.setattr(attention_rows, "alternating", None)
    shapes = attention_rows.cuda_shapes(smoke=True)
    rows = attention_rows.attention_rows(enumerate(shapes), torch.float32, "cpu", Deadline())
    assert [row["ok"] for row in rows] == [False] * len(shapes)


def test_the_goals_come_first(monkeypatch):
    """FlexAttention at the first shapes comes before all other shapes, and before other parts."""
    monkeypatch.setattr(attention_rows, "on_cuda", lambda shape, *_: {"shape": shape.name()})
    monkeypatch.setattr(
        attention_rows, "flex_row", lambda shape, _: {"shape": f"{shape.name()}, flex"}
    )
    names = [row["shape"] for row in gpu.measured_attention("cuda", False, Deadline())]
    heads = "H32/8-D128"
    assert names[:2] == [f"tree B1 R{root} N64 {heads}" for root in (8192, 32768)]
    assert names[2:4] == [f"{name}, flex" for name in names[:2]]
    assert sum("flex" in name for name in names) == FLEX_SHAPES
    shares = [slice(n, None, 4) for n in range(4)]
    shared = [
        row["shape"]
        for share in shares
        for row in gpu.measured_attention("cuda", False, Deadline(), share)
    ]
    assert sorted(shared) == sorted(names)
    measured = [name for name, part in gpu.PARTS.items() if part.measures]
    assert measured[:4] == ["attention", "text", "searches", "profile"]


def test_recorded_checks_see_the_operators_of_serving():
    """Those of kernels alone begin with memory filled with NaN."""
    for name, poisoned in (("kernel checks", True), ("text checks", False)):
        rows = gpu.PARTS[name].rows("cpu", True, Deadline())
        next(rows)
        assert torch.are_deterministic_algorithms_enabled() is poisoned
        rows.close()
        assert not torch.are_deterministic_algorithms_enabled()


def test_replays_are_timed_without_a_pause(monkeypatch):
    """Between two events ten calls and nothing else: no cache is emptied, nothing is waited for."""
    calls = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            calls.append("event")

        def synchronize(self):
            calls.append("wait")

        def elapsed_time(self, stop):
            return 5.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    taken = timing.back_to_back_milliseconds(lambda: calls.append("replay"), "cuda", runs=2)
    assert taken == 0.5
    assert calls == ["replay", *["event", *["replay"] * 10, "event", "wait"] * 2]


def test_what_could_not_be_made_is_not_made_again():
    calls = []

    @once
    def make(key):
        calls.append(key)
        if key < 0:
            raise ValueError("below zero")
        return [key]

    assert make(1) is make(1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ValueError: below zero"):
            make(-1)
    assert calls == [1, -1]


def test_complaints_are_heard_with_their_errors():
    log = logging.getLogger("recserve.somewhere")
    with complaints() as heard:
        try:
            raise KeyError("a")
        except KeyError:
            log.exception("no graph of %s", "72x8")
        log.info("nothing of it")
    log.warning("too late")
    assert heard == ["no graph of 72x8: KeyError: 'a'"]
    assert attempted("one", lambda: {"a": 1}) == {"a": 1}
