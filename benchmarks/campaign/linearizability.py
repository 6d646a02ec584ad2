"""Whether a history of one register is linearizable: the search of Wing and Gong, just in time.

Source: Wing and Gong 1993, "Testing and Verifying Concurrent Objects"; Lowe 2017, "Testing for
Linearizability", section 4 (just-in-time linearization).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

NEVER = math.inf
Values = frozenset[str]
# What the register may hold, and the calls in progress that have taken effect already.
Configuration = tuple[Values, frozenset[int]]


@dataclass(frozen=True)
class Call:
    """One read or write of the register.

    Attributes:
        began: Time at which it began.
        ended: Time at which it ended. A write that NEVER ends may take effect at any time after
            `began`, or not at all.
        read: The value that it read; None for a write.
        written: Values one of which it left in the register; empty for a read.
    """

    began: float
    ended: float
    read: str | None = None
    written: Values = frozenset()


def first_unexplained(calls: Sequence[Call], initial: str) -> Call | None:
    """Returns the call at whose end no order of the calls explains all reads; None if one does.

    Args:
        calls: The calls. Calls that touch in time are concurrent.
        initial: Value of the register before all calls.
    """
    events = [(call.began, 0, number) for number, call in enumerate(calls)]
    events += [(call.ended, 1, number) for number, call in enumerate(calls) if call.ended < NEVER]
    pending: set[int] = set()
    configurations: set[Configuration] = {(frozenset({initial}), frozenset())}
    for _, ends, number in sorted(events):
        if not ends:
            pending.add(number)
            continue
        reached = _minimal(calls, _linearize(calls, configurations, pending, number))
        if not reached:
            return calls[number]
        pending.remove(number)
        configurations = {(state, done - {number}) for state, done in reached}
    return None


def _linearize(
    calls: Sequence[Call], configurations: Iterable[Configuration], pending: set[int], ending: int
) -> set[Configuration]:
    """Returns the configurations in which the call that ends has taken effect."""
    found: set[Configuration] = set()
    frontier, known = list(configurations), set(configurations)
    while frontier:
        configuration = frontier.pop()
        if ending in configuration[1]:
            found.add(configuration)
            continue
        for one in _successors(calls, configuration, pending):
            if one not in known:
                known.add(one)
                frontier.append(one)
    return found


def _successors(
    calls: Sequence[Call], configuration: Configuration, pending: set[int]
) -> Iterator[Configuration]:
    """Yields the configurations after one more call of those in progress."""
    state, done = configuration
    waiting = sorted(pending - done)
    reads = [number for number in waiting if calls[number].read is not None]
    if len(state) == 1:
        # A read of the one value changes nothing, so it may as well take effect now.
        for number in reads:
            if calls[number].read in state:
                yield state, done | {number}
                return
    tried: set[Values] = set()
    for number in waiting:
        call = calls[number]
        if call.read is not None:
            if call.read in state:
                yield frozenset({call.read}), done | {number}
            continue
        if call.ended == NEVER:
            # Such a write matters only if a read follows, and equal ones can stand for each other.
            useful = any(calls[one].read in call.written for one in reads)
            if call.written in tried or call.written == state or not useful:
                continue
            tried.add(call.written)
        yield call.written, done | {number}


def _minimal(calls: Sequence[Call], found: set[Configuration]) -> set[Configuration]:
    """Drops configurations that differ from another one only in more unended writes."""
    groups: dict[tuple[Values, frozenset[int]], list[frozenset[int]]] = {}
    for state, done in sorted(found, key=lambda one: len(one[1])):
        unended = frozenset(number for number in done if calls[number].ended == NEVER)
        group = groups.setdefault((state, done - unended), [])
        if not any(fewer <= unended for fewer in group):
            group.append(unended)
    return {(state, ended | some) for (state, ended), group in groups.items() for some in group}
