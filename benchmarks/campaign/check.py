"""What a check of the campaign is, and what it finds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from benchmarks.campaign.site import Site


class NotRun(RuntimeError):
    """The check cannot run on this machine; the message says why."""


@dataclass(frozen=True)
class Figure:
    """A measured value beside its bound.

    Attributes:
        name: What the value is, with its unit.
        value: The value.
        bound: The largest value that is allowed, or the smallest one if `at_least`.
        at_least: Whether the bound is a lower one.
        judged: False if the run was too short or too noisy to compare the value with the bound.
    """

    name: str
    value: float
    bound: float
    at_least: bool = False
    judged: bool = True

    @property
    def holds(self) -> bool:
        """Whether the value is within the bound. A value that is not a number is not."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    @property
    def misses(self) -> bool:
        """Whether the value is judged and outside the bound."""
        return self.judged and not self.holds

    @property
    def words(self) -> str:
        """The bound for a table."""
        return f"{'≥' if self.at_least else '≤'} {self.bound:g}"


@dataclass(frozen=True)
class Finding:
    """What a check measured.

    Attributes:
        cases: How many cases it tried.
        figures: The values.
        note: What a reader must know beside them; empty if nothing.
    """

    cases: int
    figures: tuple[Figure, ...]
    note: str = ""


class Budget:
    """The time that a check may take.

    Attributes:
        seconds: The time.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began = time.monotonic()

    @property
    def left_s(self) -> float:
        """Seconds that are left; never below 0."""
        return max(0.0, self.seconds - (time.monotonic() - self._began))

    def share(self, part: float, least_s: float = 0.5) -> float:
        """Returns a part of the time that is left, and at least `least_s`."""
        return max(least_s, self.left_s * part)

    def cases(self, most: int, part: float = 1.0, least: int = 1) -> Iterator[int]:
        """Yields 0, 1 and so on, until a part of the time is used.

        Args:
            most: Most numbers.
            part: Part of the time that is left.
            least: Fewest numbers, even if they take longer: fewer cases say nothing.
        """
        end = time.monotonic() + self.left_s * part
        for number in range(most):
            if number >= least and time.monotonic() >= end:
                return
            yield number


@dataclass(frozen=True)
class Check:
    """A check of the campaign.

    Attributes:
        number: R1 to R27; numbers of checks that became tests are free.
        name: Short name.
        measures: What is measured.
        cases: How many cases a full campaign tries.
        minimum_s: Time of the smallest useful run.
        weight: Share of the time beyond all minima, relative to the other checks.
        run: Measures.
    """

    number: str
    name: str
    measures: str
    cases: int
    minimum_s: float
    weight: float
    run: Callable[[Site, Budget], Finding] = field(repr=False)


Run = Callable[[Site, Budget], Finding]
CHECKS: list[Check] = []


def check(
    number: str, name: str, measures: str, *, cases: int, minimum_s: float, weight: float = 1.0
) -> Callable[[Run], Run]:
    """Registers a function as a check; the arguments are those of `Check`."""

    def register(run: Run) -> Run:
        CHECKS.append(Check(number, name, measures, cases, minimum_s, weight, run))
        return run

    return register
