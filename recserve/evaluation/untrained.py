"""Baselines without training: popularity, item-kNN, and a graph of transitions.

They read training events only. Each makes [n, k] slates for any cases, like the models. Equal
counts and equal sums of similarities rank by popularity over all training events, then by row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from scipy import sparse
from torch import Tensor

from recserve.evaluation.cases import Cases
from recserve.features.tables.events import EventLog

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
SlateMaker = Callable[[Ints, bool], Ints]

MICROSECONDS_PER_WEEK = 7 * 24 * 3600 * 10**6
# Scores that are closer than this count as equal.
EQUAL_SCORES = 1e-9
# Entries of a [n, I] matrix at one time: 256 MB as float64.
MAX_ENTRIES = 2**25
NEIGHBOURS = 100
RECENCY = 0.9
KNN_HISTORY = 100
EDGE_BONUS = 0.5


class UnsuitableEvents(ValueError):
    """The events lack what a baseline reads."""


@dataclass(frozen=True)
class TrainingData:
    """What untrained baselines read.

    Attributes:
        train: Training events.
        vectors: [I, F] item vectors.
        cases: The cases to make slates for.
        held_times: [n] time of each held-out event.
        k: Number of items in a slate.
    """

    train: EventLog
    vectors: NDArray[np.float32]
    cases: Cases
    held_times: Ints
    k: int

    @property
    def num_items(self) -> int:
        """I, the number of items."""
        return len(self.vectors)

    @property
    def batch(self) -> int:
        """Number of cases whose scores fit into MAX_ENTRIES."""
        return max(1, min(256, MAX_ENTRIES // max(self.num_items, (6 * self.k) ** 2)))

    @cached_property
    def places(self) -> Ints:
        """[I] place of each item in the order of popularity, from 0."""
        order = np.argsort(-self.train.popularity(self.num_items), kind="stable")
        places = np.empty(self.num_items, dtype=np.int64)
        places[order] = np.arange(self.num_items)
        return places

    @cached_property
    def ties(self) -> Floats:
        """[I] terms that order items of equal scores by popularity."""
        return -EQUAL_SCORES * self.places / self.num_items

    def best(self, scores: Floats, which: Ints, filtered: bool) -> Ints:
        """Returns [n, k] item rows of the best scores [n, I], which are overwritten.

        Items of the score -inf, and of the history if `filtered`, are -1.
        """
        scores += self.ties
        if filtered:
            hide(torch.from_numpy(scores), self.cases.histories(which))
        return top_rows(torch.from_numpy(scores), self.k)


def hide(scores: Tensor, rows: Ints) -> None:
    """Sets the scores [n, I] of item rows [n, m] to -inf; row -1 means none."""
    case, place = (rows >= 0).nonzero()
    scores[torch.from_numpy(case), torch.from_numpy(rows[case, place])] = -torch.inf


def top_rows(scores: Tensor, k: int) -> Ints:
    """Returns [n, k] item rows of the best scores [n, I], -1 where only -inf is left."""
    values, rows = scores.topk(min(k, scores.shape[1]), dim=1)
    rows[values == -torch.inf] = -1
    found = np.full((len(scores), k), -1, dtype=np.int64)
    found[:, : rows.shape[1]] = rows.numpy()
    return found


def popularity(data: TrainingData) -> SlateMaker:
    """The most frequent items of the training events, the same for every user unless filtered."""

    def slates(which: Ints, filtered: bool) -> Ints:
        return data.best(np.zeros((len(which), data.num_items)), which, filtered)

    return slates


def popularity_of_the_week(data: TrainingData) -> SlateMaker:
    """The most frequent items of the seven days before each held-out event.

    If the training events end earlier, the seven days before their end count.

    Raises:
        UnsuitableEvents: If the events have no timestamps.
    """
    if not data.train.has_timestamps:
        raise UnsuitableEvents(
            "the events have positions and no timestamps, so there is no last week"
        )
    order = np.argsort(data.train.times, kind="stable")
    times, rows = data.train.times[order], data.train.item_rows[order]
    until = np.minimum(data.held_times, times[-1] + 1)
    stops = np.searchsorted(times, until)
    starts = np.searchsorted(times, until - MICROSECONDS_PER_WEEK)

    def slates(which: Ints, filtered: bool) -> Ints:
        scores = np.empty((len(which), data.num_items))
        for row, case in enumerate(which):
            week = rows[starts[case] : stops[case]]
            scores[row] = np.bincount(week, minlength=data.num_items)
        return data.best(scores, which, filtered)

    return slates


def item_knn(data: TrainingData) -> SlateMaker:
    """Items that the same users had: the cosine between two items' sets of users.

    An item has its 100 most similar items as neighbours. An item's score is the sum of its
    similarities to the latest 100 events of the history. The latest counts 1, each earlier one 0.9
    times the next.
    """
    neighbours = _neighbours(data)

    def slates(which: Ints, filtered: bool) -> Ints:
        histories = data.cases.histories(which, KNN_HISTORY)
        lengths = (histories >= 0).sum(axis=1)
        case, place = (histories >= 0).nonzero()
        weights = RECENCY ** (lengths[case] - 1 - place)
        shape = (len(which), data.num_items)
        latest = sparse.csr_array((weights, (case, histories[case, place])), shape=shape)
        return data.best((latest @ neighbours).toarray(), which, filtered)

    return slates


def _neighbours(data: TrainingData) -> sparse.csr_array:
    """Returns [I, I] similarities: in row i, those of item i's neighbours."""
    users, rows = data.train.user_indices(), data.train.item_rows
    had = sparse.csr_array(
        (np.ones(len(rows)), (users, rows)), shape=(data.train.num_users, data.num_items)
    )
    had.data[:] = 1.0  # an item counts once per user
    by_item = had.T.tocsr()
    counts = np.diff(by_item.indptr).astype(np.float64)
    size = max(1, MAX_ENTRIES // (4 * data.num_items))
    blocks = []
    console = Console(stderr=True)
    for first in track(
        range(0, data.num_items, size),
        "item-kNN, similarities",
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ):
        pairs = (by_item[first : first + size] @ had).tocoo()
        item, other = pairs.row, pairs.col
        similar = pairs.data / np.sqrt(counts[first + item] * counts[other])
        different = first + item != other
        item, other, similar = item[different], other[different], similar[different]
        order = np.lexsort((data.places[other], -similar, item))
        item, other, similar = item[order], other[order], similar[order]
        starts = np.searchsorted(item, item)  # where each item's neighbours begin
        near = np.arange(len(item)) - starts < NEIGHBOURS
        shape = (by_item[first : first + size].shape[0], data.num_items)
        blocks.append(sparse.csr_array((similar[near], (item[near], other[near])), shape=shape))
    return sparse.csr_array(sparse.vstack(blocks))


# For each start of a walk, counted from the end of the history: how many of ten places in a slate
# each ring around it gets. Ring h has the items that are h transitions away.
THREE_HOPS = ((7, 2, 1),)
TWO_HOPS = ((5, 1), (3, 1))


def transition_graph(starts: tuple[tuple[int, ...], ...]) -> Callable[[TrainingData], SlateMaker]:
    """The untrained graph of which item followed which in the training events.

    Candidates are the items a few transitions away from the last item, or the last two. In a ring
    they rank by the cosine of their item vectors with the start. The first ring adds
    0.5 log(1 + transitions), divided by its maximum. A ring with too few items leaves its places
    to the others, and then to the most similar items of the catalogue.

    Args:
        starts: TWO_HOPS or THREE_HOPS.

    Source: TGH-2 and TGH-1 of Han et al. 2026, arXiv 2605.07125, which uses vectors of a text
    encoder, and random items at last.
    """

    def build(data: TrainingData) -> SlateMaker:
        return _TransitionGraph(data, starts).slates

    return build


class _TransitionGraph:
    """Transitions between items, as a matrix, with the walks through it."""

    def __init__(self, data: TrainingData, starts: tuple[tuple[int, ...], ...]) -> None:
        self.data = data
        # Places of each ring; those of all rings are k together.
        ends = -(-np.cumsum([places for rings in starts for places in rings]) * data.k // 10)
        quotas = np.diff(ends, prepend=0).tolist()
        self.quotas = [[quotas.pop(0) for _ in rings] for rings in starts]
        users, rows = data.train.user_indices(), data.train.item_rows
        same = users[1:] == users[:-1]
        left, right = rows[:-1][same], rows[1:][same]
        shape = (data.num_items, data.num_items)
        counts = sparse.csr_array((np.ones(len(left)), (left, right)), shape=shape)
        self.bonus = counts.log1p()
        source = np.repeat(np.arange(data.num_items), np.diff(counts.indptr))
        most = np.zeros(data.num_items)
        np.maximum.at(most, source, self.bonus.data)
        self.bonus.data *= EDGE_BONUS / most[source]
        self.edges = counts
        self.edges.data[:] = 1.0
        norms = np.linalg.norm(data.vectors, axis=1, keepdims=True)
        self.vectors = torch.from_numpy(data.vectors / np.where(norms, norms, 1.0))

    def slates(self, which: Ints, filtered: bool) -> Ints:
        """Returns [n, k] item rows, best first."""
        data = self.data
        hidden = data.cases.histories(which) if filtered else np.full((len(which), 1), -1)
        latest = data.cases.histories(which, len(self.quotas))
        lengths = (latest >= 0).sum(axis=1)
        first: list[Ints] = []
        rest: list[Ints] = []
        for back, quotas in enumerate(self.quotas):
            there = lengths > back
            start = latest[np.arange(len(which)), np.where(there, lengths - 1 - back, 0)]
            scores = self.vectors[start] @ self.vectors.T
            hide(scores, np.concatenate([hidden, *first], axis=1))
            for quota, rows in zip(quotas, self._rings(start, scores, len(quotas)), strict=True):
                rows[~there] = -1
                first.append(rows[:, :quota])
                rest.append(rows[:, quota:])
        slates = _first_distinct(np.concatenate(first + rest, axis=1), data.k)
        short = np.flatnonzero(slates[:, -1] < 0)
        scores = self.vectors[latest[short, lengths[short] - 1]] @ self.vectors.T
        hide(scores, np.concatenate([hidden[short], slates[short]], axis=1))
        filled = np.concatenate([slates[short], top_rows(scores, data.k)], axis=1)
        slates[short] = _first_distinct(filled, data.k)
        return slates

    def _rings(self, start: Ints, scores: Tensor, hops: int) -> list[Ints]:
        """Returns for each ring around the starts [n] the [n, k] rows of its best items."""
        walks = [self.edges[start]]
        for _ in range(hops - 1):
            walks.append(walks[-1] @ self.edges)
        distance = torch.full(scores.shape, hops + 1, dtype=torch.int8)
        for hop in range(hops, 0, -1):
            distance[_entries(walks[hop - 1])] = hop
        # A start may follow itself. It is no item of a later ring.
        again = distance[torch.arange(len(start)), torch.from_numpy(start)] > 1
        distance[again.nonzero()[:, 0], torch.from_numpy(start)[again]] = 0
        picks = []
        for hop in range(1, hops + 1):
            inside = torch.where(distance == hop, scores, -torch.inf)
            if hop == 1:
                bonus = self.bonus[start]
                inside[_entries(bonus)] += torch.from_numpy(bonus.data).to(inside.dtype)
            picks.append(top_rows(inside, self.data.k))
        return picks


def _entries(matrix: sparse.csr_array) -> tuple[Tensor, Tensor]:
    """Returns the row and the column of each stored entry."""
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    return torch.from_numpy(rows), torch.from_numpy(matrix.indices.astype(np.int64))


def _first_distinct(rows: Ints, k: int) -> Ints:
    """Returns the first k different rows of each case.

    Args:
        rows: [n, m] item rows; -1 is left out.
        k: Number of rows to return, at most m.

    Returns:
        [n, k] item rows, -1 after the end.
    """
    size = rows.shape[1]
    earlier = np.tri(size, k=-1, dtype=bool)
    bad = ((rows[:, :, None] == rows[:, None, :]) & earlier).any(axis=2) | (rows < 0)
    order = np.argsort(bad, axis=1, kind="stable")[:, :k]
    found: Ints = np.where(
        np.take_along_axis(bad, order, axis=1), -1, np.take_along_axis(rows, order, axis=1)
    )
    return found


@dataclass(frozen=True)
class Untrained:
    """A baseline without training.

    Attributes:
        label: What tables call it.
        build: Makes its slates from training data; raises UnsuitableEvents if they do not suffice.
    """

    label: str
    build: Callable[[TrainingData], SlateMaker]


# Baselines by the name of `recserve evaluate --strategy`.
UNTRAINED: Mapping[str, Untrained] = {
    "popularity": Untrained("popularity", popularity),
    "popularity_week": Untrained("popularity of the last week", popularity_of_the_week),
    "item_knn": Untrained("item-kNN", item_knn),
    "transitions_2": Untrained("transition graph, two hops", transition_graph(TWO_HOPS)),
    "transitions_3": Untrained("transition graph, three hops", transition_graph(THREE_HOPS)),
}
