"""Event features of the ranker that do not depend on the item: values, gaps and clock."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recserve.features.ranking.ranking_tables import RankingSettings, RankingTables
from recserve.features.tables.events import EventLog

PROFILE_COLUMNS = ("earlier_events", "earlier_count", "earlier_value", "earlier_conversions")
EVENT_COLUMNS = (
    *("event_log_count", "event_log_gap", "event_value", "event_conversion"),
    *("event_hour_sin", "event_hour_cos", "event_weekday_sin", "event_weekday_cos"),
)
MOMENT_COLUMNS = (
    *("log_wait", "has_moment"),
    *("moment_hour_sin", "moment_hour_cos", "moment_weekday_sin", "moment_weekday_cos"),
)
HOUR = 3_600_000_000


@dataclass(frozen=True)
class EventColumns:
    """A user's events, oldest first, in the units of EventLog.

    Attributes:
        rows: [n] item rows.
        times: [n] times.
        types: [n] event types.
        values: [n] event values.
    """

    rows: np.ndarray
    times: np.ndarray
    types: np.ndarray
    values: np.ndarray

    @staticmethod
    def of(log: EventLog, user: int) -> EventColumns:
        """Returns the events of one user of a log."""
        part = slice(int(log.offsets[user]), int(log.offsets[user + 1]))
        return EventColumns(log.item_rows[part], log.times[part], log.types[part], log.values[part])

    @property
    def columns(self) -> tuple[np.ndarray, ...]:
        """All columns, [n] each."""
        return (self.rows, self.times, self.types, self.values)

    def __len__(self) -> int:
        return int(self.rows.shape[0])

    def slice(self, start: int, stop: int) -> EventColumns:
        """Returns events start .. stop - 1."""
        part = np.s_[start:stop]
        return EventColumns(self.rows[part], self.times[part], self.types[part], self.values[part])


def profile_features(tables: RankingTables, earlier: EventColumns) -> np.ndarray:
    """Returns [4] features of the events before the split; zeros without events."""
    if not len(earlier):
        return np.zeros(len(PROFILE_COLUMNS))
    s = tables.settings
    return np.array(
        [
            np.log1p(len(earlier)),
            np.log1p(tables.item_counts[earlier.rows]).mean(),
            earlier.values.mean() - s.mean_value if s.has_values else 0.0,
            s.is_conversion(earlier.types, earlier.values).mean() if s.tells_conversions else 0.0,
        ]
    )


def event_features(tables: RankingTables, events: EventColumns) -> np.ndarray:
    """Returns [n, 8] features of a user's events.

    The features are log popularity of the item, log hours since the previous event, value,
    conversion, hour and weekday.
    """
    s = tables.settings
    out = np.zeros((len(events), len(EVENT_COLUMNS)), dtype=np.float32)
    out[:, 0] = np.log1p(tables.item_counts[events.rows])
    if s.has_timestamps:
        out[1:, 1] = np.log1p(np.diff(events.times).clip(min=0) / HOUR)
        out[:, 4:] = _clock(events.times)
    if s.has_values:
        out[:, 2] = events.values - s.mean_value
    if s.tells_conversions:
        out[:, 3] = s.is_conversion(events.types, events.values)
    return out


def moment_features(
    settings: RankingSettings, shown_at: np.ndarray | None, last: np.ndarray, has_last: np.ndarray
) -> np.ndarray:
    """Returns [M, 6] features of the moments at which candidates were shown.

    The features are log hours since the last event, whether the moment is known, hour and weekday.

    Args:
        settings: Settings of the tables.
        shown_at: [M] moments, or None if unknown.
        last: [M] time of the last event seen.
        has_last: [M] bool, whether there is such an event.
    """
    out = np.zeros((last.size, len(MOMENT_COLUMNS)), dtype=np.float32)
    if shown_at is not None and settings.has_timestamps:
        wait = np.where(has_last, np.asarray(shown_at) - last, 0).clip(min=0)
        out[:, 0] = np.log1p(wait / HOUR)
        out[:, 1] = 1
        out[:, 2:] = _clock(np.asarray(shown_at))
    return out


def _clock(times: np.ndarray) -> np.ndarray:
    """Returns [n, 4]: sine and cosine of the hour of the day and of the weekday, UTC."""
    angles = [2 * np.pi * (times % period) / period for period in (24 * HOUR, 168 * HOUR)]
    return np.stack([f(a) for a in angles for f in (np.sin, np.cos)], axis=1)
