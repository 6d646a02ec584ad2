"""Builds the prefix of a request, which the engine caches, from a user history."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from recserve.core.request import Prefix, PrefixKeys
from recserve.features.ranking.cross_features import UserSide
from recserve.features.ranking.event_features import EventColumns
from recserve.features.ranking.ranking import (
    RankingPrefix,
    candidate_columns,
    prefix_columns,
    split_history,
    user_side,
    window_columns,
)
from recserve.features.ranking.ranking_tables import RankingTables
from recserve.features.tables.encoding import window_start
from recserve.models.inputs import NodeInputs
from recserve.models.ranker import node_inputs
from recserve.models.semantic_id_model import SemanticIdModel
from recserve.service.event_types import EventTypes
from recserve.service.history import History
from recserve.service.snapshot import Snapshot

CACHE_SIZE = 256
Parts = tuple[bytes, ...]


class RecommenderPrefixBuilder:
    """Builds prefixes of the recommender: the tokens that its template makes of the last events.

    The window of items slides by whole blocks, so that a prefix stays cached for several events.

    Attributes:
        config: Configuration of the recommender.
        template: Makes the tokens.
        device: Device of the tokens.
        block: Number of events by which the window slides.
        bonus: What the dense head's scores get for a history; None for nothing.
    """

    def __init__(self, model: SemanticIdModel, device: torch.device) -> None:
        self.config, self.template = model.config, model.template
        self.device = device
        self.block = self.template.block
        self.bonus = None if model.items is None else model.items.history_bonus

    def count_used(self, num_events: int) -> int:
        """Returns how many of a history's events are in the prefix."""
        return num_events - self._start(num_events)

    def build(self, snapshot: Snapshot, rows: np.ndarray, user: str | None) -> Prefix:
        """Returns the prefix of a history.

        Args:
            snapshot: The catalogue version.
            rows: [n] int64 item rows, oldest first.
            user: Id of the user. None if the request names none.
        """
        rows = rows[self._start(rows.size) :]
        tokens = self.template.tokens(rows, snapshot.items.codes, user)
        return Prefix(NodeInputs(torch.from_numpy(tokens).to(self.device)), tokens)

    def stale_keys(
        self, snapshot: Snapshot, rows: np.ndarray, left: np.ndarray, user: str
    ) -> Iterator[PrefixKeys]:
        """Yields the keys of cached prefixes to drop after a history has changed.

        If the template grows, the prefixes of a history are beginnings of the longest prefix of
        each window. So one key per window covers all of them.

        Args:
            snapshot: The catalogue version.
            rows: [n] int64 item rows of the former history, oldest first.
            left: [m] int64 item rows of the current history. The common beginning stays cached.
            user: Id of the user.
        """
        codes, template = snapshot.items.codes, self.template
        same = _same_beginning([(rows, left)])
        windows = [(self._start(n), n) for n in range(same + 1, rows.size + 1)]
        if template.grows:  # only the longest history of each start
            windows = list(dict(windows).items())
        for start, stop in windows:
            tokens = template.tokens(rows[start:stop], codes, user)
            common = template.tokens(rows[start : max(same, start)], codes, user)
            kept = common.size if template.grows else _same_beginning([(tokens, common)])
            yield PrefixKeys(tokens, 0, kept)

    def _start(self, num_events: int) -> int:
        return window_start(num_events, self.template.max_items, self.block)


class RankerPrefixBuilder:
    """Builds prefixes and candidate nodes of the ranker.

    Attributes:
        settings: Ranking features of the bundle.
        types: [256] the ranker's number of each stored event type; -1 for one it does not know.
        key_seed: Part of every prefix key, derived from the model version.
        device: Device of the inputs.
    """

    def __init__(
        self, tables: RankingTables, types: EventTypes, key_seed: int, device: torch.device
    ) -> None:
        self.settings = tables.settings
        self.types = types.indices(tables.settings.type_names)
        self.key_seed = key_seed
        self.device = device
        self._cache: OrderedDict[tuple[Parts, int], tuple[RankingPrefix, UserSide]] = OrderedDict()
        self._lock = threading.Lock()

    def build(
        self,
        snapshot: Snapshot,
        history: History,
        rows: np.ndarray,
        shown_at: np.ndarray | None,
        given: Mapping[str, np.ndarray],
    ) -> tuple[Prefix, NodeInputs, np.ndarray | None]:
        """Builds the prefix of a user and the nodes of M candidates.

        Args:
            snapshot: The catalogue version.
            history: The user's history.
            rows: [M] int64 item rows of the candidates.
            shown_at: [M] int64 microseconds of each exposure; None for now.
            given: [M] values of each side feature of the request; NaN if a candidate has none.

        Returns:
            The prefix, the candidates' inputs, and [M] how many nodes of the prefix each candidate
            sees; None if all candidates see the whole prefix.
        """
        tables = _tables(snapshot)
        columns, user = self._user_columns(snapshot, history)
        branches = candidate_columns(tables, columns, rows, shown_at, given, user)
        limits = None if shown_at is None else branches.prefix_limits
        return self._prefix(columns), self._inputs(branches.columns.arrays()), limits

    def build_user(self, snapshot: Snapshot, history: History) -> Prefix:
        """Returns the prefix of a user without candidates."""
        return self._prefix(self._user_columns(snapshot, history)[0])

    def stale_keys(
        self, snapshot: Snapshot, history: History, left: History
    ) -> Iterator[PrefixKeys]:
        """Yields the keys of cached prefixes to drop, like `RecommenderPrefixBuilder.stale_keys`.

        All rows of a window see the profile and the long history. So if an event before the
        window's recent events changes, no part of that prefix stays cached.
        """
        events, tables = self._events(history), _tables(snapshot)
        same = _same_beginning(list(zip(events.columns, self._events(left).columns, strict=True)))
        windows = {split_history(n, self.settings): n for n in range(same + 1, len(events) + 1)}
        for (start, split), stop in windows.items():
            columns = window_columns(tables, events.slice(0, stop), start, split, self.key_seed)
            kept = 1 + same - start if same >= max(split, 1) else 0
            yield PrefixKeys(columns.keys, columns.shared, kept)

    def _user_columns(self, snapshot: Snapshot, history: History) -> tuple[RankingPrefix, UserSide]:
        """Returns the columns that do not depend on candidates, from a small LRU cache."""
        events = self._events(history)
        key = (_parts(events), snapshot.items.number)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        columns = prefix_columns(_tables(snapshot), events, self.key_seed)
        entry = columns, user_side(_tables(snapshot), columns)
        with self._lock:
            self._cache[key] = entry
            while len(self._cache) > CACHE_SIZE:
                self._cache.popitem(last=False)
        return entry

    def _prefix(self, columns: RankingPrefix) -> Prefix:
        return Prefix(self._inputs(columns.columns.arrays()), columns.keys, columns.shared)

    def forget(self, history: History | None) -> None:
        """Drops cached columns.

        Args:
            history: Drops the columns of this history and of its beginnings. None drops all
                columns, so that nothing of a deleted user stays, not even of trimmed events.
        """
        whole = None if history is None else _parts(self._events(history))
        with self._lock:
            for parts, number in list(self._cache):
                if whole is None or all(map(bytes.startswith, whole, parts)):
                    del self._cache[parts, number]

    def _events(self, history: History) -> EventColumns:
        types = self.types[history.types]
        return EventColumns(history.rows, history.times, types, history.values)

    def _inputs(self, arrays: Mapping[str, np.ndarray]) -> NodeInputs:
        inputs = node_inputs(arrays)
        if self.device.type == "cpu":
            return inputs
        moved = {name: getattr(inputs, name).to(self.device) for name in arrays}
        return NodeInputs(**moved)


def _parts(events: EventColumns) -> Parts:
    return tuple(column.tobytes() for column in events.columns)


def _same_beginning(columns: Sequence[tuple[np.ndarray, np.ndarray]]) -> int:
    """Returns the length of the common beginning of two histories.

    Args:
        columns: Pairs of columns, one of each history.
    """
    size = min(len(columns[0][0]), len(columns[0][1]))
    differ = np.zeros(size + 1, dtype=bool)
    differ[size] = True
    for one, other in columns:
        differ[:size] |= one[:size] != other[:size]
    return int(differ.argmax())


def _tables(snapshot: Snapshot) -> RankingTables:
    assert snapshot.ranking is not None, "the snapshot has no tables for the ranker"
    return snapshot.ranking
