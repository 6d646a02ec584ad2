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
from recserve.features.tables.mapped_arrays import new_array
from recserve.features.vectors.text_encoder import unit
from recserve.features.vectors.vectors import collaborative_vectors, join_vectors
from recserve.training.ranker.impressions import Impressions
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
        columns: [4, B] int64 the fields of its B windows, whose users are all in one fold.
        fold: Number of that fold.
        key: Seed of the batch's random draws.
    """

    columns: np.ndarray
    fold: int
    key: tuple[int, int, int]

    @property
    def windows(self) -> list[PrefixWindow]:
        """The prefixes."""
        return [PrefixWindow(*fields) for fields in self.columns.T.tolist()]


class RankingData:
    """Training windows of an event log, with sampled negatives, and the slates of their time.

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
        impressions: Impressions | None = None,
        slates: int = 8,
    ) -> None:
        self.train, self.tables, self.seed = train, tables, seed
        self.weights = train.relative_weights()
        self.negatives, self.positives, self.batch_roots = negatives, positives, batch_roots
        self.impressions, self.slates = impressions, slates
        if impressions is not None:
            self._from_slates = impressions.explained(train)
        self.sampler = NegativeSampler(train, tables)
        self.folds = [replace(tables, vectors=unit_rows(v)) for v in fold_vectors] or [tables]

    def plan(self, epoch: int) -> list[BatchPlan]:
        """Returns the batches of an epoch, which cover each window of each user once.

        The cuts between windows differ from epoch to epoch.
        """
        noise = np.random.default_rng((self.seed, epoch))
        windows = self._windows(noise)
        users, starts, _, stops = windows
        sizes = (stops - starts) * noise.uniform(0.9, 1.1, len(users))
        folds = users % len(self.folds)
        order = np.lexsort((sizes, folds))
        batches = [
            part[first : first + self.batch_roots]
            for part in np.split(order, np.cumsum(np.bincount(folds))[:-1])
            for first in range(0, part.size, self.batch_roots)
        ]
        return [
            BatchPlan(
                windows[:, batches[index]],
                int(folds[batches[index][0]]),
                (self.seed, epoch, int(index)),
            )
            for index in noise.permutation(len(batches))
        ]

    def _windows(self, noise: np.random.Generator) -> np.ndarray:
        """Returns [4, W] int64 the fields of all windows, of at most `recent_items` events."""
        s, lengths = self.tables.settings, self.train.lengths()
        shifts = noise.integers(0, s.recent_items // s.block, len(lengths)) * s.block
        first = np.where(shifts, shifts, s.recent_items)  # where the second window begins
        counts = np.where(lengths, 1 - (np.minimum(first - lengths, 0) // s.recent_items), 0)
        users = np.repeat(np.arange(len(lengths)), counts)
        number = np.arange(len(users)) - np.repeat(np.cumsum(counts) - counts, counts)
        next_split = first[users] + number * s.recent_items
        splits = np.where(number, next_split - s.recent_items, 0)
        starts, stops = np.maximum(splits - s.long_items, 0), np.minimum(next_split, lengths[users])
        return np.stack([users, starts, splits, stops])

    def batch(self, plan: BatchPlan) -> RankingBatch:
        """Returns prefixes, positives at their own times, negatives, and their features."""
        draw = np.random.default_rng(plan.key)
        prefixes, places, own = [], [], []
        for window in plan.windows:
            events = EventColumns.of(self.train, window.user).slice(0, window.stop)
            prefixes.append(window_columns(self.tables, events, window.start, window.split))
            size = window.stop - window.split
            chosen = draw.permutation(size)
            if self.impressions is not None:  # what a slate led to is a candidate of that slate
                first = int(self.train.offsets[window.user]) + window.split
                chosen = chosen[~self._from_slates[first + chosen]]
            chosen = chosen[: self.positives]
            places.append(np.sort(chosen) + window.split)
            own.append(np.full(chosen.size, window.user))
        per_prefix = np.array([p.size for p in places])
        where = self.train.offsets[np.concatenate(own)] + np.concatenate(places)
        positive = self.train.item_rows[where].astype(np.int64)
        negative = self.sampler.draw(np.concatenate(own), self.negatives, draw)
        rows = np.concatenate([positive[:, None], negative], axis=1)
        times = self.train.times[where]
        own_values = np.full(rows.shape, np.nan, dtype=np.float32)
        own_values[:, 0] = self.train.values[where]
        settings = self.tables.settings
        labels = np.zeros((*rows.shape, 2), dtype=np.float32)
        labels[:, 0, 0] = 1
        labels[:, 0, 1] = settings.is_conversion(self.train.types[where], self.train.values[where])
        made = _Exposures(
            np.repeat(np.arange(len(prefixes)), per_prefix),
            times,
            np.repeat(np.arange(rows.shape[0]), rows.shape[1]),
            rows.ravel(),
            own_values.ravel(),
            labels.reshape(-1, 2),
            # The items that were sampled for an event weigh as much as the event.
            None if self.weights is None else np.repeat(self.weights[where], rows.shape[1]),
        )
        if self.impressions is not None:
            made = self._with_slates(made, plan.windows, draw)
        per_prefix = np.bincount(made.prefixes, minlength=len(prefixes))
        limits, contexts, last = _contexts(prefixes, per_prefix, made.times)
        owners = made.owners
        tables = self.folds[plan.fold]
        user = UserSide.of(tables, contexts)
        cross = cross_features(tables, user, owners, made.rows, made.own_values)
        # Half of the contexts train without a moment, because a request need not give one.
        moments = moment_features(settings, made.times, last, limits > 1)
        moments[draw.random(limits.size) < 0.5] = 0
        every_limit = limits[owners]
        columns = candidate_rows(self.tables, made.rows, every_limit, cross, moments[owners])
        sizes = np.bincount(made.prefixes[owners], minlength=len(prefixes))
        batch = pack(prefixes, columns, every_limit, sizes, made.labels)
        if made.weights is None:
            return batch
        ranks = None if made.ranks is None else torch.from_numpy(made.ranks)
        return replace(batch, weights=torch.from_numpy(made.weights), ranks=ranks)

    def _with_slates(
        self, made: _Exposures, windows: list[PrefixWindow], draw: np.random.Generator
    ) -> _Exposures:
        """Adds slates that the users of windows were shown in the time of the recent events."""
        shown = self.impressions
        assert shown is not None
        prefixes, slates, own_values = [], [], []
        for place, window in enumerate(windows):
            events = EventColumns.of(self.train, window.user)
            first = int(events.times[window.split - 1]) if window.split else 0
            whole = window.stop == len(events)
            last = np.iinfo(np.int64).max if whole else int(events.times[window.stop - 1])
            found = shown.between(window.user, first, last)
            for slate in np.sort(draw.permutation(found)[: self.slates]).tolist():
                rows = shown.rows[shown.starts[slate] : shown.starts[slate + 1]]
                # An event of the user that follows is counted with the item, but is not known yet.
                later = int(np.searchsorted(events.times, shown.times[slate], side="left"))
                values = np.full(rows.size, np.nan, np.float32)
                for index in range(len(events) - 1, later - 1, -1):
                    values[rows == events.rows[index]] = events.values[index]
                prefixes.append(place)
                slates.append(slate)
                own_values.append(values)
        chosen = np.array(slates, np.int64)
        lengths = np.diff(shown.starts)[chosen]
        flat = np.concatenate(
            [np.zeros(0, np.int64)]
            + [np.arange(shown.starts[slate], shown.starts[slate + 1]) for slate in slates]
        )
        num_events = len(made.times)
        of_prefix = np.concatenate([made.prefixes, np.array(prefixes, np.int64)])
        owners = np.concatenate(
            [made.owners, num_events + np.repeat(np.arange(chosen.size), lengths)]
        )
        order = np.argsort(of_prefix, kind="stable")
        place_of = np.empty_like(order)
        place_of[order] = np.arange(order.size)
        by_place = np.argsort(place_of[owners], kind="stable")
        num_sampled = made.rows.size
        none = np.zeros(num_sampled, np.int64)
        weights = np.ones(num_sampled, np.float32) if made.weights is None else made.weights
        return _Exposures(
            of_prefix[order],
            np.concatenate([made.times, shown.times[chosen]])[order],
            place_of[owners][by_place],
            np.concatenate([made.rows, shown.rows[flat]])[by_place],
            np.concatenate([made.own_values, *own_values])[by_place],
            np.concatenate([made.labels, shown.labels[flat]])[by_place],
            np.concatenate([weights, shown.weights[flat]])[by_place],
            np.concatenate([none, shown.ranks[flat]])[by_place],
        )


@dataclass(frozen=True)
class _Exposures:
    """E moments at which users see candidates, prefix after prefix, with M candidates in all.

    Attributes:
        prefixes: [E] number of the prefix.
        times: [E] times.
        owners: [M] exposure of each candidate, ascending.
        rows: [M] item rows.
        own_values: [M] value of the user's own event of the candidate, NaN without one.
        labels: [M, 2] click and conversion.
        weights: [M] weight of each candidate; None: 1 each.
        ranks: [M] rank at which the candidate was shown, 0 if it was not; None without slates.
    """

    prefixes: np.ndarray
    times: np.ndarray
    owners: np.ndarray
    rows: np.ndarray
    own_values: np.ndarray
    labels: np.ndarray
    weights: np.ndarray | None = None
    ranks: np.ndarray | None = None


class NegativeSampler:
    """Samples items that a user never had.

    By default half of the items are drawn uniformly, and half by popularity to the power 0.75.
    """

    def __init__(self, train: EventLog, tables: RankingTables) -> None:
        self.num_items = tables.num_items
        weights = np.asarray(tables.item_counts, np.float64) ** POPULAR_POWER
        self.cumulative = np.cumsum(weights) / max(weights.sum(), 1e-9)
        self.had = self._pairs(train)

    def _pairs(self, train: EventLog) -> np.ndarray:
        """Returns [p] int64 `user * num_items + item` for each item of each user, ascending."""
        found, size = new_array(train.num_events, np.int64), 0
        for users in train.user_blocks():
            events = slice(*train.offsets[[users.start, users.stop]].tolist())
            owners = np.repeat(np.arange(users.start, users.stop), train.lengths()[users])
            keys = np.unique(owners * self.num_items + train.item_rows[events])
            found[size : size + keys.size] = keys
            size += keys.size
        return found[:size]

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
    users, lengths = np.arange(train.num_users), train.lengths()
    return [
        join_vectors(
            content,
            collaborative_vectors(
                train.select(np.repeat(users % NUM_FOLDS != fold, lengths)),
                len(vectors),
                collaborative_dim,
                seed,
            ),
            weight,
        )
        for fold in range(NUM_FOLDS)
    ]
