"""What a log of several bundles holds up to a position, and the snapshot that replaces it.

A snapshot has three kinds of change sets:

    own        the difference of the bundle of the server that writes it
    others     the same of each other bundle, with its own vectors and semantic ids
    remains    fields, embedding and position of the latest change of each item, for a bundle that
               has not carried it over yet, or that comes later

So each bundle finds what its servers had, and what it still has to carry over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

from recserve.features.catalog.versions import ChangeSet, ItemChange

MAX_BUNDLES = 4  # in a snapshot; a bundle that has not written for longer starts like a new one


@dataclass
class BundleItems:
    """The changed items of one bundle, as its own change sets have left them.

    Attributes:
        changes: Latest record, vector and semantic id of each item that was put, in the order of
            their semantic ids, as in `difference`.
        hidden: Ids of hidden items, in order.
        assigned: Last position of other bundles that it has carried over.
        last: Position of its last change set.
    """

    changes: dict[str, ItemChange] = field(default_factory=dict)
    hidden: dict[str, None] = field(default_factory=dict)
    assigned: int = 0
    last: int = 0

    def apply(self, change_set: ChangeSet) -> None:
        """Applies a change set of the bundle, or its part of a snapshot."""
        first = not change_set.writer and change_set.assigned is not None  # of a snapshot
        if change_set.whole or first:
            self.changes, self.hidden = {}, {}
        for change in change_set.changes:
            self._put(change)
        self.hidden |= dict.fromkeys(change_set.hidden)
        if change_set.assigned is not None:
            self.assigned = change_set.assigned
        self.last = change_set.number

    def _put(self, change: ItemChange) -> None:
        item_id = change.record.item_id
        self.hidden.pop(item_id, None)
        if change.vector is None or change.codes is None:
            before = self.changes.get(item_id)
            vector, codes = (None, None) if before is None else (before.vector, before.codes)
        else:
            vector, codes = change.vector, change.codes
            self.changes.pop(item_id, None)
        self.changes[item_id] = ItemChange(change.record, vector, codes)

    def parts(self, position: int, made_for: str) -> tuple[ChangeSet, ChangeSet]:
        """Returns its part of a snapshot."""
        changes, hidden = tuple(self.changes.values()), tuple(self.hidden)
        part = ChangeSet(position, changes, hidden, made_for=made_for)
        first, second = part.split()
        return replace(first, assigned=self.assigned), second


class _Latest(NamedTuple):
    """Latest change of an item.

    Attributes:
        number: Its position.
        made_for: Its bundle's catalogue.
        state: The item if it is put; else the name of the field of `ChangeSet` that has its id.
    """

    number: int
    made_for: str
    state: ItemChange | str


class LogContents:
    """What the change sets of a log make, for each bundle.

    Attributes:
        bundles: Items of each bundle, by the version of its catalogue.
    """

    def __init__(self) -> None:
        self.bundles: dict[str, BundleItems] = {}
        self._latest: dict[str, _Latest] = {}  # ascending positions

    def add(self, change_set: ChangeSet) -> None:
        """Adds the next change set of the log, or part of its snapshot."""
        if not change_set.remains:
            self.bundles.setdefault(change_set.made_for, BundleItems()).apply(change_set)
            if change_set.assigned is not None or not change_set.writer:
                return  # the items that it carries over are in the change sets of other bundles
        number, made_for = change_set.number, change_set.made_for
        for change in change_set.changes:
            plain = replace(change, vector=None, codes=None)
            self._add(change.record.item_id, _Latest(number, made_for, plain))
        for name in ("hidden", "restored"):
            for item_id in getattr(change_set, name):
                self._add(item_id, _Latest(number, made_for, name))

    def _add(self, item_id: str, latest: _Latest) -> None:
        self._latest.pop(item_id, None)
        self._latest[item_id] = latest

    def snapshot(
        self, position: int, made_for: str, own: Sequence[ChangeSet]
    ) -> Iterator[ChangeSet]:
        """Yields the change sets that replace all up to a position.

        Args:
            position: The position.
            made_for: Version of the catalogue of the bundle that writes the snapshot.
            own: What makes the version of this bundle.
        """
        assigned = self.bundles.pop(made_for, BundleItems()).assigned
        for at, part in enumerate(own):
            yield replace(part, made_for=made_for, assigned=None if at else assigned)
        latest = sorted(self.bundles.items(), key=lambda each: -each[1].last)
        for version, items in latest[: MAX_BUNDLES - 1]:
            yield from items.parts(position, version)
        by_position = groupby(self._latest.items(), lambda each: each[1][:2])
        for (number, version), group in by_position:
            states = [(item_id, latest.state) for item_id, latest in group]
            yield ChangeSet(
                number,
                tuple(state for _, state in states if isinstance(state, ItemChange)),
                tuple(item_id for item_id, state in states if state == "hidden"),
                made_for=version,
                restored=tuple(item_id for item_id, state in states if state == "restored"),
                remains=True,
            )
