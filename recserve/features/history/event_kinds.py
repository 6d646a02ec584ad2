"""Kinds of event types: whether an event says that a user wants the item.

- `positive`: the model reads it, and training and popularity count it.
- `read`: the user has seen the item. It counts for nothing else.
- `negative`: the user does not want the item. It is hidden from the user until a positive event.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from recserve.features.history.type_names import type_name_fault

Kind = Literal["positive", "read", "negative"]
KINDS: tuple[Kind, ...] = ("positive", "read", "negative")
POSITIVE, READ, NEGATIVE = range(3)
# Kinds of names that no setting names, in lower case with underscores. All others are positive.
READ_NAMES = frozenset(["impression", "impressions", "exposure", "shown", "displayed"])
NEGATIVE_NAMES = frozenset(
    [
        *("dislike", "hide", "skip", "not_interested", "unlike", "thumbs_down", "downvote"),
        *("remove", "remove_from_cart", "return", "refund", "block", "report"),
    ]
)


@dataclass(frozen=True)
class EventKinds:
    """Kinds of event types. A type that is not named has the kind of its name.

    Attributes:
        positive: Names of positive types.
        read: Names of read types.
        negative: Names of negative types. `NAME<VALUE`, as in `rating<2.5`, makes the events of a
            type with a lower value negative, and leaves the others as they are.

    Raises:
        ValueError: If a name is invalid or has two kinds, or a value is not finite.
    """

    positive: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    negative: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        whole: dict[str, Kind] = {}
        for kind in KINDS:
            for entry in getattr(self, kind):
                name, below = _divide(entry) if kind == "negative" else (entry, None)
                if (fault := type_name_fault(name)) is not None:
                    raise ValueError(fault)
                if below is not None and not math.isfinite(below):
                    raise ValueError(f"{entry!r}: expected a finite number after <")
                if below is None and whole.setdefault(name, kind) != kind:
                    raise ValueError(f"event type {name!r} is both {whole[name]} and {kind}")
        limits = [name for name, below in map(_divide, self.negative) if below is not None]
        for name in limits:
            if whole.get(name) == "negative" or limits.count(name) > 1:
                raise ValueError(f"event type {name!r} is named twice as negative")

    @property
    def named(self) -> tuple[str, ...]:
        """Names of the types, each once."""
        every = [*self.positive, *self.read, *(_divide(entry)[0] for entry in self.negative)]
        return tuple(dict.fromkeys(every))

    def kind(self, name: str) -> Kind:
        """Returns the kind of a type, for events with a value that is not low."""
        for kind in KINDS:
            if name in getattr(self, kind):
                return kind
        plain = name.strip().lower().replace("-", "_").replace(" ", "_")
        if plain in NEGATIVE_NAMES:
            return "negative"
        return "read" if plain in READ_NAMES else "positive"

    def below(self) -> dict[str, float]:
        """Returns the value below which an event is negative, for each type that has one."""
        parts = map(_divide, self.negative)
        return {name: below for name, below in parts if below is not None}

    def of_events(self, names: Sequence[str], types: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Returns the kind of each event.

        Args:
            names: Names of the types.
            types: [n] index into `names`.
            values: [n] values of the events.

        Returns:
            [n] uint8 index into `KINDS`.
        """
        table = np.array([KINDS.index(self.kind(name)) for name in names], np.uint8)
        kinds = np.asarray(table[types])
        if limits := self.below():
            low = np.array([limits.get(name, -np.inf) for name in names], np.float32)
            kinds[values < low[types]] = NEGATIVE
        return kinds

    def over(self, other: EventKinds) -> EventKinds:
        """Returns these kinds, and those of `other` for the types that these do not name."""
        own = set(self.named)
        more = {
            kind: tuple(e for e in getattr(other, kind) if _divide(e)[0] not in own)
            for kind in KINDS
        }
        return replace(self, **{kind: (*getattr(self, kind), *more[kind]) for kind in KINDS})

    def record(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Returns the kinds of a bundle for its manifest, so that they do not depend on defaults.

        Args:
            names: Types of the bundle's events. Positive ones are not recorded unless named.
        """
        plain = [name for name in names if name not in self.positive + self.read + self.negative]
        found = {
            kind: sorted({*getattr(self, kind), *(n for n in plain if self.kind(n) == kind)})
            for kind in ("read", "negative")
        }
        return {k: v for k, v in {"positive": sorted(self.positive), **found}.items() if v}

    @classmethod
    def read_record(cls, recorded: Any) -> EventKinds:
        """Returns what `record` wrote. Raises ValueError."""
        if not isinstance(recorded, Mapping) or not set(recorded) <= set(KINDS):
            raise ValueError(f"expected an object with {', '.join(KINDS)}")
        for names in recorded.values():
            if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
                raise ValueError("expected lists of names")
        return cls(**{kind: tuple(names) for kind, names in recorded.items()})


def _divide(entry: str) -> tuple[str, float | None]:
    """Returns the name of an entry of `negative`, and its value if it has one."""
    name, sign, text = entry.rpartition("<")
    try:
        return (name.strip(), float(text)) if sign else (entry, None)
    except ValueError:
        return entry, None
