"""`recserve retrain`: its limits, its file, and that a killed run goes on where it was."""

import json

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from recserve.bundle.bundle import Bundle
from recserve.cli import retrain
from recserve.cli.app import app
from recserve.evaluation.cases import leave_one_out_cases
from recserve.training import retraining
from recserve.training.retraining import GateLimits, Guardrails, Run, compare, drift, translate
from tests.support.tiny_bundle import tiny_bundle

LEAST = "items: i\nbundles_dir: b\nruns: r\nevents: [e]\nserved: s\n"
LIMITS = Guardrails(min_requests=100)
BEFORE = {"answers": 900.0, "failed": 9.0, "degraded": 9.0, "slates": 900.0, "outcomes": 180.0}
BEFORE |= {"le 0.01": 800.0, "le 0.1": 895.0, "le +Inf": 900.0}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, ""),
        ({"failed": 40.0}, "failed"),
        ({"degraded": 90.0}, "degraded"),
        ({"le 0.1": 700.0}, "p99"),
        ({"outcomes": 60.0}, "outcomes per slate"),
        ({"outcomes": 170.0}, ""),
        ({"answers": 20.0, "failed": 20.0}, ""),  # too few to say
    ],
)
def test_guardrails_compare_with_the_time_before_the_load(change, fault):
    faults = retrain.guard_faults(BEFORE, BEFORE | change, LIMITS)
    assert (not faults and not fault) or fault in faults[0]
    assert len(faults) == bool(fault)


def test_a_process_that_began_anew_is_compared_by_all_its_counts():
    assert retrain.window({"answers": 5.0}, {"answers": 9.0, "failed": 1.0}) == {
        "answers": 4.0,
        "failed": 1.0,
    }
    assert retrain.window({"answers": 5.0}, {"answers": 3.0}) == {"answers": 3.0}


def test_durations():
    assert [retrain.duration_s(text) for text in ("6h", "30m", "1.5d")] == [21600, 1800, 129600]
    for wrong in ("6", "h", "0h", "-1h", "6 hours"):
        with pytest.raises(typer.BadParameter, match="as in 6h"):
            retrain.duration_s(wrong)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("items: i\nbundles_dir: b\nruns: r\nurl: x\n", "name files of events"),
        ("items: i\nbundles_dir: b\nruns: r\nevents: [e]\n", "served: is required without url"),
        (f"{LEAST}foo: 1\n", "foo"),
        (f"{LEAST}gate: {{margin: 2}}\n", "margin"),
        ("- 1\n", "expected a mapping"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, said):
    (tmp_path / "c.yaml").write_text(text)
    done = CliRunner().invoke(app, ["retrain", str(tmp_path / "c.yaml")])
    assert done.exit_code
    assert said in f"{done.output} {done.exception}"


def test_a_bundle_compared_with_itself_does_not_differ(tmp_path):
    bundle = Bundle.open(tiny_bundle(tmp_path))
    found = compare(bundle, bundle, GateLimits(days=10_000))
    assert found["difference"] == 0 and found["users"] > 10
    assert found["interval"][0] < 0 < found["interval"][1]
    assert set(drift(bundle, bundle).values()) == {0.0}


def test_cases_in_other_rows_keep_their_items():
    bundle = np.random.default_rng(0)
    rows = bundle.permutation(6)
    rows[2] = -1
    from recserve.features.tables.events import EventLog

    items = np.array([0, 2, 3, 4, 2, 5, 1, 2], np.int32)
    log = EventLog(
        ["a", "b"],
        np.array([0, 4, 8]),
        items,
        np.arange(8),
        np.zeros(8, np.int16),
        ("event",),
        np.ones(8, np.float32),
        False,
    )
    cases = leave_one_out_cases(log, "test")
    other = translate(cases, rows)
    for case in range(2):
        wanted = [rows[item] for item in cases.history(case) if item != 2]
        assert other.history(case).tolist() == wanted
        assert other.held[case] == rows[cases.held[case]]


def test_a_killed_run_goes_on_at_its_step(tmp_path, monkeypatch):
    """Each step is done once, however often the process ends in the middle of one."""
    config = retraining.RetrainConfig(
        items="i", events=["e"], bundles_dir=str(tmp_path), runs=str(tmp_path / "runs"), served="b"
    )
    monkeypatch.setattr(Bundle, "open", staticmethod(lambda path: path))
    done, kills = [], iter(range(100))

    def step(name, result):
        def do(*_):
            if next(kills) % 2 == 0:
                raise RuntimeError("killed")
            done.append(name)
            return result

        return do

    monkeypatch.setattr(retraining, "collect", step("collect", {}))
    monkeypatch.setattr(retraining, "build", step("build", {}))
    monkeypatch.setattr(retraining, "train", step("train", {"validation": {"ndcg@10": 0.5}}))
    monkeypatch.setattr(retraining, "judge", step("gate", {"faults": []}))
    monkeypatch.setattr(retraining, "publish", step("publish", {"name": "b-1"}))
    outcome = ""
    for _ in range(20):
        try:
            outcome = retrain.run_once(config, None, None)
            break
        except RuntimeError:
            continue
    assert outcome == retrain.READY
    assert done == ["collect", "build", "train", "gate", "publish"]
    record = json.loads((tmp_path / "runs" / "0001" / "run.json").read_text())
    assert record["outcome"] == retrain.READY
    assert "Retrain 1" in (tmp_path / "runs" / "0001" / "report.html").read_text()
    assert Run.latest(tmp_path / "runs").number == 2
    with retrain.only_one(tmp_path / "runs"), pytest.raises(RuntimeError, match="another retrain"):
        retrain.run_once(config, None, None)
