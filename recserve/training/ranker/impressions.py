"""Impressions: what users were shown, and which of it they took, as training data of the ranker.

A shown item without an outcome is a negative. What was shown first is taken more often whatever it
is, so a bias that knows the rank is added to the logits in training only (PAL, RecSys 2019).
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor, nn

from recserve.features.history.event_kinds import EventKinds
from recserve.features.ranking.ranking_tables import RankingSettings
from recserve.features.tables.buckets import Buckets
from recserve.features.tables.events import EventLog
from recserve.features.tables.items import ItemTable
from recserve.features.tables.mapped_arrays import blocks, new_array
from recserve.models.ranker import Ranker
from recserve.service.attribution import Signer
from recserve.service.slate_log.reader import (
    join_outcomes,
    num_parts,
    read_files,
    read_parts,
)

MAX_RANK = 64  # ranks from this one on share one bias
# Shown items of a part of a slate log, on disk until all parts are read.
KEPT = pa.schema(
    [
        ("row", pa.int32()),
        ("rank", pa.int64()),
        ("clicked", pa.bool_()),
        ("converted", pa.bool_()),
        ("looked", pa.bool_()),
        ("taken_at", pa.int64()),
    ]
)
BIAS_RATE = 10.0  # the bias learns so many times faster than other weights


@dataclass(frozen=True)
class SlateSource:
    """Where impressions come from.

    Attributes:
        folder: Folder of a slate log.
        kinds: Kinds of event types; outcomes of positive types count.
        signer: Makes the hashes of users in the log; None if the log has ids.
        unlooked_weight: Weight of shown items below the last one that was taken, which the user may
            not have looked at. The first item of a slate always counts fully.
    """

    folder: Path
    kinds: EventKinds = EventKinds()
    signer: Signer | None = None
    unlooked_weight: float = 1.0


@dataclass(frozen=True)
class Impressions:
    """The S slates that users of an event log were shown, by user and time, with n shown items.

    Attributes:
        offsets: [U + 1] first slate of each user, then S.
        times: [S] int64 microseconds since 1970.
        starts: [S + 1] first item of each slate, then n.
        rows: [n] int64 item rows.
        ranks: [n] int64 rank of the item, from 1.
        labels: [n, 2] float32 click and conversion.
        weights: [n] float32 weights of the labels.
        taken_at: [n] int64 time of the first outcome, 0 without one.
        num_slates: Slates of the log.
        num_unknown: Slates whose user has no events here, or is not known.
        num_held_out: Slates of the time of held-out events.
    """

    offsets: np.ndarray
    times: np.ndarray
    starts: np.ndarray
    rows: np.ndarray
    ranks: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    taken_at: np.ndarray
    num_slates: int
    num_unknown: int
    num_held_out: int

    @classmethod
    def read(
        cls, source: SlateSource, log: EventLog, items: ItemTable, settings: RankingSettings
    ) -> Impressions:
        """Reads the impressions of the users of an event log.

        Slates that were shown, or led to an event, at the time of a user's two held-out events or
        later are left out.

        Args:
            source: The slate log.
            log: All events.
            items: The catalogue.
            settings: Say what a conversion is.

        Raises:
            ValueError: If the log has no slate of a user with events, or events have no times.
        """
        if not log.has_timestamps:
            raise ValueError("events have positions only; a slate log needs events with timestamps")
        reading = _Reading(source, log, items, settings)
        with tempfile.TemporaryDirectory() as folder:
            kept = Buckets(Path(folder), "kept", number := num_parts(source.folder), KEPT)
            for part, rows in enumerate(read_parts(source.folder, number)):
                items_of_part = reading.read(*rows)
                kept.add(items_of_part, np.full(len(items_of_part), part))
            num_slates = reading.num_slates
            if not num_slates:
                raise ValueError(f"{source.folder}: no slates; expected the folder of a slate log")
            if not any(piece.sizes.size for piece in reading.pieces):
                raise ValueError(
                    f"{source.folder}: none of {num_slates} slates is of a user with events in the "
                    "bundle before the held-out ones; a log with hashes of users needs the "
                    "signing_key of the server (RECSERVE_SIGNING_KEY)"
                )
            return cls._join(reading, kept)

    @classmethod
    def _join(cls, reading: _Reading, kept: Buckets) -> Impressions:
        """Returns the slates of all parts by user, time and token."""
        pieces = reading.pieces
        every = _Piece(*map(np.concatenate, zip(*(vars(p).values() for p in pieces), strict=True)))
        order = np.lexsort((every.tokens, every.begun, every.times, every.owners))
        owners, times, tokens = every.owners[order], every.times[order], every.tokens[order]
        # First item of each piece: in the result by order, and by piece.
        sizes = every.sizes[order]
        begins = np.empty(order.size, np.int64)
        begins[order] = np.cumsum(sizes) - sizes
        first = np.append(True, tokens[1:] != tokens[:-1])
        total = int(sizes.sum())
        rows, ranks, taken_at = (new_array(total, np.int64) for _ in range(3))
        labels = new_array(2 * total, np.float32).reshape(-1, 2)
        weights = new_array(total, np.float32)
        number = 0
        for part, piece in enumerate(pieces):
            columns = kept.take(part)
            own = begins[number : number + piece.sizes.size]
            number += piece.sizes.size
            starts = np.cumsum(piece.sizes) - piece.sizes
            places = np.repeat(own - starts, piece.sizes) + np.arange(len(columns))
            arrays = {name: columns.column(name).to_numpy() for name in columns.column_names}
            rows[places], ranks[places] = arrays["row"], arrays["rank"]
            labels[places, 0], labels[places, 1] = arrays["clicked"], arrays["converted"]
            weights[places] = np.where(arrays["looked"], 1.0, reading.source.unlooked_weight)
            taken_at[places] = arrays["taken_at"]
        return cls(
            np.searchsorted(owners[first], np.arange(reading.log.num_users + 1)),
            times[first],
            np.append((np.cumsum(sizes) - sizes)[first], total),
            rows,
            ranks,
            labels,
            weights,
            taken_at,
            reading.num_slates,
            reading.num_unknown,
            reading.num_held_out,
        )

    def explained(self, log: EventLog) -> np.ndarray:
        """Returns [n] bool, True for events of a log that are outcomes of the slates.

        As candidates beside sampled items they would teach what was shown first.
        """
        found = np.zeros(log.num_events, bool)
        cuts = np.searchsorted(log.offsets, [part.start for part in blocks(log.num_events)])
        for low, high in pairwise(np.unique([*cuts, log.num_users]).tolist()):
            first, last = self.offsets[[low, high]].tolist()
            owners = np.repeat(np.arange(low, high), np.diff(self.offsets[low : high + 1]))
            users = np.repeat(owners, np.diff(self.starts[first : last + 1]))
            items = slice(int(self.starts[first]), int(self.starts[last]))
            hit = self.taken_at[items] > 0
            taken = np.stack([users[hit], self.rows[items][hit], self.taken_at[items][hit]], 1)
            own = slice(int(log.offsets[low]), int(log.offsets[high]))
            user = np.repeat(np.arange(low, high), np.diff(log.offsets[low : high + 1]))
            events = np.stack([user, log.item_rows[own], log.times[own]], 1)
            _, where = np.unique(np.concatenate([taken, events]), axis=0, return_inverse=True)
            where = where.ravel()
            found[own] = np.isin(where[len(taken) :], where[: len(taken)])
        return found

    def between(self, user: int, first_us: int, last_us: int) -> np.ndarray:
        """Returns the slates of a user from a time on, and before another."""
        start, stop = int(self.offsets[user]), int(self.offsets[user + 1])
        low, high = np.searchsorted(self.times[start:stop], [first_us, last_us])
        return np.arange(start + low, start + high)

    def __str__(self) -> str:
        used = len(self.times)
        return (
            f"impressions: {used} of {self.num_slates} slates with {len(self.rows)} items, "
            f"{int(self.labels[:, 0].sum())} taken; left out: {self.num_unknown} of unknown users, "
            f"{self.num_held_out} of the time of held-out events"
        )


class BiasedRanker(nn.Module):
    """A ranker with the bias of ranks, and of popularity, that it has in training only."""

    def __init__(self, ranker: Ranker, popularity: bool) -> None:
        super().__init__()
        tasks = len(ranker.config.tasks)
        self.ranker = ranker
        self.by_rank = nn.Parameter(torch.zeros(MAX_RANK + 1, tasks))
        self.by_count = nn.Parameter(torch.zeros(tasks)) if popularity else None

    def bias(self, ranks: Tensor, log_counts: Tensor) -> Tensor:
        """Returns [M, tasks] the part of the logits that is due to how items were shown.

        Args:
            ranks: [M] rank of each candidate; 0 for one that was not shown, which has no bias.
            log_counts: [M] standardised logarithm of each item's events.
        """
        found = self.by_rank[ranks.clamp(max=MAX_RANK)]
        if self.by_count is not None:
            found = found + self.by_count * log_counts[:, None]
        return BIAS_RATE * found * (ranks > 0)[:, None]


@dataclass(frozen=True)
class _Piece:
    """The slates of a part of the log, by user, time and token.

    Attributes:
        owners: [s] user of each.
        times: [s] int64 time of each.
        begun: [s] int64 first time of each token in the log.
        tokens: [s] token of each, in UTF-8.
        sizes: [s] number of its items.
    """

    owners: np.ndarray
    times: np.ndarray
    begun: np.ndarray
    tokens: np.ndarray
    sizes: np.ndarray

    @classmethod
    def of(
        cls,
        owners: np.ndarray,
        times: np.ndarray,
        slate: np.ndarray,
        begun: np.ndarray,
        tokens: np.ndarray,
    ) -> _Piece:
        """Returns the slates of sorted items; `begun` and `tokens` are by number in `slate`."""
        new = np.ones(slate.size, bool)
        new[1:] = (
            (slate[1:] != slate[:-1]) | (times[1:] != times[:-1]) | (owners[1:] != owners[:-1])
        )
        starts = np.flatnonzero(new)
        sizes = np.diff(np.append(starts, slate.size))
        number = slate[starts]
        return cls(owners[starts], times[starts], begun[number], tokens[number], sizes)


class _Reading:
    """Reads the parts of a slate log.

    Attributes:
        pieces: The slates that are used, by part.
        num_slates: As of Impressions, so far; so are the next two.
    """

    def __init__(
        self, source: SlateSource, log: EventLog, items: ItemTable, settings: RankingSettings
    ) -> None:
        self.source, self.log, self.settings = source, log, settings
        self.pieces: list[_Piece] = []
        self.num_slates = self.num_unknown = self.num_held_out = 0
        self._users, self._item_ids = _Users(log, source.signer), pa.array(items.ids)
        self._positive = _positive(source)
        self._held = np.full(log.num_users, np.iinfo(np.int64).max)
        enough = log.holdout()
        self._held[enough] = log.times[log.offsets[1:][enough] - 2]

    def read(self, slates: pa.Table, outcomes: pa.Table) -> pa.Table:
        """Returns the shown items of a part that are used, by user, time and slate; notes these."""
        shown = join_outcomes(slates, outcomes, self._positive)
        tokens = shown.column("token_id").combine_chunks().dictionary_encode()
        slate = tokens.indices.to_numpy(zero_copy_only=False)
        users = self._users.find(shown.column("user"))
        times = shown.column("time").cast(pa.int64()).to_numpy()
        clicks = shown.column("num_outcomes").to_numpy() > 0
        late = pc.fill_null(shown.column("first_outcome").cast(pa.int64()), 0).to_numpy()
        converted = clicks.copy()
        if self.settings.conversion_types:
            hits = join_outcomes(slates, outcomes, self.settings.conversion_types)
            converted = _conversions(shown, hits)
        elif self.settings.conversion_value is not None:
            values = pc.fill_null(shown.column("value"), 0.0).to_numpy()
            converted = clicks & (values >= self.settings.conversion_value)
        known = users >= 0
        after = np.zeros(len(tokens.dictionary), bool)
        after[slate[known & (np.maximum(times, late) >= self._held[users])]] = True
        rows = pc.fill_null(pc.index_in(shown.column("item_id"), self._item_ids), -1).to_numpy()
        ranks = shown.column("rank").to_numpy().astype(np.int64)
        taken = np.zeros(len(after), np.int64)
        np.maximum.at(taken, slate[clicks], ranks[clicks])
        looked = ranks <= np.maximum(taken[slate], 1)
        self.num_slates += len(after)
        self.num_unknown += np.unique(slate[~known]).size
        self.num_held_out += int(after.sum())
        keep = np.flatnonzero(known & (rows >= 0) & ~after[slate])
        keep = keep[np.lexsort((ranks[keep], slate[keep], times[keep], users[keep]))]
        names = np.array([text.encode() for text in tokens.dictionary.to_pylist()], np.bytes_)
        begun = times[np.unique(slate, return_index=True)[1]]
        self.pieces.append(_Piece.of(users[keep], times[keep], slate[keep], begun, names))
        columns = (rows, ranks, clicks, converted, looked, late)
        return pa.table([one[keep] for one in columns], KEPT.names).cast(KEPT)


def _positive(source: SlateSource) -> list[str]:
    """Returns the types of the log's outcomes that say that a user wants an item."""
    names = dict[str | None, None]()
    for table in read_files(source.folder, "outcomes"):
        names |= dict.fromkeys(table.column("type").unique().to_pylist())
    return [name for name in names if name and source.kinds.kind(name) == "positive"]


def _conversions(shown: pa.Table, hits: pa.Table) -> np.ndarray:
    """Returns [n] bool, True for shown items that have an outcome in `hits`."""
    keys = ["token_id", "item_id"]
    hits = hits.filter(pc.greater(hits.column("num_outcomes"), 0)).select(keys)
    of = [pc.binary_join_element_wise(*(t.column(k) for k in keys), " ") for t in (shown, hits)]
    return np.asarray(pc.is_in(of[0], value_set=of[1].combine_chunks()).to_numpy())


class _Users:
    """The users of an event log by their names in a slate log."""

    def __init__(self, log: EventLog, signer: Signer | None) -> None:
        self._numbers = {user_id: number for number, user_id in enumerate(log.user_ids)}
        if signer is not None:
            self._numbers |= {signer.user(user_id): n for n, user_id in enumerate(log.user_ids)}
        self._has_events = log.lengths() > 0

    def find(self, column: pa.ChunkedArray) -> np.ndarray:
        """Returns [n] int64 user of each row in the event log, -1 for none."""
        coded = column.combine_chunks().dictionary_encode()
        table = [self._numbers.get(name, -1) for name in coded.dictionary.to_pylist()]
        codes = pc.fill_null(coded.indices, len(table)).to_numpy(zero_copy_only=False)
        found = np.array([*table, -1], np.int64)[codes]
        return np.asarray(np.where((found >= 0) & self._has_events[found], found, -1))
