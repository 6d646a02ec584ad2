"""Training and test data of the ranker: prefixes from user windows, with many candidates each.

A training prefix holds a window of a user's history. Up to `positives` events of its recent part
become candidates, each at its own exposure time, with sampled items that the user never had. So one
pass over a prefix serves many labels. No candidate sees itself or later events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from recserve.features.ranking.cross_features import Contexts, UserSide, cross_features
from recserve.features.ranking.event_features import EventColumns, moment_features
from recserve.features.ranking.ranking import (
    Columns,
    RankingPrefix,
    candidate_columns,
    candidate_rows,
    prefix_columns,
    window_columns,
)
from recserve.features.ranking.ranking_tables import RankingTables, unit_rows
from recserve.features.tables.events import EventLog
from recserve.features.vectors.text_encoder import unit
from recserve.features.vectors.vectors import collaborative_vectors, join_vectors
from recserve.training.ranker.ranking_batch import RankingBatch, pack

NUM_FOLDS = 4  # folds of users; the item vectors of a fold are fitted without its events
POPULAR_SHARE = 0.5
POPULAR_POWER = 0.75


@dataclass(frozen=True)
class PrefixWindow:
    """Events of a training prefix.

    Attributes:
        user: Number of the user.
        start: First long-term event; the long-term events end before `split`.
        split: First recent event; the recent events end before `stop`.
        stop: One past the last event.
    """

    user: int
    start: int
    split: int
    stop: int


@dataclass(frozen=True)
class BatchPlan:
    """Description of a batch.

    Attributes:
        windows: The prefixes, whose users are all in one fold.
        fold: Number of that fold.
        key: Seed of the batch's random draws.
    """

    windows: list[PrefixWindow]
    fold: int
    key: tuple[int, int, int]


class RankingData:
    """Training windows of an event log, with sampled negatives.

    Draws are keyed by (seed, epoch, batch), so a resumed run reads the same data. `fold_vectors`
    holds the item vectors of each fold of users (see `cross_fitted_vectors`). If it is empty, all
    users get the vectors of the tables.
    """

    def __init__(
        self,
        train: EventLog,
        tables: RankingTables,
        seed: int,
        negatives: int = 4,
        positives: int = 16,
        batch_roots: int = 64,
        fold_vectors: Sequence[np.ndarray] = (),
    ) -> None:
        self.train, self.tables, self.seed = train, tables, seed
        self.weights = train.relative_weights()
        self.negatives, self.positives, self.batch_roots = negatives, positives, batch_roots
        self.sampler = NegativeSampler(train, tables)
        self.folds = [replace(tables, vectors=unit_rows(v)) for v in fold_vectors] or [tables]

    def plan(self, epoch: int) -> list[BatchPlan]:
        """Returns the batches of an epoch, which cover each window of each user once.

        The cuts between windows differ from epoch to epoch.
        """
        noise = np.random.default_rng((self.seed, epoch))
        windows = list(self._windows(noise))
        sizes = np.array([w.stop - w.start for w in windows]) * noise.uniform(
            0.9, 1.1, len(windows)
        )
        folds = np.array([w.user % len(self.folds) for w in windows])
        order = np.lexsort((sizes, folds))
        batches = [
            part[first : first + self.batch_roots]
            for part in np.split(order, np.cumsum(np.bincount(folds))[:-1])
            for first in range(0, part.size, self.batch_roots)
        ]
        return [
            BatchPlan(
                [windows[i] for i in batches[index]],
                int(folds[batches[index][0]]),
                (self.seed, epoch, int(index)),
            )
            for index in noise.permutation(len(batches))
        ]

    def _windows(self, noise: np.random.Generator) -> Iterator[PrefixWindow]:
        s = self.tables.settings
        for user, length in enumerate(self.train.lengths().tolist()):
            shift = int(noise.integers(0, s.recent_items // s.block)) * s.block
            splits = [0, *range(shift or s.recent_items, length, s.recent_items)]
            for split, stop in zip(splits, [*splits[1:], length], strict=True):
                if stop > split:
                    yield PrefixWindow(user, max(0, split - s.long_items), split, stop)

    def batch(self, plan: BatchPlan) -> RankingBatch:
        """Returns prefixes, positives at their own times, negatives, and their features."""
        draw = np.random.default_rng(plan.key)
        prefixes, places, own = [], [], []
        for window in plan.windows:
            events = EventColumns.of(self.train, window.user).slice(0, window.stop)
            prefixes.append(window_columns(self.tables, events, window.start, window.split))
            size = window.stop - window.split
            chosen = draw.permutation(size)[: self.positives]
            places.append(np.sort(chosen) + window.split)
            own.append(np.full(chosen.size, window.user))
        per_prefix = np.array([p.size for p in places])
        where = self.train.offsets[np.concatenate(own)] + np.concatenate(places)
        positive = self.train.item_rows[where].astype(np.int64)
        negative = self.sampler.draw(np.concatenate(own), self.negatives, draw)
        rows = np.concatenate([positive[:, None], negative], axis=1)
        times = self.train.times[where]
        limits, contexts, last = _contexts(prefixes, per_prefix, times)

        width = 1 + self.negatives
        own_values = np.full(rows.shape, np.nan, dtype=np.float32)
        own_values[:, 0] = self.train.values[where]
        owners = np.repeat(np.arange(rows.shape[0]), width)
        tables = self.folds[plan.fold]
        user = UserSide.of(tables, contexts)
        cross = cross_features(tables, user, owners, rows.ravel(), own_values.ravel())
        settings = self.tables.settings
        # Half of the contexts train without a moment, because a request need not give one.
        moments = moment_features(settings, times, last, limits > 1)
        moments[draw.random(limits.size) < 0.5] = 0
        every_limit = np.repeat(limits, width)
        columns = candidate_rows(
            self.tables, rows.ravel(), every_limit, cross, np.repeat(moments, width, axis=0)
        )
        labels = np.zeros((*rows.shape, 2), dtype=np.float32)
        labels[:, 0, 0] = 1
        labels[:, 0, 1] = settings.is_conversion(self.train.types[where], self.train.values[where])
        made = pack(prefixes, columns, every_limit, per_prefix * width, labels.reshape(-1, 2))
        if self.weights is None:
            return made
        # The items that were sampled for an event weigh as much as the event.
        return replace(made, weights=torch.from_numpy(np.repeat(self.weights[where], width)))


class NegativeSampler:
    """Samples items that a user never had.

    By default half of the items are drawn uniformly, and half by popularity to the power 0.75.
    """

    def __init__(self, train: EventLog, tables: RankingTables) -> None:
        self.num_items = tables.num_items
        weights = np.asarray(tables.item_counts, np.float64) ** POPULAR_POWER
        self.cumulative = np.cumsum(weights) / max(weights.sum(), 1e-9)
        self.had = np.unique(train.user_indices() * self.num_items + train.item_rows)

    def draw(
        self,
        users: np.ndarray,
        count: int,
        noise: np.random.Generator,
        popular_share: float = POPULAR_SHARE,
    ) -> np.ndarray:
        """Draws negatives for some users.

        An item that the user had is drawn again, at most four times.

        Args:
            users: [n] numbers of users.
            count: Negatives per user.
            noise: Source of randomness.
            popular_share: Share of the negatives that is drawn by popularity.

        Returns:
            [n, count] int64 item rows.
        """
        shape = (users.size, count)
        rows = self._propose(shape, noise, popular_share)
        for _ in range(4):
            keys = users[:, None] * self.num_items + rows
            at = np.searchsorted(self.had, keys).clip(max=self.had.size - 1)
            taken = self.had[at] == keys
            if not taken.any():
                break
            rows[taken] = self._propose((int(taken.sum()),), noise, popular_share)
        return rows

    def _propose(
        self, shape: tuple[int, ...], noise: np.random.Generator, popular_share: float
    ) -> np.ndarray:
        uniform = noise.integers(0, self.num_items, shape)
        popular = np.searchsorted(self.cumulative, noise.random(shape)).clip(max=self.num_items - 1)
        return np.where(noise.random(shape) < popular_share, popular, uniform)


@dataclass(frozen=True)
class HeldOut:
    """Which events are held out, and what each is ranked against.

    Attributes:
        held_back: Position of the event from the end of a user's events (1: test, 2: validation).
        seed: Seed of the sampled items.
        negatives: Sampled items for each held-out event.
        popular_share: Share of the sampled items that is drawn by popularity.
    """

    held_back: int
    seed: int = 0
    negatives: int = 99
    popular_share: float = 0.0


def held_batches(
    log: EventLog,
    tables: RankingTables,
    users: np.ndarray,
    sampler: NegativeSampler,
    held: HeldOut,
    batch_roots: int = 32,
) -> Iterator[RankingBatch]:
    """Yields batches that rank each user's held-out event against sampled items.

    The columns are those of serving. The held-out event is the first of its candidates. With
    timestamps, the exposure time is that of the held-out event.

    Args:
        log: All events.
        tables: Features of items and users.
        users: Numbers of users with more than `held.held_back` events.
        sampler: Source of the negatives.
        held: Which event is held out, and what it is ranked against.
        batch_roots: Prefixes per batch.
    """
    held_back = held.held_back
    noise = np.random.default_rng((held.seed, held_back))
    order = users[np.argsort(log.lengths()[users], kind="stable")]
    for first in range(0, order.size, batch_roots):
        prefixes, parts, labels = [], [], []
        chosen = order[first : first + batch_roots]
        drawn = sampler.draw(chosen, held.negatives, noise, held.popular_share)
        for user, others in zip(chosen.tolist(), drawn, strict=True):
            events = EventColumns.of(log, user)
            at = len(events) - held_back
            prefix = prefix_columns(tables, events.slice(0, at))
            rows = np.concatenate([events.rows[at : at + 1], others])
            moment = np.full(rows.size, events.times[at]) if log.has_timestamps else None
            prefixes.append(prefix)
            parts.append(candidate_columns(tables, prefix, rows, moment))
            label = np.zeros((rows.size, 2), dtype=np.float32)
            event = events.slice(at, at + 1)
            label[0] = 1, tables.settings.is_conversion(event.types, event.values)[0]
            labels.append(label)
        columns = Columns(
            **{
                name: np.concatenate([vars(p.columns)[name] for p in parts])
                for name in vars(parts[0].columns)
            }
        )
        limits = np.concatenate([p.prefix_limits for p in parts])
        sizes = np.array([len(p.prefix_limits) for p in parts])
        yield pack(prefixes, columns, limits, sizes, np.concatenate(labels))


def _contexts(
    prefixes: list[RankingPrefix], per_prefix: np.ndarray, times: np.ndarray
) -> tuple[np.ndarray, Contexts, np.ndarray]:
    """Returns prefix limits [n], contexts, and last visible times [n] of n exposures in order."""
    limits, contexts, last = [], [], []
    for prefix, moments in zip(prefixes, np.split(times, np.cumsum(per_prefix)[:-1]), strict=True):
        recent = prefix.events.times[prefix.shared - 1 :]
        limit = prefix.shared + np.searchsorted(recent, moments, side="left")
        limits.append(limit)
        contexts.append(Contexts.of(prefix.events.rows, prefix.events.values, limit - 1))
        last.append(prefix.events.times[(limit - 2).clip(min=0)])
    return np.concatenate(limits), Contexts.cat(contexts), np.concatenate(last)


def cross_fitted_vectors(
    vectors: np.ndarray, train: EventLog, collaborative_dim: int, weight: float, seed: int
) -> list[np.ndarray]:
    """Returns item vectors for each fold of users, fitted without the events of those users.

    Collaborative vectors that are fitted on all training events are close to the positives that
    they help to predict. A similarity feature would then look better in training than it is.
    Vectors fitted without a fold know as little about it as about future events. The features read
    only cosines, so each fit may have its own axes.

    Args:
        vectors: [I, F] item vectors. The last `collaborative_dim` columns are collaborative.
        train: Training events. Fold f holds users f, f + NUM_FOLDS, f + 2 * NUM_FOLDS, ...
        collaborative_dim: Number of collaborative columns.
        weight: Factor of the collaborative part when the parts are joined.
        seed: Seed of the fits.

    Returns:
        NUM_FOLDS arrays [I, F], or an empty list if no column is collaborative.
    """
    if not collaborative_dim:
        return []
    content = unit(vectors[:, :-collaborative_dim])
    users = train.user_indices()
    return [
        join_vectors(
            content,
            collaborative_vectors(
                train.select(users % NUM_FOLDS != fold), len(vectors), collaborative_dim, seed
            ),
            weight,
        )
        for fold in range(NUM_FOLDS)
    ]
