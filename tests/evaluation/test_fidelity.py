"""`recserve evaluate --strategy all`: what it says of each strategy, checked by hand."""

import json

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from recserve.bundle.bundle import Bundle
from recserve.cli.app import app
from recserve.core.request import Slate
from recserve.evaluation.cases import Cases
from recserve.evaluation.fidelity import (
    StrategyRun,
    _figures,
    compare_strategies,
    illegal_shares,
)
from tests.support.tiny_bundle import shared_bundle

CASES = Cases(np.arange(10), np.array([0, 4]), np.array([3, 8]), np.array([7, 1]), np.arange(2))


def slate(*rows: int) -> Slate:
    return Slate(np.array(rows), np.zeros(len(rows), np.float32), True, 1)


def test_shares_are_counted_as_they_are_named():
    reference = [slate(7, 5, 6), slate(3, 1, 9)]
    drafted = [slate(5, 7, 8), slate(3, 1, 9)]
    run = StrategyRun(
        strategy="x", slates=drafted, illegal=np.zeros(2), cold_ms=[3.0, 1.0, 2.0], warm_ms=[1.0]
    )
    found = _figures(run, reference, CASES, (3,))
    assert found.overlap == pytest.approx((2 / 3 + 1) / 2)
    assert found.identical == 0.5
    assert found.cold_ms == 2.0
    assert found.intervals["cold_ms"] == (1.0, 3.0)
    assert found.metrics["ndcg@3"] == pytest.approx(1 / np.log2(3))


def test_seen_repeated_and_missing_items_are_illegal():
    for rows, shares in (
        ([[5, 6, 7], [0, 1, 2]], [0, 0]),
        ([[5, 5, 7], [0, 4, 10]], [1 / 3, 2 / 3]),
        ([[5, -1, -1], [-1, -1, -1]], [0, 0]),
    ):
        assert illegal_shares(CASES, np.array(rows), 10) == pytest.approx(shares)


def test_every_strategy_of_the_bundle_is_compared(tmp_path):
    result = CliRunner().invoke(
        app,
        ["evaluate", "--bundle", str(shared_bundle()), "--strategy", "all", "-k", "5,10"]
        + ["--users", "12", "--beam-width", "12", "--json", str(tmp_path / "a.json")]
        + ["--plot", str(tmp_path / "a.png")],
    )
    assert result.exit_code == 0, result.output
    rows = {
        row["strategy"]: row for row in json.loads((tmp_path / "a.json").read_text())["strategies"]
    }
    assert list(rows)[:2] == ["beam", "speculative"]
    for name in ("beam", "speculative"):
        assert rows[name]["overlap"] == rows[name]["identical"] == rows[name]["exact"] == 1
        assert rows[name]["metrics"] == rows["beam"]["metrics"]
    assert all(row["illegal"] == 0 for row in rows.values())
    for row in rows.values():
        values = row["metrics"] | {name: v for name, v in row.items() if isinstance(v, float)}
        assert set(row["intervals"]) == set(values) and len(values) == 14
        for name, value in values.items():
            low, high = row["intervals"][name]
            assert low - 1e-9 <= value <= high + 1e-9, name
    assert all(name in result.output for name in rows)
    assert Image.open(tmp_path / "a.png").size[0] > 400


def test_cut_offs_beyond_the_beam_are_refused():
    with pytest.raises(ValueError, match="beam width 5"):
        compare_strategies(Bundle.open(shared_bundle()), k=(10,), width=5)
