"""Vectorised ranking metrics: recall and NDCG of one held-out item per user, AUC and GAUC."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recserve.features.tables.mapped_arrays import blocks

NOT_FOUND = np.iinfo(np.int64).max

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def ranks_of(rows: ArrayLike, held: ArrayLike) -> Ints:
    """Returns the rank of each held-out item in its slate.

    Args:
        rows: [n, k] item rows, best first, -1 after the end of a shorter slate.
        held: [n] held-out item rows, none negative.

    Returns:
        [n] int64 ranks. 0 is the top; NOT_FOUND means that the slate lacks the item.

    Raises:
        ValueError: If a held-out item is negative.
    """
    rows, held = np.asarray(rows), np.asarray(held)
    if held.size and held.min() < 0:
        raise ValueError("a held-out item is -1; leave users without one out of the evaluation")
    ranks = np.full(held.shape[0], NOT_FOUND, dtype=np.int64)
    for part in blocks(len(held) if rows.shape[1] else 0):
        hits = rows[part] == held[part, None]
        ranks[part] = np.where(hits.any(axis=1), hits.argmax(axis=1), NOT_FOUND)
    return ranks


def user_metrics(ranks: ArrayLike, cutoffs: Sequence[int]) -> dict[str, Floats]:
    """Returns `recall@k` and `ndcg@k` of each user for each cut-off.

    With one relevant item, recall is 1 or 0, and NDCG is 1 / log2(rank + 2), or 0 for an item
    beyond the first k.

    Args:
        ranks: [n] ranks of `ranks_of`.
        cutoffs: Cut-offs of the metrics.

    Returns:
        [n] float64 values by name.
    """
    ranks = np.asarray(ranks)
    values: dict[str, Floats] = {}
    for k in cutoffs:
        within = ranks < k
        values[f"recall@{k}"] = within.astype(np.float64)
        values[f"ndcg@{k}"] = np.where(within, 1 / np.log2(np.where(within, ranks, 0) + 2), 0.0)
    return values


def slate_metrics(ranks: ArrayLike, cutoffs: Sequence[int]) -> dict[str, float]:
    """Returns the means of `user_metrics` over users.

    Raises:
        ValueError: If there are no users.
    """
    if not np.asarray(ranks).size:
        raise ValueError("no user has a held-out item; events need at least three per user")
    return {name: float(values.mean()) for name, values in user_metrics(ranks, cutoffs).items()}


def auc(labels: ArrayLike, scores: ArrayLike) -> float:
    """Returns the probability that a positive outscores a negative.

    A tie counts half. The result is NaN unless both classes occur.

    Args:
        labels: [n] labels.
        scores: [n] scores.
    """
    labels = np.asarray(labels)
    areas, _ = _group_auc(labels, scores, np.zeros(labels.shape[0], dtype=np.int64))
    return float(areas[0]) if areas.size else float("nan")


def gauc(labels: ArrayLike, scores: ArrayLike, groups: ArrayLike) -> float:
    """Returns the mean AUC of the groups, weighted by group size.

    Groups with only one class are left out. The result is NaN if no group has both.

    Args:
        labels: [n] labels.
        scores: [n] scores.
        groups: [n] group of each row, for example its user.

    Source: Zhu et al. 2017, arXiv 1703.02091.
    """
    areas, sizes = _group_auc(labels, scores, groups)
    return float(np.average(areas, weights=sizes)) if areas.size else float("nan")


def _group_auc(labels: ArrayLike, scores: ArrayLike, groups: ArrayLike) -> tuple[Floats, Ints]:
    """Returns the AUC and the size of each group that has both classes.

    The AUC comes from the rank sum of the group's positives (Mann-Whitney U).
    """
    labels, scores = np.asarray(labels).astype(bool), np.asarray(scores, dtype=np.float64)
    _, groups = np.unique(np.asarray(groups), return_inverse=True)
    order = np.lexsort((scores, groups))
    labels, scores, groups = labels[order], scores[order], groups[order]
    sizes = np.bincount(groups)
    if not sizes.size:
        return np.zeros(0), np.zeros(0, dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    place = np.arange(labels.shape[0]) - starts[groups] + 1.0  # ranks within the group, from 1
    tie = np.ones(labels.shape[0], dtype=bool)  # True where a new score begins
    tie[1:] = (scores[1:] != scores[:-1]) | (groups[1:] != groups[:-1])
    run = np.cumsum(tie) - 1
    place = (np.bincount(run, place) / np.bincount(run))[run]  # equal scores share their mean rank
    positives = np.bincount(groups, labels)
    negatives = sizes - positives
    both = (positives > 0) & (negatives > 0)
    above = np.bincount(groups, place * labels) - positives * (positives + 1) / 2
    return above[both] / (positives * negatives)[both], sizes[both]
