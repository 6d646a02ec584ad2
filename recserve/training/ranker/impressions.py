"""Impressions: what users were shown, and which of it they took, as training data of the ranker.

A shown item without an outcome is a negative. What was shown first is taken more often whatever it
is, so a bias that knows the rank is added to the logits in training only (PAL, RecSys 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor, nn

from recserve.features.history.event_kinds import EventKinds
from recserve.features.ranking.ranking_tables import RankingSettings
from recserve.features.tables.events import EventLog
from recserve.features.tables.items import ItemTable
from recserve.models.ranker import Ranker
from recserve.service.attribution import Signer
from recserve.service.slate_log.reader import read_log, shown_items

MAX_RANK = 64  # ranks from this one on share one bias
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
        shown = shown_items(source.folder, _positive(source))
        tokens = shown.column("token_id").combine_chunks().dictionary_encode()
        slate = tokens.indices.to_numpy(zero_copy_only=False)
        num_slates = len(tokens.dictionary)
        if not num_slates:
            raise ValueError(f"{source.folder}: no slates; expected the folder of a slate log")
        users = _users(shown.column("user"), log, source.signer)
        times = shown.column("time").cast(pa.int64()).to_numpy()
        clicks = shown.column("num_outcomes").to_numpy() > 0
        late = pc.fill_null(shown.column("first_outcome").cast(pa.int64()), 0).to_numpy()
        converted = clicks.copy()
        if settings.conversion_types:
            converted = _conversions(source, shown, settings.conversion_types)
        elif settings.conversion_value is not None:
            values = pc.fill_null(shown.column("value"), 0.0).to_numpy()
            converted = clicks & (values >= settings.conversion_value)
        held = np.full(log.num_users, np.iinfo(np.int64).max)
        enough = log.lengths() >= 3
        held[enough] = log.times[log.offsets[1:][enough] - 2]
        known = users >= 0
        after = np.zeros(num_slates, bool)
        after[slate[known & (np.maximum(times, late) >= held[users])]] = True
        rows = pc.fill_null(pc.index_in(shown.column("item_id"), pa.array(items.ids)), -1)
        rows = rows.to_numpy().astype(np.int64)
        ranks = shown.column("rank").to_numpy().astype(np.int64)
        taken = np.zeros(num_slates, np.int64)
        np.maximum.at(taken, slate[clicks], ranks[clicks])
        weights = np.where(
            ranks <= np.maximum(taken[slate], 1), 1.0, source.unlooked_weight
        ).astype(np.float32)
        keep = np.flatnonzero(known & (rows >= 0) & ~after[slate])
        if not keep.size:
            raise ValueError(
                f"{source.folder}: none of {num_slates} slates is of a user with events in the "
                "bundle before the held-out ones; a log with hashes of users needs the "
                "signing_key of the server (RECSERVE_SIGNING_KEY)"
            )
        keep = keep[np.lexsort((ranks[keep], slate[keep], times[keep], users[keep]))]
        starts = np.flatnonzero(np.append(True, slate[keep][1:] != slate[keep][:-1]))
        owners = users[keep][starts]
        unknown = np.unique(slate[~known]).size
        return cls(
            np.searchsorted(owners, np.arange(log.num_users + 1)),
            times[keep][starts],
            np.append(starts, keep.size),
            rows[keep],
            ranks[keep],
            np.stack([clicks, converted], 1)[keep].astype(np.float32),
            weights[keep],
            late[keep],
            num_slates,
            unknown,
            int(after.sum()),
        )

    def explained(self, log: EventLog) -> np.ndarray:
        """Returns [n] bool, True for events of a log that are outcomes of the slates.

        As candidates beside sampled items they would teach what was shown first.
        """
        owners = np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))
        users = np.repeat(owners, np.diff(self.starts))
        hit = self.taken_at > 0
        taken = np.stack([users[hit], self.rows[hit], self.taken_at[hit]], 1)
        events = np.stack([log.user_indices(), log.item_rows, log.times], 1)
        _, where = np.unique(np.concatenate([taken, events]), axis=0, return_inverse=True)
        return np.isin(where.ravel()[len(taken) :], where.ravel()[: len(taken)])

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


def _positive(source: SlateSource) -> list[str]:
    """Returns the types of the log's outcomes that say that a user wants an item."""
    names = read_log(source.folder, "outcomes").column("type").unique().to_pylist()
    return [name for name in names if name and source.kinds.kind(name) == "positive"]


def _conversions(source: SlateSource, shown: pa.Table, types: tuple[str, ...]) -> np.ndarray:
    """Returns [n] bool, True for shown items with an outcome of these types."""
    keys = ["token_id", "item_id"]
    hits = shown_items(source.folder, types)
    hits = hits.filter(pc.greater(hits.column("num_outcomes"), 0)).select(keys)
    of = [pc.binary_join_element_wise(*(t.column(k) for k in keys), " ") for t in (shown, hits)]
    return np.asarray(pc.is_in(of[0], value_set=of[1].combine_chunks()).to_numpy())


def _users(column: pa.ChunkedArray, log: EventLog, signer: Signer | None) -> np.ndarray:
    """Returns [n] int64 user of each row in the event log, -1 for none."""
    numbers = {user_id: number for number, user_id in enumerate(log.user_ids)}
    if signer is not None:
        numbers |= {signer.user(user_id): n for n, user_id in enumerate(log.user_ids)}
    coded = column.combine_chunks().dictionary_encode()
    table = [numbers.get(name, -1) for name in coded.dictionary.to_pylist()]
    codes = pc.fill_null(coded.indices, len(table)).to_numpy(zero_copy_only=False)
    found = np.array([*table, -1], np.int64)[codes]
    return np.asarray(np.where((found >= 0) & (log.lengths()[found] > 0), found, -1))
