"""Rates of events per answer in two arms, and a comparison that holds at every look.

Users are assigned to arms, and the events of one user depend on each other. So the variance comes
from sums over groups of users, and not from single answers. All users of an arm are divided by a
hash into NUM_BUCKETS groups; an arm keeps two sums per group, answers N_k and events C_k.

    rate R = sum(C) / sum(N)      variance of sum(C) = m / (m - 1) * sum((C_k - R N_k)^2)

with m groups that have answers. This is the delta method for a ratio, with groups of users as
independent units. Half an event is added to each variance, so that an arm without events has an
error, too.

Two teams of an interleaved slate share their answers, so their events are compared within each
group: the variance is that of sum(D), where D_k is the difference of both teams' events.

The interval of the difference of two rates is a confidence sequence. Its time is the information:
one over the squared standard error, with the rate of both arms together as the unit of rates. It is
tightest at a tenth of the information that finds the smallest effect of interest with POWER, so
that a large loss is seen early. There it is 7 % wider than the tightest one.
`python -m benchmarks.experiments.click_power` tries false alarms and power.

Sources: Deng, Knoblich and Lu 2018, "Applying the delta method in metric analytics", section 3.1;
Jennison and Turnbull 2000, "Group sequential methods", chapter 11 (estimates over time behave like
a Brownian motion in information); `statistics.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from recserve.experiments.statistics import boundary, tuned_rho

NUM_BUCKETS = 1024
ALPHA = 0.05
POWER = 0.8
# The sequence is asymptotic: below these numbers nothing is judged.
MIN_EVENTS = 50  # in both arms together
MIN_BUCKETS = 30  # groups of users with answers, in each arm
PRIOR = 0.5  # of an event
EARLY = 10  # the interval is tightest at 1 / EARLY of the needed information


@dataclass(frozen=True)
class RateSums:
    """Sums of one arm over groups of users.

    Attributes:
        answers: [NUM_BUCKETS] answers that users got.
        events: [NUM_BUCKETS] events that these answers led to.
    """

    answers: NDArray[np.int64]
    events: NDArray[np.int64]

    @property
    def num_answers(self) -> int:
        """Answers of all users."""
        return int(self.answers.sum())

    @property
    def num_events(self) -> int:
        """Events of all users."""
        return int(self.events.sum())

    @property
    def num_groups(self) -> int:
        """Groups of users with an answer."""
        return int((self.answers > 0).sum())

    @property
    def rate(self) -> float | None:
        """Events per answer; None without answers."""
        return self.num_events / self.num_answers if self.num_answers else None

    def variance(self) -> float:
        """Returns the variance of the number of events; needs two groups of users."""
        return _variance(self.answers, self.events)

    def spread(self) -> float | None:
        """Returns variance over number of events: 1 if all events are independent and rare.

        None below MIN_EVENTS events or MIN_BUCKETS groups of users.
        """
        if self.num_events < MIN_EVENTS or self.num_groups < MIN_BUCKETS:
            return None
        return self.variance() / self.num_events


@dataclass(frozen=True)
class RateChange:
    """The rate of an arm against the control's.

    Attributes:
        difference: Rate of the arm minus rate of the control.
        reach: Half-width of its interval, which holds at every look.
        control: Rate of the control.
        information: One over the squared standard error, in units of the rate of both arms.
    """

    difference: float
    reach: float
    control: float
    information: float

    @property
    def excludes_zero(self) -> bool:
        """Whether a difference is shown."""
        return abs(self.difference) > self.reach

    @property
    def relative(self) -> tuple[float, float, float]:
        """The difference and both ends of its interval, over the rate of the control."""
        ends = (self.difference, self.difference - self.reach, self.difference + self.reach)
        if not self.control:
            change, low, high = (math.copysign(math.inf, end) for end in ends)
        else:
            change, low, high = (max(end / self.control, -1.0) for end in ends)
        return change, low, high


def compare_rates(
    control: RateSums, treatment: RateSums, smallest: float, alpha: float = ALPHA
) -> RateChange | None:
    """Returns the change of a rate; None below MIN_EVENTS events or MIN_BUCKETS groups of users.

    Args:
        control: Sums of the control.
        treatment: Sums of the other arm.
        smallest: Smallest relative change of interest, fixed before the start.
        alpha: Share of runs without a difference in which any look may show one.
    """
    arms = (control, treatment)
    num_events = sum(one.num_events for one in arms)
    if min(one.num_groups for one in arms) < MIN_BUCKETS or num_events < MIN_EVENTS:
        return None
    together = num_events / sum(one.num_answers for one in arms)
    square = sum((one.variance() + PRIOR) / one.num_answers**2 for one in arms)
    information = together**2 / square
    rates = [one.num_events / one.num_answers for one in arms]
    return RateChange(
        difference=rates[1] - rates[0],
        reach=together * half_width(information, smallest, alpha),
        control=rates[0],
        information=information,
    )


def compare_teams(
    control: RateSums, treatment: RateSums, smallest: float, alpha: float = ALPHA
) -> RateChange | None:
    """Returns the change between two teams of the same answers; None as in `compare_rates`.

    Each group of users is its own pair, so the variance is that of the differences of its events.
    What makes a user click on many items, whatever their team, cancels.

    Args:
        control, treatment: Sums of the teams; their answers are the same.
        smallest, alpha: As in `compare_rates`.
    """
    answers, num_answers = control.answers, control.num_answers
    num_events = control.num_events + treatment.num_events
    if control.num_groups < MIN_BUCKETS or num_events < MIN_EVENTS:
        return None
    together = num_events / (2 * num_answers)
    ahead = treatment.events - control.events
    square = (_variance(answers, ahead) + 2 * PRIOR) / num_answers**2
    information = together**2 / square
    return RateChange(
        difference=float(ahead.sum()) / num_answers,
        reach=together * half_width(information, smallest, alpha),
        control=control.num_events / num_answers,
        information=information,
    )


def _variance(answers: NDArray[np.int64], events: NDArray[np.int64]) -> float:
    """Returns the variance of the sum of events; needs two groups of users with answers."""
    groups = int((answers > 0).sum())
    residuals = events - events.sum() / max(answers.sum(), 1) * answers
    return groups / (groups - 1) * float(np.square(residuals).sum())


def half_width(information: float, smallest: float, alpha: float = ALPHA) -> float:
    """Returns the half-width of the interval at an information, in units of the rate."""
    rho = tuned_rho(needed_information(smallest, alpha) / EARLY, alpha)
    return boundary(information, rho, alpha) / math.sqrt(information)


def needed_information(smallest: float, alpha: float = ALPHA, power: float = POWER) -> float:
    """Returns the information at which a relative change is found with this power or a higher one.

    Args:
        smallest: The relative change, above 0.
        alpha: Share of runs without a difference in which any look may show one.
        power: Share of runs with the change that find it at this information. Earlier looks find
            it in further runs.
    """
    errors = boundary(float(EARLY), tuned_rho(1.0, alpha), alpha) + NormalDist().inv_cdf(power)
    root = errors / math.log1p(smallest)
    return root * root  # inf where ** raises


def information_of_width(width: float, smallest: float, alpha: float = ALPHA) -> float:
    """Returns the information at which the interval has this half-width.

    Args:
        width: Half-width above 0, in units of the rate.
        smallest: Smallest relative change of interest.
        alpha: Share of runs without a difference in which any look may show one.
    """
    low, high = 1e-6, 1e12
    for _ in range(100):  # the width falls with the information
        middle = math.sqrt(low * high)
        if half_width(middle, smallest, alpha) > width:
            low = middle
        else:
            high = middle
    return high


@dataclass(frozen=True)
class ExperimentPlan:
    """What an experiment needs.

    Attributes:
        answers: Answers of all arms.
        events: Events of all arms, at the rate before the start.
        days: Days at the traffic.
    """

    answers: float
    events: float
    days: float


def plan_experiment(
    rate: float,
    smallest: float,
    answers_per_day: float,
    weights: tuple[float, ...] = (0.5, 0.5),
    coverage: float = 1.0,
    spread: float = 1.0,
    power: float = POWER,
) -> ExperimentPlan:
    """Returns how long an experiment runs until it finds a change with this power.

    Args:
        rate: Events per answer before the start.
        smallest: Smallest relative change to find.
        answers_per_day: Answers per day of the whole service.
        weights: Shares of the arms with sum 1, the control first.
        coverage: Share of the users that take part.
        spread: Variance of an arm's number of events over that number; see `RateSums.spread`.
        power: Share of such experiments that find the change.

    Raises:
        ValueError: If a number is out of range.
    """
    for name, value, most in (
        ("rate", rate, math.inf),
        ("smallest effect", smallest, math.inf),
        ("answers per day", answers_per_day, math.inf),
        ("coverage", coverage, 1.0),
        ("spread", spread, math.inf),
    ):
        if not 0 < value <= most or math.isinf(value):
            end = "" if math.isinf(most) else f" and at most {most:g}"
            raise ValueError(f"{name}: expected more than 0{end}, got {value:g}")
    if not 0 < power < 1:
        raise ValueError(f"power: expected more than 0 and less than 1, got {power:g}")
    if len(weights) < 2 or min(weights) <= 0 or abs(sum(weights) - 1) > 0.01:
        raise ValueError(f"weights: expected two or more shares with sum 1, got {list(weights)}")
    alpha = ALPHA / (len(weights) - 1)
    # 1 / information = spread / (rate answers) * (1 / weight of control + 1 / weight of the arm)
    inverse = 1 / weights[0] + 1 / min(weights[1:])
    answers = needed_information(smallest, alpha, power) * spread * inverse / rate
    answers = max(answers, MIN_EVENTS / rate)
    daily = answers_per_day * coverage
    days = answers / daily if daily else math.inf
    if math.isinf(days):
        raise ValueError(
            f"rate {rate:g}, effect {smallest:g} and {answers_per_day:g} answers per day: the "
            "experiment would never end; expected a larger rate, effect or traffic"
        )
    return ExperimentPlan(answers, answers * rate, days)
