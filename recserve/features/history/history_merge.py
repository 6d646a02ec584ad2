"""Applies additions, replacements, removals and expiry of events to a history."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from recserve.bounds import MIN_TIME_US
from recserve.features.history.history import (
    Applied,
    Change,
    Correction,
    Expiry,
    Removal,
    Revised,
    StoredEvent,
    records,
)


@dataclass(frozen=True)
class Merged:
    """A history after changes.

    Attributes:
        history: EVENT_DTYPE array.
        applied: Which changes were made.
    """

    history: np.ndarray
    applied: Applied


def merge(history: np.ndarray, changes: Sequence[Change], cap: int) -> Merged:
    """Makes changes in the given order, then trims a history of over `2 * cap` events to `cap`.

    A new event is inserted by time, after events of the same time. An event whose key is already
    stored is skipped. A replacement with another time is moved likewise; any other replacement
    keeps its position.

    Args:
        history: EVENT_DTYPE array, oldest first.
        changes: Changes in the order in which they are made.
        cap: Events per user.
    """
    after = history
    taken: list[bool] = []
    for run in runs(changes):
        done = _added(after, run) if isinstance(run, list) else _corrected(after, run)
        after = done.history
        taken += done.applied.taken
    trimmed = after[-cap:] if len(after) > 2 * cap else after
    revised = None if _begins_with(trimmed, history) else Revised(history, trimmed)
    return Merged(trimmed, Applied(taken, revised))


def runs(changes: Sequence[Change]) -> Iterator[list[StoredEvent] | Correction]:
    """Yields changes in order, with consecutive new events grouped as one list."""
    for are_new, run in groupby(changes, lambda change: isinstance(change, StoredEvent)):
        if are_new:
            yield [change for change in run if isinstance(change, StoredEvent)]
        else:
            yield from (change for change in run if not isinstance(change, StoredEvent))


def _added(history: np.ndarray, events: Sequence[StoredEvent]) -> Merged:
    """Inserts new events by time."""
    new = records(events)
    known = set(history["event_key"].tolist())
    accepted = []
    for key in new["event_key"].tolist():
        accepted.append(key not in known)
        known.add(key)
    fresh = new[accepted]
    if fresh.size:
        fresh = fresh[np.argsort(fresh["time_us"], kind="stable")]
        late = history.size > 0 and fresh["time_us"][0] < history["time_us"][-1]
        history = np.concatenate([history, fresh])
        if late:
            history = history[np.argsort(history["time_us"], kind="stable")]
    return Merged(history, Applied(accepted))


def without_expired(history: np.ndarray, before_us: int) -> np.ndarray:
    """Returns a history without the timestamps before `before_us`; positions have no age."""
    dated, kept = np.searchsorted(history["time_us"], [MIN_TIME_US, before_us])
    if kept <= dated:
        return history
    return np.concatenate([history[:dated], history[kept:]]) if dated else history[kept:]


def _corrected(history: np.ndarray, change: Correction) -> Merged:
    """Replaces or removes one event, or removes the events that have expired."""
    if isinstance(change, Expiry):
        rest = without_expired(history, change.before_us)
        return Merged(rest, Applied([rest.size < history.size]))
    found = np.flatnonzero(history["event_key"] == np.uint64(change.event_key))
    if not found.size:
        return Merged(history, Applied([False]))
    place = int(found[0])
    rest = np.delete(history, place)
    if isinstance(change, Removal):
        return Merged(rest, Applied([True]))
    new, time_us = records([change.event]), history["time_us"][place]
    if change.keeps_time:
        new["time_us"] = time_us
    elif change.event.time_us != time_us:
        # After events of the same time.
        place = int(np.searchsorted(rest["time_us"], change.event.time_us, side="right"))
    return Merged(np.concatenate([rest[:place], new, rest[place:]]), Applied([True]))


def _begins_with(history: np.ndarray, beginning: np.ndarray) -> bool:
    """Whether a history starts with exactly these events."""
    return history[: len(beginning)].tobytes() == beginning.tobytes()
