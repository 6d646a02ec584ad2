"""benchmarks/gpu.py on a machine without a GPU: its logic at tiny sizes, and its refusal."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks.gpu import checks as gpu_checks
from benchmarks.gpu import parts
from benchmarks.gpu import suite as gpu
from benchmarks.gpu.checks import far_slots, kernel_checks, long_root, many_nodes
from benchmarks.kernels import attention_rows, small_kernels, tuning
from benchmarks.support.timing import Deadline
from tests.support import triton_interpreter
from tests.support.compile_kernels import CHECKED
from tests.support.paths import ROOT
from tests.support.pretend_cuda import PretendCuda

pytestmark = pytest.mark.slow

# As on a machine that has torch, numpy, safetensors and triton, and nothing else: python runs this
# at its start, in the parts' processes too.
BARE = """
import sys
for name in ("pyarrow", "faiss", "fastapi", "lmdb", "redis", "msgspec", "sklearn", "transformers",
             "scipy", "pydantic", "pytest", "prometheus_client", "tokenizers", "matplotlib"):
    sys.modules[name] = None
"""


HOW = ("recorded", "launched")


def run(folder, *arguments):
    (folder / "sitecustomize.py").write_text(BARE)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(folder)
    return subprocess.run(
        [sys.executable, "benchmarks/gpu.py", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_checks_and_measures_everything_it_can_reach(tmp_path):
    path = tmp_path / "out.json"
    done = run(tmp_path, "--device", "cpu", "--smoke", "--json", str(path))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    content = json.loads(path.read_text())
    names = " ".join(check["name"] for check in content["checks"])
    for kernel in ("tree_attention", "accept_drawn", "path_move", "rope_write", "noise"):
        assert kernel in names
    for strategy in ("beam", "speculative", "nezha", "dense", "likelihood", "rank", "text_scores"):
        assert f"strategy {strategy}" in names
    for drafter in ("lookahead", "medusa", "specinfer", "merged"):
        assert f"text {drafter}" in names
    assert all(check["ok"] for check in content["checks"])
    assert all(row["ours_us"] > 0 for row in content["attention"] + content["kernels"])
    assert all(row["warm_ms"] > 0 for row in content["engine"])
    assert sum("recorded steps" in check["name"] for check in content["checks"]) == 21
    assert "text steps: all recorded" in names
    assert sum("recorded search" in check["name"] for check in content["checks"]) == 14
    assert sum("goal shape" in row["engine"] for row in content["engine"]) == 5
    assert all(row["replayed"] > 0 for row in content["engine"] if "recorded," in row["engine"])
    assert {row["recorded"] for row in content["text"]} == {False, True}
    assert all(row["replayed"] > 0 for row in content["text"] if row["recorded"])
    assert all(row["step_ms"] > 0 for row in content["text"])


class EventlessTiming:
    """What support/timing.py offers, for a device without events: one call, no time."""

    @staticmethod
    def milliseconds(call, *_, **__):
        call()
        return 1.0

    graph_milliseconds = host_microseconds = milliseconds


class HostGenerator(torch.Generator):
    """Whatever device it is asked for."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu")


@pytest.fixture
def pretended(monkeypatch, force_kernels):
    """A GPU whose kernels are interpreted and whose clock stands still."""
    force_kernels("triton")
    monkeypatch.setattr(torch, "Generator", HostGenerator)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    for module in (attention_rows, small_kernels, tuning):
        for name in ("milliseconds", "graph_milliseconds", "host_microseconds"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(EventlessTiming, name))
    launches = triton_interpreter.interpret_pretended(monkeypatch)
    with PretendCuda():
        yield launches


def test_kernel_checks_pass_on_a_pretended_gpu(pretended):
    checks = [task.checked() for task in kernel_checks("cuda", smoke=True)]
    assert not [check for check in checks if not check.ok]
    assert {"_attend", "move_kernel", "rope_kernel", "head_kernel"} <= set(pretended)


def test_what_is_checked_on_a_gpu_is_compiled_without_one():
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    assert [(names[dtype], *form) for dtype, *form in gpu_checks.FORMS] == CHECKED


def cannot(problem):
    raise RuntimeError("a dense candidate that does not compile")


@pytest.mark.parametrize("check", [many_nodes, far_slots, long_root, partial(long_root, fp8=True)])
def test_large_checks_pass_in_small(check):
    """What is left out of the smoke run because of its size, by its own code."""
    assert check("cpu", 60) < 1e-2


@pytest.mark.parametrize("part", ["attention", "kernels", "tuning"])
def test_kernels_are_measured_on_a_pretended_gpu(part, pretended, monkeypatch):
    monkeypatch.setattr(attention_rows.attention, "flex", cannot)
    monkeypatch.setattr(tuning, "SHAPES", attention_rows.cuda_shapes(smoke=True) * 2)
    monkeypatch.setattr(tuning, "VARIANTS", tuning.VARIANTS[:2])
    rows = list(gpu.PARTS[part].rows("cuda", True, Deadline()))
    assert rows and pretended
    figures = [v for row in rows for k, v in row.items() if k.endswith("ours_us") or " B" in k]
    assert figures and all(isinstance(figure, float) for figure in figures)
    if part == "attention":
        flexed = [row for row in rows if "flex_us" in row]
        assert len(flexed) == 3 and all("does not compile" in r["flex_error"] for r in flexed)


def test_engines_are_checked_and_measured_on_a_pretended_gpu(pretended, force_kernels):
    """With plain kernels: interpreted ones are in test_device_kernels.py."""
    force_kernels("torch")
    tasks = {task.name: task for task in gpu.engine_checks("cuda", smoke=True)}
    for name in ("strategy beam of items", "strategy rank", "text medusa, sample, everything"):
        check = tasks[f"{name}: as on the CPU"].checked()
        assert check.ok, check
    rows = list(gpu.engine_rows("cuda", True, Deadline()))
    names = {" ".join(row["engine"].split()[2:4]) for row in rows}
    assert {f"{name}, {how}," for name in ("beam", "nezha") for how in HOW} <= names
    tasks = {task.name: task for task in gpu.search_checks("cuda", smoke=True)}
    for strategy, how in (("beam", "live"), ("nezha", "filters"), ("beam", "weighed")):
        check = tasks[f"recorded search {strategy} of items, {how}: as cpu"].checked()
        assert check.ok, check
    rows = list(gpu.search_rows("cuda", True, Deadline()))
    assert {row["engine"].split()[3] for row in rows} == {f"{how}," for how in HOW}


CHILD = """
import os, sys, time
skip = int(sys.argv[sys.argv.index("--skip") + 1])
for n in range(skip, 5):
    print(f"BEGUN row {n}", flush=True)
    if n == 1:
        os._exit(9)
    if n == 3:
        FATE
    print('FOUND {"name": "row %d", "ok": true}' % n, flush=True)
"""


def outcome(fate, again, seconds=30.0):
    command = [sys.executable, "-c", CHILD.replace("FATE", fate)]
    rows = parts.rows_of(command, "part", seconds, again)
    return [(row["name"], row["ok"]) for row in rows]


def test_a_part_goes_on_behind_what_killed_it():
    rows = outcome("os.abort()", again=True)
    assert rows == [(f"row {n}", n not in (1, 3)) for n in range(5)]


def test_measurements_end_where_they_die():
    assert outcome("pass", again=False) == [("row 0", True), ("row 1", False)]


def test_what_dies_behind_a_row_is_told_with_its_reason():
    """A child that begins no rows, as those that measure: it ends with an error of its own."""
    script = """
import sys
if "--skip" in sys.argv and sys.argv[sys.argv.index("--skip") + 1] == "0":
    print('FOUND {"name": "one"}', flush=True)
raise RuntimeError("of the second row")
"""
    for again in (False, True):
        command = [sys.executable, "-c", script]
        first, second, *rest = parts.rows_of(command, "part", 30.0, again)
        assert first == {"name": "one"}
        assert second["name"] == "part, behind row 1" and not second["ok"]
        assert "exit 1" in second["note"] and "of the second row" in second["note"]
        assert [row["name"] for row in rest] == ["part, what was left of it"] * again


def test_a_device_that_answers_nothing_is_told_once():
    """The row that found it is there; what was to be measured behind it is lost, checks go on."""
    fate = 'print(\'FOUND {"name": "row 3", "ok": false}\', flush=True); os._exit(3)'
    script = CHILD.replace("os._exit(9)", "pass").replace("FATE", fate)
    command = [sys.executable, "-c", script]
    for again, behind in ((True, "row 4"), (False, "part, what was left of it")):
        rows = list(parts.rows_of(command, "part", 30.0, again))
        assert [row["name"] for row in rows] == [*(f"row {n}" for n in range(4)), behind]
        assert rows[3] == {"name": "row 3", "ok": False} and rows[4]["ok"] is again


def test_what_never_ends_is_ended(monkeypatch):
    monkeypatch.setattr(parts, "GRACE_S", 1.0)
    rows = outcome("time.sleep(60)", again=True, seconds=2.0)
    assert rows[2:] == [("row 2", True), ("row 3", False), ("part, what was left of it", False)]


def test_what_a_child_has_started_is_not_waited_for(tmp_path):
    """It holds the pipe open when all rows are there."""
    sleep = "[sys.executable, '-c', 'import time; time.sleep(60)']"
    note = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(started.pid))"
    holder = f"import subprocess; started = subprocess.Popen({sleep}); {note}"
    script = CHILD.replace("FATE", "pass").replace("os._exit(9)", "pass") + holder
    rows = list(parts.rows_of([sys.executable, "-c", script], "part", 30.0, True))
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)  # an error if it had ended
    assert len(rows) == 5 and all(row["ok"] for row in rows)


def test_jobs_run_side_by_side():
    """Each waits for the other's row, so one after another they would not end."""
    gate = threading.Barrier(2, timeout=30)

    def job(name):
        yield name
        gate.wait()
        yield name * 2

    found = list(parts.side_by_side([lambda: job("a"), lambda: job("b")], 2))
    assert sorted(found) == ["a", "aa", "b", "bb"]

    def broken():
        yield "a"
        raise RuntimeError("of a job")

    with pytest.raises(RuntimeError, match="of a job"):
        list(parts.side_by_side([broken, lambda: iter("bc")], 1))


def test_shares_of_a_part_are_the_part(monkeypatch):
    """Two processes with every other check each, and what is measured is shared out as well."""
    monkeypatch.setattr(
        gpu, "PARTS", {"kernel checks": replace(gpu.PARTS["kernel checks"], shares=2)}
    )
    found = gpu.Run("cpu", True, 2, time.monotonic()).checks()
    names = [row["name"] for row in found if row["ok"]]
    assert sorted(names) == sorted(task.name for task in kernel_checks("cpu", smoke=True))


def test_all_that_is_measured_is_compiled_before(monkeypatch, capsys):
    asked = []

    def noted(command, name, seconds, again):
        asked.append((name, command[command.index("--share") + 1], again))
        assert 0 < seconds <= gpu.end_s("compiling") - gpu.GRACE_S
        yield {}
        yield {"name": "one", "ok": False, "note": "no memory"}
        yield {"cut": name, "note": "late"}

    monkeypatch.setattr(gpu, "rows_of", noted)
    cut = {row["cut"] for row in gpu.Run("cuda", False, 3, time.monotonic()).compiled()}
    told = capsys.readouterr().err
    assert "while compiling: FAILED one: no memory" in told
    assert cut == {f"compiling {name}" for name, part in gpu.PARTS.items() if part.measures}
    wanted = {
        (name, f"{n}/{part.shares}", False)
        for name, part in gpu.PARTS.items()
        for n in range(part.shares)
        if name != "machine" and not name.endswith("checks")
    }
    assert set(asked) == wanted and len(asked) == len(wanted) > 8


def test_a_wrong_kernel_is_a_failed_check(tmp_path):
    """The same run with an attention that forgets its scale exits 1 and names it."""
    script = tmp_path / "broken.py"
    script.write_text(
        "from recserve.kernels.attention import attention\n"
        "plain = attention.tree_attention\n"
        "def broken(batch, *rest):\n"
        "    attention = plain(batch, *rest)\n"
        "    return lambda query, *others: attention(query * 1.1, *others)\n"
        "attention.tree_attention = broken\n"
        "from benchmarks.gpu.checks import kernel_checks\n"
        "checks = [task.checked() for task in kernel_checks('cpu', smoke=True)]\n"
        "failed = [check.name for check in checks if not check.ok]\n"
        "assert failed and all('tree_attention' in name for name in failed), failed\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(script)], check=True, env=environment, timeout=300)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_says_so_where_there_is_no_gpu(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 2 and "no CUDA device" in done.stderr
