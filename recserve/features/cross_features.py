"""Features of a user and a candidate together, for many candidates at once.

Candidates belong to contexts: what a user had seen at one moment. Serving has one context for all
candidates of a request; training has one per positive. Cost is a few passes over the candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recserve.features.ranking_tables import RankingTables

CROSS_COLUMNS = (
    "log_count",
    "cooccurrence",
    "cooccurrence_last",
    "cooccurrence_users",
    "similarity_last",
    "similarity_recent",
    "similarity_all",
    "similarity_best",
    "category_cosine",
    "category_cosine_recent",
    "category_share",
    "repeats",
    "repeat_recency",
    "history_length",
    "mean_value",
    "user_mean_value",
)
NUM_EVENTS = 50
NUM_RECENT = 5
NUM_LINKED = 10
DECAY = 0.8
SHRINKAGE = 5.0


@dataclass(frozen=True)
class Contexts:
    """What C users (or one user at C moments) had seen.

    rows [C, 50] int64: item rows, the latest first, -1 where there are no more. values [C, 50]
    float32: values of these events. lengths [C]: all events seen.
    """

    rows: np.ndarray
    values: np.ndarray
    lengths: np.ndarray

    @staticmethod
    def of(rows: np.ndarray, values: np.ndarray, lengths: np.ndarray) -> Contexts:
        """The first `lengths[c]` events of a history, for each c. rows, values: [n], in order."""
        index = lengths[:, None] - 1 - np.arange(NUM_EVENTS)
        there = index >= 0
        if not rows.size:
            return Contexts(np.where(there, 0, -1), np.zeros(there.shape, np.float32), lengths)
        index = index.clip(min=0)
        return Contexts(
            np.where(there, rows[index], -1).astype(np.int64),
            np.where(there, values[index], 0).astype(np.float32),
            lengths,
        )

    @staticmethod
    def cat(parts: list[Contexts]) -> Contexts:
        """Contexts of several users, in order."""
        return Contexts(
            np.concatenate([p.rows for p in parts]),
            np.concatenate([p.values for p in parts]),
            np.concatenate([p.lengths for p in parts]),
        )


def cross_features(
    tables: RankingTables,
    contexts: Contexts,
    owners: np.ndarray,
    rows: np.ndarray,
    own_values: np.ndarray | None = None,
) -> np.ndarray:
    """[M, len(CROSS_COLUMNS)] float32.

    owners [M]: context of each candidate, ascending. rows [M]: its item row.
    own_values [M], in training only: the value of the candidate's own event where the tables
    counted it, NaN where they did not; its contribution is taken back. Serving never passes it.
    """
    counted = np.zeros(rows.size, bool) if own_values is None else ~np.isnan(own_values)
    seen = contexts.rows >= 0
    history = np.where(seen, contexts.rows, 0)
    counts = tables.item_counts[rows] - counted
    groups = [
        np.log1p(counts)[:, None],
        _cooccurrence(tables, history, seen, owners, rows, counts, counted),
        _similarity(tables, history, seen, owners, rows),
        _categories(tables, history, seen, owners, rows),
        _repeats(tables, history, seen, owners, rows),
        np.log1p(contexts.lengths)[owners, None],
        _values(tables, contexts, seen, owners, rows, counts, own_values),
    ]
    return np.concatenate(groups, axis=1, dtype=np.float32)


def _cooccurrence(
    tables: RankingTables,
    history: np.ndarray,
    seen: np.ndarray,
    owners: np.ndarray,
    rows: np.ndarray,
    counts: np.ndarray,
    counted: np.ndarray,
) -> np.ndarray:
    """[M, 3]: decayed cosine with the last ten items, with the last one, log of common users."""
    context, rank = np.nonzero(seen[:, :NUM_LINKED])
    items = history[context, rank]
    starts = tables.neighbour_offsets[items]
    lengths = tables.neighbour_offsets[items + 1] - starts
    link = np.repeat(np.arange(items.size), lengths)
    place = np.arange(link.size) - np.repeat(np.cumsum(lengths) - lengths, lengths) + starts[link]
    keys, where = np.unique(
        context[link] * tables.num_items + tables.neighbours[place], return_inverse=True
    )
    if not keys.size:
        return np.zeros((rows.size, 3))
    users = tables.neighbour_counts[place]
    scale = 1 / np.sqrt(np.maximum(tables.item_counts[items], 1))[link]
    weights = np.stack([scale * DECAY ** rank[link], scale * (rank[link] == 0), np.ones(link.size)])
    wanted = owners * tables.num_items + rows
    at = np.searchsorted(keys, wanted).clip(max=keys.size - 1)
    hit = keys[at] == wanted
    columns = []
    for weight in weights:
        total = np.bincount(where, weight * users, keys.size)[at]
        if counted.any():
            total = total - counted * np.bincount(where, weight, keys.size)[at]
        columns.append(np.where(hit, total.clip(min=0), 0))
    norm = np.sqrt(np.maximum(counts, 1))
    return np.stack([columns[0] / norm, columns[1] / norm, np.log1p(columns[2])], 1)


def _similarity(
    tables: RankingTables,
    history: np.ndarray,
    seen: np.ndarray,
    owners: np.ndarray,
    rows: np.ndarray,
) -> np.ndarray:
    """[M, 4]: cosine of the vectors with the last item, the last five, all, the best of ten."""
    past = tables.vectors[history] * seen[..., None]
    means = [past[:, :NUM_RECENT].sum(1), past.sum(1)]
    means = [m / np.maximum(np.linalg.norm(m, axis=1, keepdims=True), 1e-6) for m in means]
    queries = np.concatenate([np.stack(means, 1), past[:, :NUM_LINKED]], 1)
    products = _per_context(tables.vectors[rows], queries, owners)
    return np.stack(
        [products[:, 2], products[:, 0], products[:, 1], products[:, 2:].max(1)], axis=1
    )


def _per_context(candidates: np.ndarray, queries: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Products of each candidate [M, D] with the queries [C, Q, D] of its context -> [M, Q]."""
    num_contexts = queries.shape[0]
    sizes = np.bincount(owners, minlength=num_contexts)
    if (sizes == sizes[0]).all():
        blocks = candidates.reshape(num_contexts, sizes[0], -1) @ queries.transpose(0, 2, 1)
        return np.asarray(blocks.reshape(candidates.shape[0], -1))
    ends = np.cumsum(sizes)
    return np.concatenate(
        [candidates[e - n : e] @ q.T for n, e, q in zip(sizes, ends, queries, strict=True)]
    )


def _categories(
    tables: RankingTables,
    history: np.ndarray,
    seen: np.ndarray,
    owners: np.ndarray,
    rows: np.ndarray,
) -> np.ndarray:
    """[M, 3]: cosine in category space with all and with five events, share of the rarest one."""
    weights = tables.category_weights
    size, num_contexts = weights.size, history.shape[0]
    found = tables.categories[history]
    keys = (np.arange(num_contexts)[:, None, None] * size + found).reshape(num_contexts, -1)
    width = found.shape[2]
    present = np.repeat(seen, width, axis=1)

    def tally(events: int) -> np.ndarray:
        part = keys[:, : events * width]
        total = np.bincount(part.ravel(), present[:, : events * width].ravel(), num_contexts * size)
        return total.reshape(num_contexts, size)

    mine = tables.categories[rows]
    length = np.sqrt((weights**2).take(mine).sum(1))
    place = owners[:, None] * size + mine
    columns = []
    everything = tally(history.shape[1])
    for total in (everything, tally(NUM_RECENT)):
        weighted = total * weights
        norm = np.sqrt((weighted**2).sum(1))[owners] * length
        inner = (weighted * weights).take(place).sum(1)
        columns.append(inner / np.maximum(norm, 1e-6))
    share = everything.take(place[:, 0]) / np.maximum(seen.sum(1), 1)[owners]
    known = mine[:, 0] < size - 1
    return np.stack([*columns, share * known], 1)


def _repeats(
    tables: RankingTables,
    history: np.ndarray,
    seen: np.ndarray,
    owners: np.ndarray,
    rows: np.ndarray,
) -> np.ndarray:
    """[M, 2]: log of how often the candidate is in the history, 1 / (1 + its recency rank)."""
    context, rank = np.nonzero(seen)
    keys = context * tables.num_items + history[context, rank]
    if not keys.size:
        return np.zeros((rows.size, 2))
    order = np.argsort(keys, kind="stable")
    keys, rank = keys[order], rank[order]
    wanted = owners * tables.num_items + rows
    first = np.searchsorted(keys, wanted)
    times = np.searchsorted(keys, wanted, side="right") - first
    latest = rank[first.clip(max=keys.size - 1)]
    return np.stack([np.log1p(times), (times > 0) / (1 + latest)], 1)


def _values(
    tables: RankingTables,
    contexts: Contexts,
    seen: np.ndarray,
    owners: np.ndarray,
    rows: np.ndarray,
    counts: np.ndarray,
    own_values: np.ndarray | None,
) -> np.ndarray:
    """[M, 2]: mean value of the item and of the user's events, relative to the mean and shrunk."""
    if not tables.settings.has_values:
        return np.zeros((rows.size, 2))
    mean = tables.settings.mean_value
    sums = tables.value_sums[rows] - (0 if own_values is None else np.nan_to_num(own_values))
    item = (sums - mean * counts) / (counts + SHRINKAGE)
    number = seen.sum(1)
    user = (contexts.values.sum(1) - mean * number) / (number + SHRINKAGE)
    return np.stack([item, user[owners]], 1)
