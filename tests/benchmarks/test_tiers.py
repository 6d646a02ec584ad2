"""The comparison per instruction set: which runs there are, and what the tables hold."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from benchmarks import tiers

OPTIONS = {"threads": 1, "clock": "cpu", "budget_s": 1.0, "tokens": 8, "model": "128x2"}


def options(**changes: object) -> argparse.Namespace:
    return argparse.Namespace(**(OPTIONS | {"before": None} | changes))


def cell(method: str, ms: list[float]) -> dict[str, object]:
    runs = {method: {"times_ms": ms}}
    stages = {"cold": {"prefill_ms": 2.0}} if method == "cold" else {}
    work = {"prefill_gflop": 0.5}
    return {"beams": 50, "runs": runs, "stages": stages, "work": work, "matmul_gflops": 80.0}


def test_both_checkouts_run_in_turns(tmp_path):
    names = [job.name for job in tiers.jobs(options(before=tmp_path))]
    texts = ["now", "before", "now", "now, torch", "before"]  # bfloat16, then float32
    assert names == ["now", "now, torch", "before", "before, torch", *texts]
    assert {job.name for job in tiers.jobs(options())} == {"now", "now, torch"}
    assert len(tiers.jobs(options(tokens=0))) == 2


def test_slates_of_all_runs_are_one_median():
    figures: tiers.Figures = {}
    for ms in ([1.0, 2.0], [9.0]):
        tiers.note_slates(figures, "now", cell("cold", ms))
    tiers.note_slates(figures, "now", cell("kv-copy", [7.0]))
    found = tiers.medians(figures)
    # A loop without a cache takes the same time for a user whom it has answered before.
    assert found["beam 50 cold, ms"] == {"now": 2.0, "kv-copy": 7.0}
    assert found["beam 50 warm, ms"] == {"kv-copy": 7.0}
    assert found["prefill, GFLOP/s"] == {"now": 250.0, "plain matmul": 80.0}


def test_texts_stand_beside_those_of_other_programs():
    figures: tiers.Figures = {}
    names = ("plain", "oracle-100", "int8", "transformers", "llama.cpp", "llama.cpp Q8_0")
    fields = ("tokens_per_s", "decode_tokens_per_s", "prefill_ms")
    values = {name: dict.fromkeys(fields, float(i)) for i, name in enumerate(names)}
    tiers.note_texts(figures, "before", {"dtype": "bfloat16", "figures": values})
    found = tiers.medians(figures)
    plain = {"before": 0.0, "transformers": 3.0, "llama.cpp": 4.0}
    assert found["bfloat16, plain: tokens/s"] == plain
    assert found["bfloat16, 8 bits: decode tokens/s"] == {"before": 2.0, "llama.cpp": 5.0}
    assert len(found) == 6


def test_a_benchmark_that_fails_is_named(tmp_path):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "recommend.py").write_text("raise SystemExit('no such option')\n")
    job = tiers.Job("before", tmp_path, tiers.SLATES, ())
    with pytest.raises(RuntimeError, match=r"before: benchmarks/recommend\.py .*no such option"):
        job.run(tmp_path)


def test_an_older_checkout_runs_with_its_own_code(tmp_path, monkeypatch):
    """PYTHONPATH of this checkout does not reach the older one; other entries do."""
    source = (
        "import json, os, pathlib, sys\n"
        "machine = {name: os.environ[name] for name in ('PYTHONPATH', 'RECSERVE_KERNELS')}\n"
        "content = {'machine': machine, 'cells': [{'options': sys.argv[1:-2]}]}\n"
        "pathlib.Path(sys.argv[-1]).write_text(json.dumps(content))\n"
    )
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "recommend.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", f"{tiers.HERE}:{tmp_path / 'optional'}")
    (found,) = tiers.Job("before", tmp_path, tiers.SLATES, ("--x",), "torch").run(tmp_path)
    paths = f"{tmp_path}:{tmp_path / 'optional'}"
    assert found["machine"] == {"PYTHONPATH": paths, "RECSERVE_KERNELS": "torch"}
    assert found["options"] == ["--x"]


def test_the_command_prints_and_writes_both_tables(tmp_path, monkeypatch, capsys):
    slates, figures = cell("cold", [3.0]), {"plain": {"tokens_per_s": 5.0}}
    figures["plain"] |= {"decode_tokens_per_s": 6.0, "prefill_ms": 7.0}
    texts = {"dtype": "bfloat16", "figures": figures}

    def run(self: tiers.Job, folder: Path) -> list[dict[str, object]]:
        found = slates if self.places == tiers.SLATES else texts
        return [found | {"machine": {"processor": "some"}}]

    monkeypatch.setattr(tiers.Job, "run", run)
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["tiers", "--rounds", "1", "--json", str(out)])
    assert tiers.main() == 0
    written = json.loads(out.read_text())
    assert written["machine"] == {"processor": "some"}
    assert written["slates"]["beam 50 cold, ms"] == {"now": 3.0, "now, torch": 3.0}
    assert written["texts"]["bfloat16, plain: prefill ms"] == {"now": 7.0, "now, torch": 7.0}
    assert "bfloat16, plain: tokens/s" in capsys.readouterr().out
