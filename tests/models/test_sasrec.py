from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from recserve.evaluation.cases import Cases
from recserve.evaluation.slates import sasrec_slates
from recserve.models.sasrec import SasRec, SasRecConfig, load_sasrec, save_sasrec
from recserve.training.recommender.sasrec import _seen_pairs

VECTORS = torch.randn(9, 5, generator=torch.Generator().manual_seed(3))


def build(**values: object) -> SasRec:
    torch.manual_seed(0)
    model = SasRec(SasRecConfig(9, 16, dropout=0.0, max_history_items=4, **values))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.bind_vectors(VECTORS)
    return model.eval()


@pytest.mark.parametrize("with_vectors", [False, True], ids=["plain", "vectors"])
def test_state_does_not_see_what_comes_later(with_vectors: bool) -> None:
    model = build(vector_dim=5 if with_vectors else 0, cosine=with_vectors)
    with torch.no_grad():
        one, two = model(torch.tensor([[1, 2, 3, 4], [1, 2, 8, 0]]))
        torch.testing.assert_close(one[:2], two[:2])
        assert not torch.allclose(one[2], two[2])
        assert model.scores(one).shape == (4, 9)


def test_cosine_scores_are_bounded_by_the_scale() -> None:
    model = build(vector_dim=5, cosine=True)
    with torch.no_grad():
        model.scale.fill_(3.0)
        scores = model.scores(torch.randn(50, 16))
    assert scores.abs().max() <= 3.0001
    item = F.normalize(model.ids.weight + model.projection(model.vectors), dim=-1)
    torch.testing.assert_close(model.keys(), item)


def test_the_input_scale_belongs_to_the_input_alone() -> None:
    """Twice the scale is twice the table where items are read, and nothing where they score."""
    rows = torch.tensor([[1, 2, 3, 4]])
    scaled, doubled = build(input_scale=2.0), build()
    with torch.no_grad():
        torch.testing.assert_close(scaled.keys(), doubled.keys())
        unscaled = doubled(rows)
        doubled.ids.weight.mul_(2)
        torch.testing.assert_close(scaled(rows), doubled(rows))
        assert not torch.allclose(scaled(rows), unscaled)


def test_a_model_of_before_the_input_scale_opens(tmp_path: Path) -> None:
    model = build()
    save_sasrec(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["input_scale"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        torch.testing.assert_close(load_sasrec(tmp_path)(rows), model(rows))


def test_slates_read_the_latest_items_and_filter_the_whole_history() -> None:
    """Six events, four positions: the state is of the last four, the filter of all six."""
    model = build()
    rows = np.array([5, 0, 1, 2, 3, 4])
    cases = Cases(rows, np.array([0]), np.array([6]), np.array([7]), np.array([0]))
    kept = sasrec_slates(model, cases, np.array([0]), 9, False)
    filtered = sasrec_slates(model, cases, np.array([0]), 3, True)
    with torch.no_grad():
        scores = model.scores(model(torch.tensor([[1, 2, 3, 4]]))[:, -1])[0]
    assert kept[0].tolist() == scores.argsort(descending=True).tolist()
    assert filtered[0].tolist() == [row for row in kept[0] if row not in rows]


def test_seen_pairs_are_the_history_without_the_target() -> None:
    """History 4, 6, 4, 2: after 4 and 6 comes 4 again, which stays in the softmax."""
    rows = torch.tensor([[4, 6, 4, 2]])
    step = torch.tensor([0, 1, 2])
    pairs = _seen_pairs(rows, torch.zeros(3, dtype=torch.int64), step, rows[0, 1:])
    assert {tuple(pair) for pair in pairs.tolist()} == {(0, 4), (1, 6), (2, 4), (2, 6)}


def test_saved_model_scores_the_same(tmp_path: Path) -> None:
    model = build(vector_dim=5, cosine=True)
    save_sasrec(model, tmp_path)
    loaded = load_sasrec(tmp_path, VECTORS)
    rows = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        torch.testing.assert_close(loaded.scores(loaded(rows)), model.scores(model(rows)))
    with pytest.raises(ValueError, match=r"vectors are None; this model needs \(9, 5\)"):
        load_sasrec(tmp_path)
    (tmp_path / "config.json").write_text('{"num_items": 8}')
    with pytest.raises(ValueError, match=r"model\.safetensors does not fit"):
        load_sasrec(tmp_path)


def test_config_refuses() -> None:
    with pytest.raises(ValueError, match="hidden_size is 15, not a multiple"):
        SasRecConfig(9, 15)
    with pytest.raises(ValueError, match="num_items is 0"):
        SasRecConfig(0)
