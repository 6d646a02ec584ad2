"""A ranking request as columns: the user's prefix, and candidates as branches below it.

    profile - long history - recent events -+- candidate 1
    (prefix, cached)                        +- candidate 2
                                            +- candidate M

The prefix is one profile token, the long history and the recent events. Profile and long history
change only when the window moves, by a block of events. A recent row does not depend on the time of
the request. A cached prefix therefore stays valid until the window moves, and a new event appends
one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from recserve.features.ranking.cross_features import (
    CROSS_COLUMNS,
    Contexts,
    UserSide,
    cross_features,
)
from recserve.features.ranking.event_features import (
    EVENT_COLUMNS,
    MOMENT_COLUMNS,
    PROFILE_COLUMNS,
    EventColumns,
    event_features,
    moment_features,
    profile_features,
)
from recserve.features.ranking.ranking_tables import RankingSettings, RankingTables, standardise
from recserve.features.tables.encoding import window_start

PROFILE, LONG, RECENT, CANDIDATE = range(4)
MIXERS = np.random.default_rng(20_251_120).integers(1, 2**63, 4096, dtype=np.uint64) | np.uint64(1)


@dataclass(frozen=True)
class Columns:
    """Inputs of the ranker, one row per token.

    Attributes:
        tokens: [n] int64 item rows, 0 for the profile.
        groups: [n] int64 PROFILE, LONG, RECENT or CANDIDATE.
        types: [n] int64 event type plus 1, 0 for none.
        times: [n] int64 position in the prefix.
        dense: [n, F] float32 features, see `dense_names`.
    """

    tokens: np.ndarray
    groups: np.ndarray
    types: np.ndarray
    times: np.ndarray
    dense: np.ndarray

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the columns by name, as `models.ranker.node_inputs` expects them."""
        return dict(vars(self))


@dataclass(frozen=True)
class RankingPrefix:
    """The prefix of one user.

    Attributes:
        columns: n rows.
        keys: [n] int64 hash of everything that a row's embedding depends on.
        shared: Number of profile and long rows, which every row sees.
        events: Events of the long and recent rows.
    """

    columns: Columns
    keys: np.ndarray
    shared: int
    events: EventColumns

    def __len__(self) -> int:
        return int(self.keys.shape[0])


@dataclass(frozen=True)
class RankingCandidates:
    """Candidates of one request.

    Attributes:
        columns: M rows, in the order of the request.
        prefix_limits: [M] int64 number of prefix rows that each candidate sees.
    """

    columns: Columns
    prefix_limits: np.ndarray


def dense_names(settings: RankingSettings) -> tuple[str, ...]:
    """Returns the names of the dense columns.

    Each group of tokens has its own columns, which are zero in the rows of other groups.
    """
    candidate = (*CROSS_COLUMNS, *MOMENT_COLUMNS)
    return (*PROFILE_COLUMNS, *EVENT_COLUMNS, *candidate, *settings.side_names)


def max_prefix_rows(settings: RankingSettings) -> int:
    """Returns the length of the longest prefix: profile, long history and recent events."""
    return 1 + settings.long_items + settings.recent_items


def split_history(num_events: int, settings: RankingSettings) -> tuple[int, int]:
    """Returns the first long event and the first recent event of a history.

    The recent part holds at most `recent_items` events. The split moves by `block` events.
    """
    split = window_start(num_events, settings.recent_items, settings.block)
    return max(0, split - settings.long_items), split


def prefix_columns(tables: RankingTables, events: EventColumns, key_seed: int = 0) -> RankingPrefix:
    """Returns the prefix of a user. An empty history gives the profile token alone.

    Args:
        tables: Tables of the catalogue version.
        events: All events of the user, oldest first.
        key_seed: Any number, such as a hash of the model version, that is mixed into every key.

    Raises:
        ValueError: If the tables lack an item row.
    """
    start, split = split_history(len(events), tables.settings)
    return window_columns(tables, events, start, split, key_seed)


def window_columns(
    tables: RankingTables, events: EventColumns, start: int, split: int, key_seed: int = 0
) -> RankingPrefix:
    """Returns a prefix with events start .. split - 1 as long history and all later ones as recent.

    Arguments and errors are those of `prefix_columns`.
    """
    _check_rows(tables, events.rows)
    window = events.slice(start, len(events))
    n = 1 + len(window)
    columns = _blank(n, tables.settings)
    columns.tokens[1:] = window.rows
    columns.groups[1 : 1 + split - start] = LONG
    columns.groups[1 + split - start :] = RECENT
    columns.types[1:] = window.types + 1
    columns.times[:] = np.arange(n)
    first = len(PROFILE_COLUMNS)
    columns.dense[0, :first] = profile_features(tables, events.slice(0, split))
    known = events.slice(max(start - 1, 0), len(events))
    described = event_features(tables, known)[len(known) - len(window) :]
    columns.dense[1:, first : first + len(EVENT_COLUMNS)] = described
    return RankingPrefix(columns, row_keys(columns, key_seed), 1 + split - start, window)


def candidate_columns(
    tables: RankingTables,
    prefix: RankingPrefix,
    rows: np.ndarray,
    shown_at: np.ndarray | None = None,
    given: Mapping[str, np.ndarray] | None = None,
    user: UserSide | None = None,
) -> RankingCandidates:
    """Returns the candidates of one request.

    Args:
        tables: Tables of the catalogue version.
        prefix: The user's prefix.
        rows: [M] item rows.
        shown_at: [M] int64 time of exposure, in the unit of the events' times. A candidate sees
            profile, long history and the recent events before that time. None shows all events.
        given: Numeric side information by name, [M] each. NaN keeps the catalogue's own value.
        user: Result of `user_side` for this prefix, if available. Ignored if `shown_at` is given.

    Raises:
        ValueError: If a row or a name is unknown, or columns differ in length.
    """
    rows = np.asarray(rows, dtype=np.int64)
    _check_rows(tables, rows)
    for name, column in {"shown_at": shown_at, **(given or {})}.items():
        if column is not None and len(column) != rows.size:
            raise ValueError(f"{name} has {len(column)} entries for {rows.size} candidates")
    limits = np.full(rows.size, len(prefix), dtype=np.int64)
    if shown_at is None:
        side = user_side(tables, prefix) if user is None else user
        cross = cross_features(tables, side, np.zeros_like(rows), rows)
    else:
        # Row 0 is the profile, so prefix row i belongs to event i - 1.
        recent_times = prefix.events.times[prefix.shared - 1 :]
        limits = prefix.shared + np.searchsorted(recent_times, shown_at, side="left")
        # One context per distinct number of visible events (limits without the profile row).
        lengths, owners = np.unique(limits - 1, return_inverse=True)
        side = _side(tables, prefix, lengths)
        order = np.argsort(owners, kind="stable")
        cross = np.empty((rows.size, len(CROSS_COLUMNS)), dtype=np.float32)
        cross[order] = cross_features(tables, side, owners[order], rows[order])
    last = np.zeros(rows.size, dtype=np.int64)
    if len(prefix.events):
        last = prefix.events.times[(limits - 2).clip(min=0)]
    moments = moment_features(tables.settings, shown_at, last, limits > 1)
    columns = candidate_rows(tables, rows, limits, cross, moments)
    _override(columns.dense, tables.settings, given or {})
    return RankingCandidates(columns, limits)


def user_side(tables: RankingTables, prefix: RankingPrefix) -> UserSide:
    """Returns the user's side of candidates without a time of exposure, which see all events."""
    return _side(tables, prefix, np.array([len(prefix) - 1]))


def candidate_rows(
    tables: RankingTables,
    rows: np.ndarray,
    limits: np.ndarray,
    cross: np.ndarray,
    moments: np.ndarray,
) -> Columns:
    """Returns the rows of candidates, with side information from the tables.

    Args:
        tables: Tables of the catalogue version.
        rows: [M] item rows.
        limits: [M] number of prefix rows that each candidate sees.
        cross: [M, 16] cross features.
        moments: [M, 6] moment features.
    """
    columns = _blank(rows.size, tables.settings)
    columns.tokens[:] = rows
    columns.groups[:] = CANDIDATE
    columns.times[:] = limits
    first = len(PROFILE_COLUMNS) + len(EVENT_COLUMNS)
    columns.dense[:, first:] = np.concatenate([cross, moments, tables.side[rows]], axis=1)
    return columns


def row_keys(columns: Columns, key_seed: int = 0) -> np.ndarray:
    """Returns [n] int64 hashes of the rows; equal rows have equal keys."""
    integers = np.stack([columns.tokens, columns.groups, columns.types, columns.times], 1)
    words = np.concatenate(
        [integers.view(np.uint64), columns.dense.view(np.uint32).astype(np.uint64)], axis=1
    )
    if words.shape[1] > MIXERS.size:
        raise ValueError(f"{words.shape[1]} columns; at most {MIXERS.size} can be hashed")
    # Multiply-xorshift mixing with one odd factor per column, then a xor over the columns.
    mixed = words * MIXERS[: words.shape[1]]
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    mixed += MIXERS[: words.shape[1]]
    total = np.bitwise_xor.reduce(mixed * MIXERS[: words.shape[1]], axis=1)
    total ^= np.uint64(key_seed * int(MIXERS[0]) % 2**64)
    total ^= total >> np.uint64(31)
    return np.asarray((total * np.uint64(0x94D049BB133111EB)).view(np.int64))


def visible_rows(prefix: RankingPrefix) -> np.ndarray:
    """Returns [n] int64 number of prefix rows that each prefix row sees.

    Shared rows see each other; recent rows see earlier rows and themselves.
    """
    return np.maximum(np.arange(1, len(prefix) + 1), prefix.shared)


def _side(tables: RankingTables, prefix: RankingPrefix, lengths: np.ndarray) -> UserSide:
    """Returns the user's side with one context for each number of events seen."""
    return UserSide.of(tables, Contexts.of(prefix.events.rows, prefix.events.values, lengths))


def _blank(n: int, settings: RankingSettings) -> Columns:
    """Returns n rows of zeros."""
    tokens, groups, types, times = np.zeros((4, n), dtype=np.int64)
    dense = np.zeros((n, len(dense_names(settings))), dtype=np.float32)
    return Columns(tokens, groups, types, times, dense)


def _check_rows(tables: RankingTables, rows: np.ndarray) -> None:
    """Raises ValueError for an item row that the tables lack."""
    if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < tables.num_items:
        raise ValueError(
            f"item rows span {rows.min()}..{rows.max()}; expected 0..{tables.num_items - 1}"
        )


def _override(
    dense: np.ndarray, settings: RankingSettings, given: Mapping[str, np.ndarray]
) -> None:
    """Replaces side information of the candidates by the request's values, except NaN."""
    unknown = set(given) - set(settings.side_names)
    if unknown:
        known = ", ".join(settings.side_names) or "none"
        raise ValueError(f"unknown candidate features {sorted(unknown)}; this ranker has: {known}")
    if not given:
        return
    num_side = len(settings.side_names)
    values = np.full((dense.shape[0], num_side), np.nan)
    for name, column in given.items():
        values[:, settings.side_names.index(name)] = column
    scaled = standardise(values, settings)
    dense[:, -num_side:] = np.where(np.isnan(values), dense[:, -num_side:], scaled)
