"""Event types of a service: the names that it accepts, and their numbers in its store.

A stored event holds the number of its type. The numbers 0 to 13 belong to the built-in names in
every store. The store itself holds the names of further numbers as marks, which only grow, so that
all servers of a store read the same name:

    14 "add_to_wishlist"    15 "newsletter"    16 ...

Of two servers that give the same number away at the same time one succeeds. The other one reads the
marks again, and takes the next number. Earlier versions kept the names as the history of a
pseudo-user; they are moved when they are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from recserve.features.history.event_kinds import KINDS, NEGATIVE, POSITIVE, EventKinds
from recserve.features.history.event_weights import EventWeights
from recserve.features.history.history import (
    CorruptHistory,
    HistoryStore,
    StoreUnavailable,
    mark_id,
    unpack_marks,
)
from recserve.features.history.type_names import (
    EVENT_TYPES,
    MAX_EVENT_TYPES,
    MAX_TYPE_BYTES,
    check_type_names,
)
from recserve.features.words import closest

MARKS = "event-types"
TYPE_TABLE = mark_id(MARKS)  # of earlier versions
UNNAMED = 255  # kind of a number whose name this server has not read
MAX_LISTED, NEAR = 20, 3  # names in the message about an unknown one, nearest of them


class EventTypes:
    """Names and numbers of the event types.

    Attributes:
        store: The history store, which holds the table of further names.
        kinds: Which types are positive, read and negative.
        weights: How much events count.
        below: Value below which an event is negative, by number of its type.
        valued: Numbers of the types whose events need a value.
        known: Names that the service accepts: the built-in ones, then its own in order.
    """

    def __init__(
        self,
        store: HistoryStore,
        kinds: EventKinds | None = None,
        weights: EventWeights | None = None,
    ) -> None:
        self.store = store
        self.kinds = EventKinds() if kinds is None else kinds
        self.weights = EventWeights() if weights is None else weights
        self.below: dict[int, float] = {}
        self.valued: set[int] = set()
        self.known: tuple[str, ...] = EVENT_TYPES
        self._names: tuple[str, ...] = EVENT_TYPES  # by number; other servers may have added some
        self._numbers: dict[str, int] = {}
        self._set_known(EVENT_TYPES)

    def add(self, names: Iterable[str]) -> None:
        """Accepts further names, and gives those a number that have none in this store.

        Raises:
            ValueError: If a name is blank or too long, or if there are too many.
            StoreUnavailable: If the store does not answer.
            CorruptHistory: If the table is damaged.
        """
        known = {*self.known, *names}
        check_type_names(known)
        for _ in range(MAX_EVENT_TYPES):  # a round fails only if another server adds a name
            missing = sorted(known - set(self._names))
            if not missing:
                break
            self._names = self._read()
            missing = [name for name in missing if name not in self._names]
            if len(self._names) + len(missing) > MAX_EVENT_TYPES:
                shown = ", ".join(repr(name) for name in missing[:MAX_LISTED])
                raise ValueError(
                    f"the history store has {len(self._names)} event types of at most "
                    f"{MAX_EVENT_TYPES}, and no room for {shown}; use an empty store"
                )
            if missing:
                self.store.add_marks(MARKS, len(self._names) - len(EVENT_TYPES), missing)
        else:
            raise StoreUnavailable("the history store has not kept the names of event types")
        self._set_known((*EVENT_TYPES, *sorted(known - set(EVENT_TYPES))))

    def number(self, name: str) -> int:
        """Returns the number of a name. Raises ValueError with the known names, nearest first."""
        number = self._numbers.get(name)
        if number is None:
            near = self._near(name[:MAX_TYPE_BYTES])
            listed = [*near, *(known for known in self.known if known not in near)]
            more = len(listed) - MAX_LISTED
            end = f" and {more} more, see GET /v1/event-types" if more > 0 else ""
            names = ", ".join(listed[:MAX_LISTED])
            raise ValueError(f"type is {name[:40]!r}; expected one of {names}{end}")
        return number

    def numbers(self, names: Sequence[str]) -> np.ndarray:
        """Returns [n] int64 numbers; a name that is not known counts as `event`."""
        return np.array([self._numbers.get(name, 0) for name in names], np.int64)

    def names(self, numbers: np.ndarray) -> list[str]:
        """Returns the names of stored numbers [n], also of names that other servers added.

        Raises:
            StoreUnavailable: If the store does not answer.
            CorruptHistory: If the store has no name for a number.
        """
        highest = int(numbers.max(initial=0))
        if highest >= len(self._names):
            self._names = self._read()
        if highest >= len(self._names):
            raise CorruptHistory(
                f"a stored event has the type number {highest}, and the store has names for 0 to "
                f"{len(self._names) - 1}"
            )
        return [self._names[number] for number in numbers.tolist()]

    def kinds_of(self, numbers: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Returns the kind of each stored event.

        Args:
            numbers: [n] numbers of the types.
            values: [n] values of the events.

        Returns:
            [n] uint8 index into `event_kinds.KINDS`.

        Raises:
            StoreUnavailable, CorruptHistory: As in `names`.
        """
        kinds = self._kinds[numbers]
        if kinds.size and kinds.max() == UNNAMED:  # another server has added a name
            self.names(numbers)
            self._set_known(self.known)
            kinds = self._kinds[numbers]
        if self.below:
            kinds[values < self._limits[numbers]] = NEGATIVE
        return np.asarray(kinds)

    def is_positive(self, number: int, value: float) -> bool:
        """Returns whether an event of a known type is positive."""
        if self.below and np.float32(value) < self._limits[number]:
            return False
        return number in self._positive

    def weights_of(self, numbers: np.ndarray, values: np.ndarray, other: float = 1.0) -> np.ndarray:
        """Returns [n] float32 weights of stored events; `other` where nothing names one.

        Args:
            numbers: [n] numbers of the types.
            values: [n] values of the events.
            other: Weight of an event that no entry covers.
        """
        names = self.weights.named
        values = np.asarray(values, np.float32)
        return self.weights.of_events(names, self.indices(names)[numbers], values, other)

    def indices(self, names: Sequence[str]) -> np.ndarray:
        """Returns [256] int64 index into `names` for each number; -1 for all other types."""
        found = np.full(256, -1, np.int64)
        for index, name in enumerate(names):
            if name in self._numbers:
                found[self._numbers[name]] = index
        return found

    def _set_known(self, known: tuple[str, ...]) -> None:
        numbers = {name: number for number, name in enumerate(self._names)}
        self._numbers = {name: numbers[name] for name in known}
        self._kinds = np.full(256, UNNAMED, np.uint8)
        self._kinds[: len(self._names)] = [KINDS.index(self.kinds.kind(n)) for n in self._names]
        self._positive = set(np.flatnonzero(self._kinds == POSITIVE).tolist())
        below = self.kinds.below()
        self.below = {numbers[name]: limit for name, limit in below.items() if name in numbers}
        valued = {numbers[name] for name in self.weights.valued if name in numbers}
        self.valued = {*self.below, *valued}
        self._limits = np.full(256, -np.inf, np.float32)
        self._limits[list(self.below)] = list(self.below.values())
        self.known = known
        self._near = lru_cache(256)(lambda name: closest(name, known, NEAR))

    def _read(self) -> tuple[str, ...]:
        """Returns the names of all numbers."""
        further = self.store.marks(MARKS)
        if not further:
            old = self.store.get(TYPE_TABLE)
            if old.size:
                self.store.add_marks(MARKS, 0, unpack_marks(old, MARKS, len(EVENT_TYPES)))
                further = self.store.marks(MARKS)
                self.store.delete(TYPE_TABLE)
        return (*EVENT_TYPES, *further)
