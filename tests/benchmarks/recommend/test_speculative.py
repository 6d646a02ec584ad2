"""Calibration by command, the comparison of drafts with beam search, and its joined histories."""

import json
import sys

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks.recommend import joined_bundle
from benchmarks.recommend import speculative as speculation
from recserve.bundle.bundle import Bundle
from recserve.cli import app
from tests.support.tiny_bundle import tiny_bundle

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """A bundle whose draft head, of drawn weights, was calibrated by the command."""
    bundle = tiny_bundle(tmp_path_factory.mktemp("speculation"), ranker=False)
    done = CliRunner().invoke(app, ["bundle", "calibrate", str(bundle), "--device", "cpu"])
    assert done.exit_code == 0 and "beam 50, k 10, margin 0: " in done.output, done.output
    opened = Bundle.open(bundle)
    opened.verify()
    stored = json.loads((opened.directory("drafters/speculative") / "config.json").read_text())
    assert set(stored["calibration"]) >= {"10/10", "50/50"}
    return bundle


def test_every_slate_is_compared(calibrated, tmp_path, monkeypatch):
    """Beam search, drafts and `auto` answer alike, in every cell, and the figures are written."""
    written = tmp_path / "cells.json"
    cells = ["--beams", "5", "40", "--k", "5", "40", "--batches", "1", "3"]
    words = [*cells, "--users", "12", "--repeats", "3", "--threads", "1"]
    arguments = ["speculation", "--bundle", str(calibrated), *words, "--json", str(written)]
    monkeypatch.setattr(sys, "argv", arguments)
    threads = torch.get_num_threads()
    try:
        assert speculation.main() == 0
    finally:
        torch.set_num_threads(threads)
    cells = json.loads(written.read_text())["cells"]
    assert len(cells) == 3 * 2 * 3  # k 40 needs beam 40
    for cell in cells:
        assert cell["turns"] == 3 and cell["differing"] == 0
        assert set(cell["median_ms"]) == {"beam", "drafted", "auto"}
        assert min(cell["median_ms"].values()) > 0
        if cell["visit"] == "again":
            assert "1.00 rounds" in cell["work"]["drafted"]


def test_a_head_without_calibration_is_refused(tmp_path, monkeypatch):
    bundle = tiny_bundle(tmp_path, ranker=False)
    monkeypatch.setattr(sys, "argv", ["speculation", "--bundle", str(bundle), "--threads", "1"])
    with pytest.raises(ValueError, match="no calibrated draft head"):
        speculation.main()


def test_joined_histories_hold_the_same_events(calibrated, tmp_path):
    events = Bundle.open(calibrated).events()
    found = joined_bundle.joined(events, 5)
    assert found.num_users == 26 + 3  # of 40 users 26 alone, 14 in groups of at most five
    np.testing.assert_array_equal(found.item_rows, events.item_rows)
    np.testing.assert_array_equal(found.offsets[:27], events.offsets[:27])
    np.testing.assert_array_equal(found.offsets[27:], events.offsets[[31, 36, 40]])
    first = found.offsets[27]
    assert found.times[first] == 0 and found.times[first - 1] == found.lengths()[26] - 1
    opened = Bundle.open(tiny_bundle(tmp_path, ranker=False))
    before = opened.events().item_rows
    joined_bundle.rewrite(opened)
    again = Bundle.open(opened.root)
    again.verify()
    assert again.events().num_users == 27  # 14 users are fewer than JOINED
    np.testing.assert_array_equal(again.events().item_rows, before)
