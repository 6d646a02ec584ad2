"""Computes cross features of users and candidates, for many candidates at once.

A candidate belongs to a context: what a user had seen at one moment. Serving has one context for
all candidates of a request, training has one per positive. The cost is a few passes over the
candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recserve.features.ranking.ranking_tables import RankingTables

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
    """What C users, or one user at C moments, had seen.

    Attributes:
        rows: [C, 50] int64 item rows, latest first, -1 for padding.
        values: [C, 50] float32 values of these events.
        lengths: [C] number of all events seen.
    """

    rows: np.ndarray
    values: np.ndarray
    lengths: np.ndarray

    @staticmethod
    def of(rows: np.ndarray, values: np.ndarray, lengths: np.ndarray) -> Contexts:
        """Returns contexts that see the first `lengths[c]` events of a history.

        Args:
            rows: [n] item rows of the history, oldest first.
            values: [n] values of these events.
            lengths: [C] number of events that each context sees.
        """
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
        """Concatenates the contexts of several users."""
        return Contexts(
            np.concatenate([p.rows for p in parts]),
            np.concatenate([p.values for p in parts]),
            np.concatenate([p.lengths for p in parts]),
        )


@dataclass(frozen=True)
class UserSide:
    """Features of C contexts that do not depend on the candidates, computed once per user.

    Attributes:
        latest: [C, 50] int64 item rows, latest first, 0 for padding.
        seen: [C, 50] bool, False for padding.
        linked: [K] int64 ascending keys `context * I + neighbour` of the last ten items'
            neighbours.
        link_sums: [3, K] weighted numbers of common users.
        link_weights: [3, K] sums of the weights alone.
        queries: [C, 12, D] mean vector of the last five items, mean of all, and the last ten
            vectors.
        tallies: [2, C, G+1] category counts of all events and of five, with squared weights.
        tally_norms: [2, C] lengths of the weighted category counts.
        shares: [C, G+1] share of the events in each category.
        repeated: [R] int64 ascending keys `context * I + row` of seen items, latest first per key.
        ranks: [R] number of events since each entry of `repeated`.
        known: [C, 2] log number of events seen, and mean value.
    """

    latest: np.ndarray
    seen: np.ndarray
    linked: np.ndarray
    link_sums: np.ndarray
    link_weights: np.ndarray
    queries: np.ndarray
    tallies: np.ndarray
    tally_norms: np.ndarray
    shares: np.ndarray
    repeated: np.ndarray
    ranks: np.ndarray
    known: np.ndarray

    @staticmethod
    def of(tables: RankingTables, contexts: Contexts) -> UserSide:
        """Computes the user's side of the features."""
        seen = contexts.rows >= 0
        latest = np.where(seen, contexts.rows, 0)
        return UserSide(
            latest,
            seen,
            *_links(tables, latest, seen),
            _queries(tables, latest, seen),
            *_tallies(tables, latest, seen),
            *_find_repeats(tables, latest, seen),
            _count_known(tables, contexts, seen),
        )


def cross_features(
    tables: RankingTables,
    user: UserSide,
    owners: np.ndarray,
    rows: np.ndarray,
    own_values: np.ndarray | None = None,
) -> np.ndarray:
    """Returns the features of each candidate.

    Args:
        tables: Tables of the catalogue version.
        user: The user's side of C contexts.
        owners: [M] ascending context of each candidate.
        rows: [M] item row of each candidate.
        own_values: [M] value of the candidate's own training event, NaN if the tables did not count
            it. The event's contribution is subtracted. None when serving.

    Returns:
        [M, len(CROSS_COLUMNS)] float32.
    """
    counts = tables.item_counts[rows]
    if own_values is not None:
        counts = counts - ~np.isnan(own_values)
    wanted = owners * tables.num_items + tables.fitted_rows(rows)
    out = np.empty((rows.size, len(CROSS_COLUMNS)), np.float32)
    out[:, 0] = np.log1p(counts)
    out[:, 1:4] = _cooccurrence(user, wanted, counts, own_values)
    products = _per_context(tables.vectors[rows], user.queries, owners)
    out[:, 4] = products[:, 2]
    out[:, 5:7] = products[:, :2]
    out[:, 7] = products[:, 2:].max(1)
    out[:, 8:11] = _categories(tables, user, owners, rows)
    out[:, 11:13] = _repeats(user, wanted)
    out[:, 13] = user.known[owners, 0]
    out[:, 14:] = 0
    if tables.settings.has_values:
        mean = tables.settings.mean_value
        sums = tables.value_sums[rows] - (0 if own_values is None else np.nan_to_num(own_values))
        out[:, 14] = (sums - mean * counts) / (counts + SHRINKAGE)
        out[:, 15] = user.known[owners, 1]
    return out


def _links(
    tables: RankingTables, latest: np.ndarray, seen: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns keys, sums and weights of the neighbours of the last ten items.

    The three weights are the decayed cosine, the cosine of the last item alone, and one.
    """
    context, rank = np.nonzero(seen[:, :NUM_LINKED])
    items = tables.fitted_rows(latest[context, rank])
    starts, lengths = tables.neighbour_ranges(items)
    link = np.repeat(np.arange(items.size), lengths)
    # `link` is the item of each neighbour; `place` runs through each item's neighbours.
    place = np.arange(link.size) - np.repeat(np.cumsum(lengths) - lengths, lengths) + starts[link]
    keys, where = np.unique(
        context[link] * tables.num_items + tables.neighbours[place], return_inverse=True
    )
    users = tables.neighbour_counts[place]
    scale = 1 / np.sqrt(np.maximum(tables.item_counts[items], 1))[link]
    weights = [scale * DECAY ** rank[link], scale * (rank[link] == 0), np.ones(link.size)]
    sums = np.stack([np.bincount(where, weight * users, keys.size) for weight in weights])
    return keys, sums, np.stack([np.bincount(where, weight, keys.size) for weight in weights])


def _cooccurrence(
    user: UserSide, wanted: np.ndarray, counts: np.ndarray, own_values: np.ndarray | None
) -> np.ndarray:
    """Returns [M, 3]: decayed cosine with ten items, with the last item, log of common users."""
    if not user.linked.size:
        return np.zeros((wanted.size, 3))
    at = np.searchsorted(user.linked, wanted).clip(max=user.linked.size - 1)
    total = user.link_sums[:, at]
    if own_values is not None:
        total = (total - ~np.isnan(own_values) * user.link_weights[:, at]).clip(min=0)
    total *= user.linked[at] == wanted
    total[:2] /= np.sqrt(np.maximum(counts, 1))
    total[2] = np.log1p(total[2])
    return np.asarray(total.T)


def _queries(tables: RankingTables, latest: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Returns [C, 12, D]: mean directions of five events and of all, then the last ten items."""
    past = tables.vectors[latest] * seen[..., None]
    means = np.stack([past[:, :NUM_RECENT].sum(1), past.sum(1)], 1)
    means /= np.maximum(np.linalg.norm(means, axis=2, keepdims=True), 1e-6)
    return np.concatenate([means, past[:, :NUM_LINKED]], 1)


def _per_context(candidates: np.ndarray, queries: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Multiplies candidates [M, D] with the queries [C, Q, D] of their contexts, giving [M, Q]."""
    num_contexts = queries.shape[0]
    sizes = np.bincount(owners, minlength=num_contexts)
    if (sizes == sizes[0]).all():  # one batched product
        blocks = candidates.reshape(num_contexts, sizes[0], -1) @ queries.transpose(0, 2, 1)
        return np.asarray(blocks.reshape(candidates.shape[0], -1))
    ends = np.cumsum(sizes)
    return np.concatenate(
        [candidates[e - n : e] @ q.T for n, e, q in zip(sizes, ends, queries, strict=True)]
    )


def _tallies(
    tables: RankingTables, latest: np.ndarray, seen: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counts the categories of all events and of the last five.

    Returns the squared-weighted counts, the norms of the weighted counts, and plain shares.
    """
    weights = tables.category_weights
    size, num_contexts = weights.size, latest.shape[0]
    found = tables.categories[latest]
    width = found.shape[2]
    keys = (np.arange(num_contexts)[:, None, None] * size + found).reshape(num_contexts, -1)
    present = np.repeat(seen, width, axis=1)
    plain = np.empty((2, num_contexts, size))
    for place, events in enumerate((latest.shape[1], NUM_RECENT)):
        part, there = keys[:, : events * width].ravel(), present[:, : events * width].ravel()
        plain[place] = np.bincount(part, there, num_contexts * size).reshape(num_contexts, size)
    weighted = plain * weights
    shares = plain[0] / np.maximum(seen.sum(1), 1)[:, None]
    shares[:, -1] = 0
    return weighted * weights, np.sqrt((weighted**2).sum(2)), shares


def _categories(
    tables: RankingTables, user: UserSide, owners: np.ndarray, rows: np.ndarray
) -> np.ndarray:
    """Returns [M, 3]: category cosine with all and with five events, share of the rarest one."""
    mine = tables.categories[rows]
    length = np.sqrt((tables.category_weights**2).take(mine).sum(1))
    place = owners[:, None] * tables.category_weights.size + mine
    out = np.empty((rows.size, 3))
    for column, (tally, norm) in enumerate(zip(user.tallies, user.tally_norms, strict=True)):
        out[:, column] = tally.take(place).sum(1) / np.maximum(norm[owners] * length, 1e-6)
    out[:, 2] = user.shares.take(place[:, 0])
    return out


def _find_repeats(
    tables: RankingTables, latest: np.ndarray, seen: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ascending keys of the items seen, and how many events ago each was seen."""
    context, rank = np.nonzero(seen)
    keys = context * tables.num_items + tables.fitted_rows(latest[context, rank])
    order = np.argsort(keys, kind="stable")
    return keys[order], rank[order]


def _repeats(user: UserSide, wanted: np.ndarray) -> np.ndarray:
    """Returns [M, 2]: log of how often the item was seen, and 1 / (1 + events since then)."""
    if not user.repeated.size:
        return np.zeros((wanted.size, 2))
    first = np.searchsorted(user.repeated, wanted)
    times = np.searchsorted(user.repeated, wanted, side="right") - first
    latest = user.ranks[first.clip(max=user.ranks.size - 1)]
    return np.stack([np.log1p(times), (times > 0) / (1 + latest)], 1)


def _count_known(tables: RankingTables, contexts: Contexts, seen: np.ndarray) -> np.ndarray:
    """Returns [C, 2]: log number of events seen, and the shrunken deviation of the mean value."""
    number, mean = seen.sum(1), tables.settings.mean_value
    value = (contexts.values.sum(1) - mean * number) / (number + SHRINKAGE)
    return np.stack([np.log1p(contexts.lengths), value], 1)
