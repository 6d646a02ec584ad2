"""The comparison of draft heads on a tiny bundle: every kind, every slate compared."""

import json
import sys

import pytest
import torch

from benchmarks.recommend import draft_heads
from recserve.models.drafters.prefix_head import NETWORKS
from tests.support.tiny_bundle import tiny_bundle

pytestmark = pytest.mark.slow


def test_every_kind_is_trained_and_compared(tmp_path, monkeypatch):
    bundle = tiny_bundle(tmp_path, ranker=False)
    before = (bundle / "manifest.json").read_bytes()
    written = tmp_path / "heads.json"
    words = ["--beams", "5", "20", "--users", "10", "--epochs", "1", "--json", str(written)]
    monkeypatch.setattr(sys, "argv", ["draft_heads", "--bundles", str(bundle), *words])
    threads = torch.get_num_threads()
    try:
        assert draft_heads.main() == 0
    finally:
        torch.set_num_threads(threads)
    cells = json.loads(written.read_text())["cells"]
    found = {(cell["head"], cell["width"]) for cell in cells}
    names = ["beam", *NETWORKS, "recurrent in torch"]
    assert found == {(name, width) for name in names for width in (5, 20)}
    for cell in cells:
        assert cell["differing"] == 0 and cell["request_ms"] > 0 and cell["rounds"] >= 1
        assert (cell["margin"] == 0) == (cell["head"] == "beam")
        assert 0 <= cell["share"] < 1
    assert (bundle / "manifest.json").read_bytes() == before
