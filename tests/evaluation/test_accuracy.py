from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.metrics import ndcg_score, roc_auc_score

from recserve.evaluation.accuracy import (
    NOT_FOUND,
    auc,
    gauc,
    ranks_of,
    slate_metrics,
    user_metrics,
)


def test_slate_by_hand() -> None:
    """Held items at place 0, place 2 and nowhere."""
    rows = np.array([[7, 1, 2], [1, 2, 7], [1, 2, -1]])
    ranks = ranks_of(rows, np.array([7, 7, 7]))
    assert ranks.tolist() == [0, 2, NOT_FOUND]
    values = user_metrics(ranks, (1, 2, 3))
    assert values["recall@1"].tolist() == [1, 0, 0]
    assert values["recall@3"].tolist() == [1, 1, 0]
    assert values["ndcg@3"] == pytest.approx([1, 1 / math.log2(4), 0])
    assert values["ndcg@2"].tolist() == [1, 0, 0]
    assert slate_metrics(ranks, (3,))["ndcg@3"] == pytest.approx((1 + 1 / math.log2(4)) / 3)


def test_empty_slates_find_nothing_and_no_users_is_an_error() -> None:
    ranks = ranks_of(np.zeros((2, 0)), np.array([1, 2]))
    assert slate_metrics(ranks, (10,)) == {"recall@10": 0, "ndcg@10": 0}
    with pytest.raises(ValueError, match="no user has a held-out item"):
        slate_metrics(np.zeros(0), (10,))
    with pytest.raises(ValueError, match="held-out item is -1"):
        ranks_of(np.array([[-1]]), np.array([-1]))


def test_ndcg_is_that_of_scikit_learn() -> None:
    noise = np.random.default_rng(0)
    scores = noise.normal(size=(200, 30))
    held = noise.integers(0, 30, 200)
    ranks = ranks_of(np.argsort(-scores, axis=1), held)
    relevant = np.eye(30)[held]
    found = slate_metrics(ranks, (5, 10))
    assert found["ndcg@10"] == pytest.approx(ndcg_score(relevant, scores, k=10))
    assert set(found) == {"recall@5", "ndcg@5", "recall@10", "ndcg@10"}


def test_auc_is_that_of_scikit_learn_with_ties() -> None:
    noise = np.random.default_rng(1)
    labels = noise.integers(0, 2, 500)
    scores = noise.integers(0, 7, 500) + labels
    assert auc(labels, scores) == pytest.approx(roc_auc_score(labels, scores))
    assert math.isnan(auc(np.ones(3), np.arange(3)))
    assert math.isnan(auc(np.zeros(0), np.zeros(0)))


def test_gauc_weighs_groups_by_size_and_leaves_single_class_groups_out() -> None:
    noise = np.random.default_rng(2)
    groups = noise.integers(0, 40, 600) * 3
    labels = noise.integers(0, 2, 600)
    labels[groups == 0] = 1
    scores = noise.integers(0, 5, 600) + labels * noise.integers(0, 2, 600)
    total, weight = 0.0, 0
    for group in np.unique(groups):
        inside = groups == group
        if 0 < labels[inside].sum() < inside.sum():
            total += roc_auc_score(labels[inside], scores[inside]) * inside.sum()
            weight += inside.sum()
    assert gauc(labels, scores, groups) == pytest.approx(total / weight)
    assert weight < 600
