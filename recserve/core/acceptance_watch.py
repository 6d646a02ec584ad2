"""Watches the acceptance of a drafter's drafts: raises an alarm, and pauses drafts that do not pay.

Drafts never change a text or a slate, so a pause changes speed only. The watch reads no clock.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

MEMORY = 128  # values that an average remembers
LONG_MEMORY = 8192  # drafts of the long-run average, the expectation without a calibration
KNOWN = 128  # drafts before the first judgement
MAX_DEPTH = 16  # deeper levels are not watched
ALARM_SHARE, CLEAR_SHARE = 0.5, 0.75  # shares of the expectation: below, alarm; above, none
PROBE_EVERY, PROBE_LENGTH = 1024, 16  # of so many chances to draft, a paused drafter uses so many
RESUME_MARGIN = 0.05  # gain above the break-even that ends a pause


@dataclass
class Average:
    """A running average.

    Attributes:
        value: The average.
        weight: Number of values so far, at most `memory`.
        memory: Number of values that the average remembers.
    """

    value: float = 0.0
    weight: int = 0
    memory: int = MEMORY

    def add(self, value: float) -> None:
        """Adds a value. Older values lose weight once the memory is full."""
        self.weight = min(self.weight + 1, self.memory)
        self.value += (value - self.value) / self.weight


@dataclass(frozen=True)
class DraftHealth:
    """What a watch knows at one moment.

    Attributes:
        acceptance: By depth, the share of drafted levels that is accepted if the level above is.
        recent: Mean gain of recent drafts.
        expected: Gain that the recent one is compared with.
        alarm: Whether recent drafts are far below the expectation, or paused.
        paused: Whether requests decode without drafts.
    """

    acceptance: tuple[float, ...] = ()
    recent: float = 0.0
    expected: float = 0.0
    alarm: bool = False
    paused: bool = False


@dataclass
class DraftWatch:
    """Compares the gain of a drafter's recent drafts with its expectation and its break-even.

    The gain of a text draft is its number of accepted tokens. The gain of an item draft is the
    number of rounds that it saves.

    Attributes:
        name: Name of the drafter, for the log.
        break_even: Mean gain below which drafts do not pay.
        pauses: Whether drafts that do not pay are paused.
        alarm: Whether recent drafts are far below the expectation, or paused.
        paused: Whether only probes draft.
    """

    name: str
    break_even: float
    pauses: bool = True
    alarm: bool = False
    paused: bool = False
    _levels: list[Average] = field(default_factory=lambda: [Average() for _ in range(MAX_DEPTH)])
    _recent: Average = field(default_factory=Average)
    _calibrated: Average = field(default_factory=Average)
    _long_run: Average = field(default_factory=lambda: Average(memory=LONG_MEMORY))
    _chances: int = 0
    _judged: float = 0.0

    def allows(self) -> bool:
        """Returns whether the next draft may run; while paused, only probes may."""
        if not self.paused:
            return True
        self._chances += 1
        return self._chances % PROBE_EVERY >= PROBE_EVERY - PROBE_LENGTH

    def add(self, gain: float, depth: int, accepted: int, calibrated: float | None = None) -> None:
        """Records a verified draft.

        Args:
            gain: Accepted tokens or saved rounds.
            depth: Levels of the draft.
            accepted: Accepted levels.
            calibrated: Gain by the drafter's calibration. None compares with the long-run average.
        """
        for level, average in enumerate(self._levels[: min(accepted + 1, depth)]):
            average.add(level < accepted)
        self._recent.add(gain)
        self._long_run.add(gain)
        if calibrated is not None:
            self._calibrated.add(calibrated)
        self._judge()

    @property
    def expected(self) -> float:
        """The calibrated gain of recent requests; the long-run average without a calibration."""
        return self._calibrated.value if self._calibrated.weight else self._long_run.value

    def health(self) -> DraftHealth:
        """Returns the state for statistics. It is safe to call from any thread."""
        seen = [level.value for level in self._levels if level.weight]
        known = self._recent.value if self._recent.weight and not self.paused else self._judged
        return DraftHealth(tuple(seen), known, self.expected, self.alarm, self.paused)

    def _judge(self) -> None:
        """Updates alarm and pause, and logs one line per change."""
        gain, enough = self._recent.value, PROBE_LENGTH if self.paused else KNOWN
        if self._recent.weight < enough:
            return
        before = self.alarm, self.paused
        self._judged = gain
        if self.paused:
            self.paused = gain < self.break_even + RESUME_MARGIN
            self._recent = Average()
        elif self.pauses and gain < self.break_even:
            self.paused, self._chances, self._recent = True, 0, Average()
        pays = not self.paused and gain >= self.break_even
        share = CLEAR_SHARE if self.alarm else ALARM_SHARE
        self.alarm = not pays or gain < share * self.expected
        if before != (self.alarm, self.paused):
            log.log(
                logging.WARNING if self.alarm else logging.INFO,
                "drafter %s: acceptance alarm %s, drafts %s: gain %.3f per draft, expected %.3f",
                self.name,
                "on" if self.alarm else "off",
                "paused" if self.paused else "on",
                gain,
                self.expected,
            )
