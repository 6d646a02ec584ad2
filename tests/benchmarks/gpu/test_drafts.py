"""gpu/drafts.py at tiny sizes on a CPU: synthetic drafts are accepted at the rate they claim."""

import json

import numpy as np
import pytest

from benchmarks.gpu import drafts
from recserve.speculation.draft import Budget
from recserve.speculation.drafter import TextContext
from recserve.speculation.drafters.rank_tree import best_tree
from recserve.speculation.sampling_params import SamplingParams, Speculation
from tests.support.token_paths import mean_accept_length
from tests.support.walking_model import walk

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("rate", [0.0, 0.6])
def test_a_synthetic_draft_is_right_at_its_rate(rate):
    tree = best_tree(drafts.accuracies(rate or 0.5), 20)
    drafter = drafts.SyntheticDrafter(1500, rate, tree)
    lengths = []
    for seed in range(3000):
        context = TextContext(seed, [5], 1, SamplingParams(seed=seed), Speculation("synthetic"))
        (draft,) = drafter.propose([context], [Budget(64, 16)])
        node, token, length = -1, 5, 0
        nodes = list(zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True))
        assert len(nodes) == len(set(nodes)) == 20
        while (node, walk(token, 1500)) in nodes:
            token = walk(token, 1500)
            node, length = nodes.index((node, token)), length + 1
        lengths.append(length)
    expected = mean_accept_length(tree, drafts.accuracies(rate))
    error = np.std(lengths) / len(lengths) ** 0.5
    assert abs(np.mean(lengths) - expected) <= 4 * error


def test_every_drafter_is_measured(tmp_path, capsys):
    path = tmp_path / "drafts.json"
    assert drafts.main(["--device", "cpu", "--smoke", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
    names = {row["drafter"] for row in rows}
    assert {"none", "medusa", "eagle", "eagle3", "specformer"} < names
    for row in rows:
        assert row["step_ms"] > 0 and row["ratio"] > 0
        if "expected_tokens_per_step" in row:
            assert 0.5 < row["tokens_per_step"] / row["expected_tokens_per_step"] < 1.5
        elif row["drafter"] == "none" or "beside" in row["drafter"]:
            assert row["tokens_per_step"] == 1.0
    beside = {row["drafter"]: row["drafted_per_step"] for row in rows if row["batch"] == 1}
    assert beside["specformer"] == pytest.approx(beside["24 nodes beside specformer"], rel=0.2)


def test_no_device_is_said(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert drafts.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
