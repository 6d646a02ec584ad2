"""Checks recorded histories of a catalogue that several replicas serve and change.

The catalogue's log orders all changes, and every answer names a version of it. Two checks judge a
history. The first one trusts the versions: a write stands at the place that its answer names, and a
read sees what the writes up to its version make. The second one does not: for each item, the writes
and the reads that named the newest known version must be linearizable.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from benchmarks.campaign.linearizability import NEVER, Call, first_unexplained

HIDDEN = ""  # the state of an item that no answer shows
MAX_LINES = 200  # that are tried to find where epochs ended
NUM_LIKELY = 8  # ends of an epoch that are tried before those of others

# Kinds of violations.
POSITION = "two writes at one position"
ORDER = "a write before an earlier one"
FUTURE = "a version before its write"
STALE = "a version below the one that was asked for"
STATE = "a state that the writes do not make"
CODES = "two semantic ids of one write"
ORACLE = "an item that is not linearizable"
END = "replicas that differ at the end"


class Version(NamedTuple):
    """A version of the catalogue: `BUNDLE.EPOCH.NUMBER`, or `BUNDLE` before any change.

    Numbers grow along a log. A later epoch begins where the log may have lost its last entries.
    """

    bundle: str
    epoch: int = 0
    number: int = 0

    @classmethod
    def parse(cls, name: str) -> Version:
        """Returns the version of a `catalog_version`."""
        bundle, _, rest = name.partition(".")
        epoch, _, number = rest.rpartition(".")
        return cls(bundle, int(epoch or 0), int(number or 0))

    def __str__(self) -> str:
        return f"{self.bundle}.{self.epoch}.{self.number}" if self.number else self.bundle


class Result(Enum):
    """What is known of an operation after its answer."""

    OK = "ok"
    FAILED = "failed"  # it has no effect
    UNKNOWN = "unknown"  # a write may take effect at any time after it began, or never


@dataclass(frozen=True)
class Operation:
    """One request of one client.

    Attributes:
        client: The client; it sends one request at a time.
        replica: The replica that it asked.
        kind: Name of the request.
        began: Time at which it began, on the clock of all operations.
        ended: Time at which it ended.
        result: What is known of it.
        writes: The value that it gives to items; HIDDEN for a hidden one. Every other value is
            written once in a history.
        restores: The version that a rollback restores.
        version: The version that the answer names.
        seen: The value of items in the answer.
        codes: The semantic id of seen items.
        at_least: The version that the request named as `min_catalog_version`.
        newest: Whether `at_least` was the newest version of all answers before the request.
    """

    client: int
    replica: int
    kind: str
    began: float
    ended: float
    result: Result
    writes: Mapping[str, str] = field(default_factory=dict)
    restores: Version | None = None
    version: Version | None = None
    seen: Mapping[str, str] = field(default_factory=dict)
    codes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    at_least: Version | None = None
    newest: bool = False

    @property
    def changes(self) -> bool:
        """Whether it is a write."""
        return bool(self.writes) or self.restores is not None

    def __str__(self) -> str:
        what = dict(self.writes) or dict(self.seen) or ""
        more = f" restores {self.restores}" if self.restores else ""
        more += f" at least {self.at_least}" if self.at_least else ""
        return (
            f"{self.kind} {what}{more} by client {self.client} at replica {self.replica}, "
            f"{self.began:.3f} to {self.ended:.3f}: {self.result.value} {self.version or ''}"
        )


@dataclass(frozen=True)
class End:
    """What a replica answers after the last change.

    Attributes:
        replica: The replica.
        version: Version of its catalogue.
        items: Value and semantic id by item.
        slates: Item ids and scores of some requests.
    """

    replica: int
    version: Version
    items: Mapping[str, tuple[str, tuple[int, ...]]]
    slates: Sequence[object]


@dataclass(frozen=True)
class SharedLog:
    """What the log of several bundles tells beside the answers.

    Attributes:
        assigned: Positions that no client has asked for, because a bundle takes over there what
            another one has.
        rollbacks: Ascending positions of rollbacks.
    """

    assigned: frozenset[int] = frozenset()
    rollbacks: Sequence[int] = ()


@dataclass
class Report:
    """What a history shows.

    Attributes:
        violations: Descriptions by kind.
        epochs: Epochs that answers named, each with the last number that the
            next epoch took over; infinity for the last one.
        lost: Acknowledged writes that the last epoch does not have. The versions tell each of them,
            because they name an epoch that ended before.
        unasked: Positions that neither an acknowledged write nor one without an answer explains.
    """

    violations: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    epochs: list[tuple[int, float]] = field(default_factory=list)
    lost: list[Operation] = field(default_factory=list)
    unasked: int = 0

    def add(self, kind: str, text: str) -> None:
        """Adds a violation once."""
        if text not in self.violations[kind]:
            self.violations[kind].append(text)

    def count(self, *kinds: str) -> int:
        """Returns the number of violations of some kinds; of all kinds without an argument."""
        chosen = kinds or tuple(self.violations)
        return sum(len(self.violations[kind]) for kind in chosen)


def check_history(
    operations: Sequence[Operation],
    initial: Mapping[str, str],
    ends: Sequence[End] = (),
    log: SharedLog | None = None,
) -> Report:
    """Checks a history.

    Args:
        operations: All operations, in any order.
        initial: The value of each item before the first operation.
        ends: What the replicas answer after the last one.
        log: What the log itself tells, if several bundles share it.
    """
    log = log or SharedLog()
    report = Report()
    operations = [*operations, *(_as_read(one, operations) for one in ends)]
    epochs = sorted({one.version.epoch for one in operations if one.version is not None})
    lines = _find_lines(operations, initial, [], epochs, [MAX_LINES], log)
    for each in lines:
        for kind, text in each.violations:
            report.add(kind, text)
    line = lines[-1] if lines else _Line(operations, initial, [], log)
    report.epochs = list(line.parts)
    report.unasked = line.num_unasked
    report.lost = [
        one
        for one in operations
        if one.changes and one.result is Result.OK and one.version not in line
    ]
    _check_oracle(report, operations, initial, line)
    _check_ends(report, ends)
    return report


def _as_read(end: End, operations: Sequence[Operation]) -> Operation:
    """Returns the answer of a replica at the end as a read after all operations."""
    after = max((one.ended for one in operations), default=0.0) + 1
    return Operation(
        client=-1,
        replica=end.replica,
        kind=END,
        began=after,
        ended=after,
        result=Result.OK,
        version=end.version,
        seen={item: value for item, (value, _) in end.items.items()},
        codes={item: codes for item, (_, codes) in end.items.items() if codes},
    )


def _find_lines(
    operations: Sequence[Operation],
    initial: Mapping[str, str],
    lines: Sequence[_Line],
    epochs: Sequence[int],
    left: list[int],
    log: SharedLog,
) -> list[_Line]:
    """Returns the line of each epoch.

    An epoch takes over the entries of an earlier one, nearly always of the last, up to a number.
    No answer tells them. Epochs are tried from the last one on and numbers from the largest down,
    until nothing is left unexplained. Otherwise the result leaves the least.

    Args:
        operations: All operations.
        initial: The value of each item before them.
        lines: Lines of the epochs before.
        epochs: The other epochs, in order.
        left: One number: how many lines may be tried.
        log: What the log itself tells.
    """
    if not epochs:
        return [*lines]
    best: list[_Line] = []
    poor: list[_Line] = []
    for parts in _beginnings(operations, lines, epochs[0]):
        line = _Line(operations, initial, [*parts, (epochs[0], math.inf)], log)
        left[0] -= 1
        if line.cost:
            poor.append(line)
        else:
            found = _find_lines(operations, initial, [*lines, line], epochs[1:], left, log)
            if not best or _cost(found) < _cost(best):
                best = found
        if left[0] <= 0 or (best and not _cost(best)):
            break
    if not best:
        line = min(poor, key=lambda one: one.cost)
        best = _find_lines(operations, initial, [*lines, line], epochs[1:], left, log)
    return best


def _cost(lines: Iterable[_Line]) -> int:
    return sum(line.cost for line in lines)


def _beginnings(
    operations: Sequence[Operation], lines: Sequence[_Line], epoch: int
) -> Iterator[list[tuple[int, float]]]:
    """Yields what an epoch may have taken over from an earlier one, the most likely first."""
    if not lines:
        yield []
    # A replica that has not read all of the log may name any number, but a change has the next one.
    own = [
        one.version.number - 1
        for one in operations
        if one.changes and one.version is not None and one.version.epoch == epoch
    ]
    likely: list[list[tuple[int, float]]] = []
    others: list[list[tuple[int, float]]] = []
    for line in reversed(lines):
        numbers = {0}
        for number, _ in line.answered:
            numbers |= {number, max(0, number - 1)}
        chosen = sorted({min([number, *own]) for number in numbers}, reverse=True)
        for place, number in enumerate(chosen):
            parts = [(before, min(last, number)) for before, last in line.parts]
            (likely if place < NUM_LIKELY else others).append(parts)
    yield from likely
    yield from others


class _Line:
    """The log as one epoch has it: entries of earlier epochs up to their ends, then its own.

    Attributes:
        parts: Epochs, each with its last number that counts here.
        violations: Pairs of kind and description.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        initial: Mapping[str, str],
        parts: Sequence[tuple[int, float]],
        log: SharedLog,
    ) -> None:
        self.parts, self.initial, self._log = parts, initial, log
        self._last = dict(parts)
        self.operations = operations
        self.violations: list[tuple[str, str]] = []
        if parts:
            self._check_positions()
            self._check_minimum()
            self._check_codes()
            self._check_states()

    def __contains__(self, version: Version | None) -> bool:
        return version is not None and version.number <= self._last.get(version.epoch, -1)

    @cached_property
    def answered(self) -> list[tuple[int, Operation]]:
        """Operations whose version is in this line, by number; the write of a number first."""
        found = [
            (one.version.number, one)
            for one in self.operations
            if one.version is not None and one.version in self and one.result is Result.OK
        ]
        return sorted(found, key=lambda pair: (pair[0], not pair[1].changes, pair[1].ended))

    @cached_property
    def _writes(self) -> list[tuple[int, Operation]]:
        return [(number, one) for number, one in self.answered if one.changes]

    @cached_property
    def _unknown(self) -> list[tuple[int, Operation]]:
        """Writes without an answer, each with the first number that it can have.

        One that is acknowledged in a later epoch may have been stored here before, and lost.
        """
        by_end = sorted((one.ended, number) for number, one in self.answered)
        ends, highest = [end for end, _ in by_end], [0]
        for _, number in by_end:
            highest.append(max(highest[-1], number))
        return [
            (1 + highest[bisect.bisect_left(ends, one.began)], one)
            for one in self.operations
            if one.changes and (one.result is Result.UNKNOWN or self._is_later(one.version))
        ]

    def _is_later(self, version: Version | None) -> bool:
        """Whether a version is of a later epoch than this line."""
        return version is not None and version.epoch > self.parts[-1][0]

    @cached_property
    def _gaps(self) -> list[int]:
        """Numbers that no acknowledged write has, and no assignment."""
        taken = {number for number, _ in self._writes} | self._log.assigned
        last = self.answered[-1][0] if self.answered else 0
        return [number for number in range(1, last + 1) if number not in taken]

    @property
    def num_unasked(self) -> int:
        """Number of entries that no operation explains."""
        return max(0, len(self._gaps) - len(self._unknown)) if self.parts else 0

    @property
    def cost(self) -> int:
        """How much this line leaves unexplained."""
        return len(self.violations) + self.num_unasked

    def _has_gap(self, after: int, last: int) -> bool:
        """Whether a write without an answer can stand behind `after` and not behind `last`."""
        place = bisect.bisect_right(self._gaps, after)
        return place < len(self._gaps) and self._gaps[place] <= last

    def _add(self, kind: str, text: str) -> None:
        self.violations.append((kind, text))

    def _check_positions(self) -> None:
        """One write for each number, in an order that agrees with time; no version before it."""
        for (number, one), (other, two) in pairwise(self._writes):
            if number == other:
                self._add(POSITION, f"{number}: {one}; {two}")
        latest: Operation | None = None
        for _, one in self.answered:
            if latest is not None and one.ended < latest.began:
                self._add(ORDER if one.changes else FUTURE, f"{one}; {latest}")
            if one.changes and (latest is None or one.began > latest.began):
                latest = one

    def _check_minimum(self) -> None:
        """An answer is not older than the request allows, and a write comes after what it names."""
        for number, one in self.answered:
            least = one.at_least
            if least is not None and least in self and number < least.number + one.changes:
                self._add(STALE, str(one))
            if one.kind == END and self._writes and number < self._writes[-1][0]:
                self._add(END, f"{one}, but a write has {self._writes[-1][0]}")

    def _check_codes(self) -> None:
        """All replicas of a bundle give a write the same semantic id.

        If a rollback in another bundle gives an item an earlier value, it may have another id.
        """
        found: dict[tuple[str, str, str, int], tuple[tuple[int, ...], Operation]] = {}
        for number, one in self.answered:
            assert one.version is not None
            part = bisect.bisect_right(self._log.rollbacks, number)
            for item, codes in one.codes.items():
                key = (one.version.bundle, item, one.seen[item], part)
                before = found.setdefault(key, (codes, one))
                if before[0] != codes:
                    self._add(CODES, f"{item} {before[0]} and {codes}: {before[1]}; {one}")

    def _check_states(self) -> None:
        """Every read sees what the writes up to its version make."""
        touched: dict[str, list[tuple[int, Operation]]] = defaultdict(list)
        for number, one in self.answered:
            for item in self.initial if one.restores else (*one.writes, *one.seen):
                touched[item].append((number, one))
        unknown: dict[str, list[tuple[int, Operation]]] = defaultdict(list)
        for first, one in self._unknown:
            for item in self.initial if one.restores else one.writes:
                unknown[item].append((first, one))
        for item, own in touched.items():
            _ItemLine(self, item, own, unknown[item]).check()


class _ItemLine:
    """The states of one item along a line.

    Args:
        line: The line.
        item: The item.
        touched: Its writes and reads, by number.
        unknown: Its writes without an answer, each with the first number that it can have.
    """

    def __init__(
        self,
        line: _Line,
        item: str,
        touched: Sequence[tuple[int, Operation]],
        unknown: Sequence[tuple[int, Operation]],
    ) -> None:
        self.line, self.item, self.touched = line, item, touched
        self.unknown = list(unknown)
        # Numbers at which the values are known, and the values that are possible there.
        self.numbers, self.states = [0], [{line.initial[item]}]
        self.read_places: set[int] = set()  # of these, the ones that a read tells

    def check(self) -> None:
        """Adds a violation for each read that no placement of the unknown writes explains."""
        for number, one in self.touched:
            if one.restores is not None:
                self._set(number, self._restored(one.restores, number))
            elif self.item in one.writes:
                self._set(number, {one.writes[self.item]})
            else:
                value = one.seen[self.item]
                if value not in self.states[-1] and not self._place(value, number):
                    wanted = sorted(self.states[-1])
                    self.line._add(STATE, f"{self.item} is {value!r}, not {wanted}: {one}")
                self._set(number, {value})
                self.read_places.add(len(self.numbers) - 1)

    def _set(self, number: int, values: set[str]) -> None:
        self.numbers.append(number)
        self.states.append(values)

    def _place(self, value: str, number: int) -> bool:
        """Explains a value by a write without an answer since the number that is known last."""
        since = self.numbers[-1]
        for pair in self.unknown:
            first, one = pair
            if not self.line._has_gap(max(since, first - 1), number):
                continue
            if one.restores is not None:
                if value in self._restored(one.restores, number):
                    return True
            elif one.writes[self.item] == value:
                self.unknown.remove(pair)
                return True
        return False

    def _restored(self, version: Version, number: int) -> set[str]:
        """Returns the values that a rollback at a number can give to the item."""
        if version not in self.line or version.number >= number:
            return set()
        known = bisect.bisect_right(self.numbers, version.number) - 1
        values = set(self.states[known])
        # The next read before another write tells of a change, or that there was none.
        if known + 1 in self.read_places:
            if values == self.states[known + 1]:
                return values
            values |= self.states[known + 1]
        since = self.numbers[known]
        for first, one in self.unknown:
            if one.restores is None and self.line._has_gap(max(since, first - 1), version.number):
                values.add(one.writes[self.item])
            elif one.restores is not None and self.line._has_gap(since, version.number):
                values |= set().union(*self.states[: known + 1])
        return values


def _check_oracle(
    report: Report, operations: Sequence[Operation], initial: Mapping[str, str], line: _Line
) -> None:
    """Each item is linearizable, whatever the numbers of the versions say.

    Reads that did not name the newest version may be older, so they do not count. What the last
    epoch does not have is lost, and reads of it do not count either. Of a rollback, any value that
    the item had is accepted.
    """
    for item, first in initial.items():
        values, calls, unknown = {first}, [], []
        read: set[str] = set()
        for one in operations:
            if one.result is Result.OK and one.version is not None and one.version not in line:
                continue
            # A refusal names no version, so it may have read what is lost.
            told = one.version is not None or not report.lost
            if told and one.newest and one.result is Result.OK and item in one.seen:
                calls.append(Call(one.began, one.ended, one.seen[item]))
                read.add(one.seen[item])
            values |= {one.writes[item]} if item in one.writes else set()
        for one in operations:
            lost = one.result is Result.OK and one.version not in line
            if one.result is Result.FAILED or lost or not (item in one.writes or one.restores):
                continue
            written = frozenset(values if one.restores else {one.writes[item]})
            if one.result is Result.OK:
                calls.append(Call(one.began, one.ended, written=written))
            elif written & read:  # a value that was never read may as well not be written
                unknown.append(Call(one.began, NEVER, written=written))
        wrong = first_unexplained([*calls, *unknown], first)
        if wrong is not None:
            report.add(ORACLE, f"{item}: {wrong}")


def _check_ends(report: Report, ends: Sequence[End]) -> None:
    """All replicas end at one version and answer alike."""
    for one in ends[1:]:
        first = ends[0]
        if one.version[1:] != first.version[1:]:
            report.add(END, f"replica {one.replica}: {one.version}, not {first.version}")
        elif one.items != first.items:
            differ = {k for k in first.items if first.items[k] != one.items.get(k)}
            report.add(END, f"replica {one.replica}: items {sorted(differ)[:5]} differ")
        elif list(one.slates) != list(first.slates):
            report.add(END, f"replica {one.replica}: slates differ")
