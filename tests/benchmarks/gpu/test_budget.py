"""How benchmarks/gpu.py shares its nine minutes out, and what it says of what did not fit."""

import json
import sys

import pytest

from benchmarks.gpu import parts
from benchmarks.gpu import suite as gpu

pytestmark = pytest.mark.slow


def test_the_stages_share_the_limit():
    """In the order in which they run: checks before measurements, and goals before the rest."""
    stages = list(gpu.SHARES_S)
    assert sum(gpu.SHARES_S.values()) <= gpu.LIMIT_S == 9 * 60
    assert stages[1:4] == ["machine", "checks", "compiling"]
    assert stages[4:] == [name for name, part in gpu.PARTS.items() if part.measures]
    assert all(gpu.SHARES_S[name] > gpu.GRACE_S for name in stages[1:])


@pytest.mark.parametrize("taken", [1.0, 0.0], ids=["checks-take-all", "checks-take-nothing"])
def test_what_a_stage_leaves_passes_on(taken, monkeypatch, tmp_path):
    """A clock that only the parts move: every measurement takes all that it may."""
    clock, had, ends = [1000.0], {}, {}

    def took(command, name, seconds, again):
        had[name] = seconds + gpu.GRACE_S
        clock[0] += had[name] * (taken if again else 1.0)
        ends[name] = clock[0] - 1000.0
        yield {"machine": {}} if name == "machine" else {"cut": name, "note": "late"}

    monkeypatch.setattr(gpu, "rows_of", took)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: clock[0])
    gpu.run("cuda", False, tmp_path / "out.json", 1)
    shares, measured = gpu.SHARES_S, list(gpu.SHARES_S)[4:]
    left = shares["compiling"] + (1 - taken) * shares["checks"]
    assert had["attention"] == shares["attention"] + left  # one worker compiles as it measures
    assert [had[name] for name in measured[1:]] == [shares[name] for name in measured[1:]]
    assert ends["search checks"] <= shares["machine"] + shares["checks"]
    assert ends["tuning"] + shares["start"] <= gpu.LIMIT_S
    cut = [row["cut"] for row in json.loads((tmp_path / "out.json").read_text())["cut"]]
    assert cut[-len(measured) :] == measured


@pytest.mark.parametrize("part", ["text", "searches", "engine", "kernels", "attention"])
def test_a_part_without_time_says_that_it_was_cut(part, capsys):
    assert gpu.run_part(part, "cpu", True, 0, -1.0) == 0
    told = capsys.readouterr().out.splitlines()
    last = json.loads(told[-1].removeprefix(parts.FOUND))
    assert last == {"cut": part, "note": "its time was used up"}
    assert not any(name in line for line in told for name in ("step_ms", "warm_ms", "ours_us"))


def test_a_measurement_that_has_to_be_killed_is_cut(monkeypatch):
    """Behind its last row, as it begins none that it would name."""
    monkeypatch.setattr(parts, "GRACE_S", 0.5)
    script = "import time; print('FOUND {}', flush=True); time.sleep(60)"
    rows = list(parts.rows_of([sys.executable, "-c", script], "text", 5.0, False))
    assert rows[0] == {} and rows[1]["cut"] == "text" and "killed" in rows[1]["note"]
