"""A run against the saved requests of an earlier one: as if both had been sent in turn."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest

from recserve.experiments.statistics import FAILED_REQUESTS
from recserve.load.comparison import Criteria, compare_arms
from recserve.load.generator import Run
from recserve.load.measurements import TIMEOUT, SampleColumns, write_records
from recserve.load.session import compare_with_saved
from tests.support.experiment_runs import SAMPLES, made_run


def one_arm(arm, shots, share):
    """A run of one arm: a share of its requests fail, every other one by a timeout."""
    drawn = np.random.default_rng(arm)
    mine = [one for one in made_run(shots=shots, effect=0.1, seed=arm).exchanges if one.arm == arm]
    made = []
    for shot, one in enumerate(mine):
        error = drawn.choice([TIMEOUT, "http_503"]) if drawn.random() < share else None
        made.append(replace(one, shot=shot, arm=0, error=error))
    return made


@pytest.mark.parametrize("text", [False, True])
def test_the_records_of_a_run_are_its_requests(text, tmp_path):
    requests = made_run(shots=20, effect=0.1, text=text).exchanges
    failed = replace(requests[3], status=0, error=TIMEOUT, reply=None)
    requests = (*requests[:3], failed, *requests[4:])
    columns = SampleColumns.of(Run(requests, 12.0, 0.1, 3), SAMPLES)
    write_records(tmp_path / "run.parquet", columns, ["one", "two"])
    rows = pq.read_table(tmp_path / "run.parquet").to_pylist()
    places = {(row["shot"], row["place"]): row for row in rows}
    assert len(places) == len(rows) == len(requests)
    for one in requests:
        row = places[one.shot, one.place]
        assert (row["arm"], row["status"]) == (["one", "two"][one.arm], one.status)
        assert (row["error"], row["latency_ms"]) == (one.error, one.latency_ms)
        assert row["lateness_ms"] == pytest.approx((one.sent - one.scheduled) * 1e3)
        for name in ("output_tokens", "server_ms"):
            assert row[name] == (None if one.reply is None else getattr(one.reply, name))


@pytest.mark.parametrize("shares", [(0.0, 0.0), (0.3, 0.0), (0.02, 0.3)])
def test_a_saved_run_is_an_arm_of_its_own(tmp_path, shares):
    """Failures, timeouts and latencies of both runs count as in a run with two arms."""
    saved, new = one_arm(0, 1000, shares[0]), one_arm(1, 1200, shares[1])
    runs = [SampleColumns.of(Run(tuple(one), 12.0, 0.1, 3), SAMPLES) for one in (saved, new)]
    write_records(tmp_path / "saved.parquet", runs[0], ["server"])
    session = SimpleNamespace(columns=runs[1], samples=SAMPLES)
    criteria = Criteria(statistic="p50")
    found = compare_with_saved(session, tmp_path / "saved.parquet", criteria)
    size = min(len(saved), len(new))
    both = [*saved[:size], *(replace(one, arm=1) for one in new[:size])]
    columns = SampleColumns.of(Run(tuple(both), 12.0, 0.1, 3), SAMPLES)
    wanted = compare_arms(columns, SAMPLES, ("saved run", "this run"), 1, "blocks", criteria)
    assert found.effects["latency"] == wanted.effects["latency"]
    failed = next(guard for guard in found.guardrails if guard.name == FAILED_REQUESTS)
    assert failed in wanted.guardrails
    assert (failed.control, failed.treatment) == tuple(
        np.mean([one.error is not None for one in run[:size]]) for run in (saved, new)
    )
    assert found.num_blocks == wanted.num_blocks
    assert any("one after the other" in note for note in found.notes)
