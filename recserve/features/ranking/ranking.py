"""A ranking request as columns: the root of a user, and candidates as branches under it.

The root is one profile token, the long history and the recent events. Profile and long history
change only when the window slides, by a block of events; a recent row says nothing about the time
of the request. So a cached root survives until the window slides, and a new event appends one row.
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
    """What the ranker reads, one row per token.

    tokens [n] int64 item rows (0 for the profile). groups, types, times [n] int64: `times` is the
    position in the root, type 0 is "none". dense [n, F] float32, see `dense_names`.
    """

    tokens: np.ndarray
    groups: np.ndarray
    types: np.ndarray
    times: np.ndarray
    dense: np.ndarray

    def arrays(self) -> dict[str, np.ndarray]:
        """By name, as `models.ranker.node_inputs` takes them."""
        return dict(vars(self))


@dataclass(frozen=True)
class RankingRoot:
    """The root of one user.

    columns: n rows. keys [n] int64: hash of all that a row's embedding depends on. shared: number
    of profile and long rows, which everybody sees. events: those of the long and recent rows.
    """

    columns: Columns
    keys: np.ndarray
    shared: int
    events: EventColumns

    def __len__(self) -> int:
        return int(self.keys.shape[0])


@dataclass(frozen=True)
class RankingCandidates:
    """columns: M rows, in the order given. root_limits [M] int64: how many root rows each sees."""

    columns: Columns
    root_limits: np.ndarray


def dense_names(settings: RankingSettings) -> tuple[str, ...]:
    """Names of the dense columns: each group of tokens has its own, zero in the others' rows."""
    candidate = (*CROSS_COLUMNS, *MOMENT_COLUMNS)
    return (*PROFILE_COLUMNS, *EVENT_COLUMNS, *candidate, *settings.side_names)


def max_root_rows(settings: RankingSettings) -> int:
    """The longest root: profile, long history, recent events."""
    return 1 + settings.long_items + settings.recent_items


def split_history(num_events: int, settings: RankingSettings) -> tuple[int, int]:
    """First long event and first recent event of a history.

    The recent part holds at most recent_items events; the split moves by `block` events at a time.
    """
    split = window_start(num_events, settings.recent_items, settings.block)
    return max(0, split - settings.long_items), split


def root_columns(tables: RankingTables, events: EventColumns, salt: int = 0) -> RankingRoot:
    """The root of a user with these events; an empty history gives the profile token alone.

    salt: any number, e.g. a hash of the model version; part of every key.
    Raises ValueError for an item row that the tables do not have.
    """
    start, split = split_history(len(events), tables.settings)
    return window_columns(tables, events, start, split, salt)


def window_columns(
    tables: RankingTables, events: EventColumns, start: int, split: int, salt: int = 0
) -> RankingRoot:
    """The root with start .. split - 1 as long history and everything after it as recent events."""
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
    return RankingRoot(columns, row_keys(columns, salt), 1 + split - start, window)


def candidate_columns(
    tables: RankingTables,
    root: RankingRoot,
    rows: np.ndarray,
    shown_at: np.ndarray | None = None,
    given: Mapping[str, np.ndarray] | None = None,
    user: UserSide | None = None,
) -> RankingCandidates:
    """Candidates of one request.

    rows: [M] item rows. shown_at [M] int64: time of exposure in the unit of the events' times; a
    candidate sees profile, long history and the recent events before that time; None: all events.
    given: numeric side information by name, [M] each, NaN where the catalogue's own value holds.
    user: of `user_side` for this root, where the caller kept it; read only without shown_at.
    Raises ValueError for an unknown row or name, or columns that differ in length.
    """
    rows = np.asarray(rows, dtype=np.int64)
    _check_rows(tables, rows)
    for name, column in {"shown_at": shown_at, **(given or {})}.items():
        if column is not None and len(column) != rows.size:
            raise ValueError(f"{name} has {len(column)} entries for {rows.size} candidates")
    limits = np.full(rows.size, len(root), dtype=np.int64)
    if shown_at is None:
        side = user_side(tables, root) if user is None else user
        cross = cross_features(tables, side, np.zeros_like(rows), rows)
    else:
        recent_times = root.events.times[root.shared - 1 :]
        limits = root.shared + np.searchsorted(recent_times, shown_at, side="left")
        lengths, owners = np.unique(limits - 1, return_inverse=True)
        side = _side(tables, root, lengths)
        order = np.argsort(owners, kind="stable")
        cross = np.empty((rows.size, len(CROSS_COLUMNS)), dtype=np.float32)
        cross[order] = cross_features(tables, side, owners[order], rows[order])
    last = np.zeros(rows.size, dtype=np.int64)
    if len(root.events):
        last = root.events.times[(limits - 2).clip(min=0)]
    moments = moment_features(tables.settings, shown_at, last, limits > 1)
    columns = candidate_rows(tables, rows, limits, cross, moments)
    _override(columns.dense, tables.settings, given or {})
    return RankingCandidates(columns, limits)


def user_side(tables: RankingTables, root: RankingRoot) -> UserSide:
    """What candidates without a moment of exposure share: everything the user did is known."""
    return _side(tables, root, np.array([len(root) - 1]))


def candidate_rows(
    tables: RankingTables,
    rows: np.ndarray,
    limits: np.ndarray,
    cross: np.ndarray,
    moments: np.ndarray,
) -> Columns:
    """Candidate tokens from cross [M, 16] and moments [M, 6]; side information is added."""
    columns = _blank(rows.size, tables.settings)
    columns.tokens[:] = rows
    columns.groups[:] = CANDIDATE
    columns.times[:] = limits
    first = len(PROFILE_COLUMNS) + len(EVENT_COLUMNS)
    columns.dense[:, first:] = np.concatenate([cross, moments, tables.side[rows]], axis=1)
    return columns


def row_keys(columns: Columns, salt: int = 0) -> np.ndarray:
    """[n] int64 hash of each row's columns; equal rows have equal keys."""
    integers = np.stack([columns.tokens, columns.groups, columns.types, columns.times], 1)
    words = np.concatenate(
        [integers.view(np.uint64), columns.dense.view(np.uint32).astype(np.uint64)], axis=1
    )
    if words.shape[1] > MIXERS.size:
        raise ValueError(f"{words.shape[1]} columns; at most {MIXERS.size} can be hashed")
    mixed = words * MIXERS[: words.shape[1]]
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    mixed += MIXERS[: words.shape[1]]
    total = np.bitwise_xor.reduce(mixed * MIXERS[: words.shape[1]], axis=1)
    total ^= np.uint64(salt * int(MIXERS[0]) % 2**64)
    total ^= total >> np.uint64(31)
    return np.asarray((total * np.uint64(0x94D049BB133111EB)).view(np.int64))


def visible_rows(root: RankingRoot) -> np.ndarray:
    """[n] int64, how many root rows each sees: the shared ones each other, recent ones causally."""
    return np.maximum(np.arange(1, len(root) + 1), root.shared)


def _side(tables: RankingTables, root: RankingRoot, lengths: np.ndarray) -> UserSide:
    """One context for each number of events seen."""
    return UserSide.of(tables, Contexts.of(root.events.rows, root.events.values, lengths))


def _blank(n: int, settings: RankingSettings) -> Columns:
    tokens, groups, types, times = np.zeros((4, n), dtype=np.int64)
    dense = np.zeros((n, len(dense_names(settings))), dtype=np.float32)
    return Columns(tokens, groups, types, times, dense)


def _check_rows(tables: RankingTables, rows: np.ndarray) -> None:
    if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < tables.num_items:
        raise ValueError(
            f"item rows span {rows.min()}..{rows.max()}; expected 0..{tables.num_items - 1}"
        )


def _override(
    dense: np.ndarray, settings: RankingSettings, given: Mapping[str, np.ndarray]
) -> None:
    """Replace side information of the candidates by what the request says, NaN leaves it."""
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
