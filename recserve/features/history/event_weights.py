"""Weights of events: how much one counts in training, in links between items and in `popular`.

    purchase=3        each event of the type counts 3
    rating<3.5=0.5    an event of the type with a lower value counts 0.5

Of several values of a type, the lowest that is above the event's value decides. An event that no
entry covers counts 1. One of weight 0 stays in its user's history, and nothing is learned from it.

The weight of a negative event says how much it lowers similar items, relative to other negative
events. Negative events that no entry covers lower nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from recserve.bounds import MAX_VALUE
from recserve.features.history.event_kinds import NEGATIVE, READ, EventKinds
from recserve.features.history.type_names import type_name_fault

MAX_WEIGHT = 100.0
MAX_DISLIKED = 20  # the latest items with a negative event that lower similar ones
FORM = "NAME=WEIGHT or NAME<VALUE=WEIGHT"


@dataclass(frozen=True)
class Steps:
    """Weights of a type by value: weight n is that of values below limit n, and of no lower one.

    Attributes:
        limits: [n] float32, ascending.
        weights: [n + 1] float32. The last one is that of all other values; NaN: none is named.
    """

    limits: np.ndarray
    weights: np.ndarray

    def of(self, values: np.ndarray) -> np.ndarray:
        """Returns [n] float32 weights of events with these values [n]; NaN where none is named."""
        return np.asarray(self.weights[np.searchsorted(self.limits, values, side="right")])


@dataclass(frozen=True)
class EventWeights:
    """Weights of event types and of ranges of their values.

    Attributes:
        entries: Texts `NAME=WEIGHT` and `NAME<VALUE=WEIGHT`.

    Raises:
        ValueError: If an entry has another form, a weight or a value is out of range, or two
            entries name the same type and value.
    """

    entries: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _ = self.steps

    def __bool__(self) -> bool:
        return bool(self.entries)

    @cached_property
    def steps(self) -> Mapping[str, Steps]:
        """The weights by name of the type."""
        found: dict[str, dict[float, float]] = {}
        for entry in self.entries:
            name, limit, weight = _parse(entry)
            if limit in found.setdefault(name, {}):
                where = "" if limit == math.inf else f" with values below {limit:g}"
                raise ValueError(f"event type {name!r}{where} has two weights")
            found[name][limit] = weight
        return {name: _steps(weights) for name, weights in found.items()}

    @property
    def named(self) -> tuple[str, ...]:
        """Names of the types."""
        return tuple(self.steps)

    @property
    def valued(self) -> tuple[str, ...]:
        """Names of the types whose weight depends on the value, so that an event needs one."""
        return tuple(name for name, steps in self.steps.items() if steps.limits.size)

    def of_events(
        self, names: Sequence[str], types: np.ndarray, values: np.ndarray, other: float = 1.0
    ) -> np.ndarray:
        """Returns [n] float32 weights of events.

        Args:
            names: Names of the types.
            types: [n] index into `names`.
            values: [n] values of the events.
            other: Weight of an event that no entry covers.
        """
        weights = np.full(types.shape, other, np.float32)
        for number, name in enumerate(names):
            if (steps := self.steps.get(name)) is not None:
                own = types == number
                given = steps.of(values[own])
                weights[own] = np.where(np.isnan(given), np.float32(other), given)
        return weights

    def check_kinds(self, kinds: EventKinds) -> None:
        """Raises ValueError if a type is `read`, which counts for nothing."""
        for name in self.named:
            if kinds.kind(name) == "read":
                raise ValueError(
                    f"event type {name!r} is read, so it counts for nothing; name it with "
                    "--positive or --negative, or give it no weight"
                )

    def record(self) -> list[str]:
        """Returns the entries of a bundle for its manifest."""
        return sorted(self.entries)

    @classmethod
    def read_record(cls, recorded: Any) -> EventWeights:
        """Returns what `record` wrote. Raises ValueError."""
        if not isinstance(recorded, list) or not all(isinstance(e, str) for e in recorded):
            raise ValueError(f"expected a list of texts {FORM}")
        return cls(tuple(recorded))


def disliked_items(
    rows: np.ndarray, kinds: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the latest MAX_DISLIKED items whose newest event is negative, and their weights.

    Args:
        rows: [n] item rows of a user's events, oldest first.
        kinds: [n] index into `KINDS` of each event.
        weights: [n] weight of each event. Items of weight 0 are left out.

    Returns:
        [d] rows and [d] weights, newest first.
    """
    judged = np.flatnonzero(kinds != READ)[::-1]
    newest = judged[np.unique(rows[judged], return_index=True)[1]]
    found = np.sort(newest[(kinds[newest] == NEGATIVE) & (weights[newest] > 0)])
    found = found[::-1][:MAX_DISLIKED]
    return rows[found], weights[found]


def _parse(entry: str) -> tuple[str, float, float]:
    """Returns name, limit (infinite without one) and weight of an entry."""
    rest, sign, text = entry.rpartition("=")
    weight = _number(text)
    if not sign or weight is None:
        raise ValueError(f"weight {entry[:80]!r}: expected {FORM}")
    if not 0 <= weight <= MAX_WEIGHT:
        raise ValueError(f"weight {entry[:80]!r}: the weight is {weight:g}; expected 0..100")
    name, sign, text = rest.rpartition("<")
    name, limit = (name.strip(), _number(text)) if sign else (rest, math.inf)
    if limit is None or (sign and not abs(limit) <= MAX_VALUE):
        raise ValueError(f"weight {entry[:80]!r}: expected a finite number after <")
    if (fault := type_name_fault(name)) is not None:
        raise ValueError(f"weight {entry[:80]!r}: {fault}")
    return name, limit, weight


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _steps(weights: Mapping[float, float]) -> Steps:
    """Returns the steps of a type from its weights by limit."""
    limits = sorted(limit for limit in weights if limit < math.inf)
    values = [*(weights[limit] for limit in limits), weights.get(math.inf, math.nan)]
    return Steps(np.array(limits, np.float32), np.array(values, np.float32))
