"""The proof of `recserve ab`: its replays keep the waves, and it runs from end to end."""

import sys

import numpy as np
import pytest

from benchmarks.experiments import ab_power


def test_replays_keep_neighbours_together():
    rows = ab_power.stationary(10_000, 5_000, np.random.default_rng(0))
    following = (np.diff(rows) == 1).mean()
    assert following > 1 - 3 / ab_power.STRETCH
    assert rows.min() >= 0 and rows.max() < 10_000


@pytest.mark.parametrize("mode", ab_power.MODES)
def test_a_replay_finds_a_large_effect(mode):
    trace = ab_power.drawn_trace(3000, 1)
    assert ab_power.replay(trace, mode, 3000, 0.3, 1)["p"]["p50"] < 0.01


@pytest.mark.slow
def test_it_runs_from_end_to_end(monkeypatch, tmp_path, capsys):
    report = tmp_path / "power.json"
    arguments = ["--replays", "20", "--power-replays", "0", "--shots", "600", "--workers", "1"]
    monkeypatch.setattr(sys, "argv", ["ab_power.py", *arguments, "--json", str(report)])
    with pytest.raises(SystemExit):
        ab_power.main()
    assert "A/A paired, 600 shots" in capsys.readouterr().out
    assert report.exists()
