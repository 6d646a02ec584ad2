"""The benchmark of drafts under load runs, and its texts are those of plain decoding."""

import json
import sys

import pytest
import torch

from benchmarks.text import load as text_load
from tests.support.paths import DATA

pytestmark = pytest.mark.slow


@pytest.mark.skipif(not (DATA / "stories260k").is_dir(), reason="NO REFERENCE DATA: did not run")
def test_every_load_and_drafter_has_its_row(monkeypatch, tmp_path):
    before, written = torch.get_num_threads(), tmp_path / "load.json"
    line = "text_load --drafters ngram lookahead --loads 1 3 --rounds 2 --tokens 12 --threads 1"
    monkeypatch.setattr(sys, "argv", [*line.split(), "--json", str(written)])
    assert text_load.main() == 0
    torch.set_num_threads(before)
    cells = json.loads(written.read_text())["cells"]
    assert [(c["load"], c["drafter"]) for c in cells] == [
        (load, name) for load in (1, 3) for name in ("ngram", "lookahead")
    ]
    for cell in cells:
        assert cell["per_step"]["none"] == 1.0 and cell["drafted"]["none"] == 0.0
        assert 0 < cell["to_better"] <= cell["aware"] + 1e-9
    assert cells[1]["drafted"]["always"] > 0
