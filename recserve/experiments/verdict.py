"""What an experiment says about an arm, in plain words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from recserve.experiments.conversions import (
    ALPHA,
    MIN_BUCKETS,
    MIN_EVENTS,
    RateChange,
    RateSums,
    compare_rates,
    compare_teams,
    information_of_width,
    needed_information,
)
from recserve.experiments.settings import ExperimentSettings
from recserve.schemas.experiments import ArmVerdict, GoalStatus, GuardrailStatus, Mode

# At 0.001, 4 % of fair divisions look wrong at some look, so it only warns. At 1e-5 below 0.1 % do.
SAMPLE_RATIO_WARNING, SAMPLE_RATIO_ALARM = 1e-3, 1e-5
PLURALS = {
    name: f"{name}s"
    for name in ("click", "view", "purchase", "like", "dislike", "rating", "share", "save", "play")
}
WORSE = {"errors": "errors rose", "empty": "empty answers rose", "p99": "p99 latency rose"}
MAX_DAYS = 365
DAY_S = 86_400.0


def describe_goal(
    goal: str, sums: RateSums, control: RateSums | None, settings: ExperimentSettings
) -> GoalStatus:
    """Returns the state of one goal of an arm.

    Args:
        goal: The event type.
        sums: Sums of the arm.
        control: Sums of the control; None for the control itself.
        settings: Settings of the experiment.
    """
    found = None if control is None else _compare(control, sums, settings)
    change, low, high = (None, None, None) if found is None or not found.control else found.relative
    return GoalStatus(
        type=goal,
        events=sums.num_events,
        rate=sums.rate,
        spread=sums.spread(),
        change=change,
        change_low=low,
        change_high=high,
    )


def decide(
    settings: ExperimentSettings,
    arm: str,
    goals: Sequence[tuple[RateSums, RateSums]],
    other_events: int,
    guardrails: list[GuardrailStatus],
    fell_back: str | None,
    sample_ratio_p: float | None,
    ran_s: float,
) -> ArmVerdict:
    """Returns the verdict on an arm.

    Args:
        settings: Settings of the experiment.
        arm: Name of the arm.
        goals: Sums of control and arm for each goal. The first one decides.
        other_events: Attributed events of the control and the arm that are of no goal.
        guardrails: State of the guardrails.
        fell_back: Why the arm made the experiment fall back; None if it did not.
        sample_ratio_p: P-value that the users are divided by the weights; None if unknown.
        ran_s: Seconds for which the experiment has been running.
    """
    if sample_ratio_p is not None and sample_ratio_p < SAMPLE_RATIO_ALARM:
        text = (
            f"not valid: users are not divided by the weights (p = {sample_ratio_p:.2g}); "
            "find out why before you read on"
        )
        return ArmVerdict(kind="invalid", text=text, guardrails=guardrails)
    if fell_back is not None:
        text = f"keep {settings.arms[0].name}: it fell back, {fell_back}"
        return ArmVerdict(kind="keep_control", text=text, guardrails=guardrails)
    failed = [WORSE[one.name] for one in guardrails if one.result == "fails"]
    if failed:
        text = f"keep {settings.arms[0].name}: {' and '.join(failed)}"
        return ArmVerdict(kind="keep_control", text=text, guardrails=guardrails)
    if not goals:
        text = f"nothing to judge: {_no_goal(settings, arm)}"
        return ArmVerdict(kind="no_goal", text=text, guardrails=guardrails)
    control, sums = goals[0]
    return _decide_goal(settings, arm, control, sums, other_events, guardrails, ran_s)


def _decide_goal(
    settings: ExperimentSettings,
    arm: str,
    control: RateSums,
    sums: RateSums,
    other_events: int,
    guardrails: list[GuardrailStatus],
    ran_s: float,
) -> ArmVerdict:
    goal, smallest = settings.goal_types[0], settings.smallest_effect
    events = plural(goal)

    def not_yet(text: str, days: float | None = None) -> ArmVerdict:
        return ArmVerdict(kind="not_yet", text=f"not yet: {text}", guardrails=guardrails, days=days)

    found = _compare(control, sums, settings)
    if found is None:
        return not_yet(_too_few(settings.mode, goal, (control, sums), other_events))
    change, low, high = found.relative
    ends = f"{format_change(low)} to {format_change(high)}"
    interleaved = settings.mode == "interleaved"
    if found.excludes_zero and change < 0:
        size, figures = share(-change), f"({share(-high)} to {share(-low)})"
        text = f"{events} fell by {size} {figures}"
        if interleaved:
            text = f"items of {arm} got {size} fewer {events} {figures}"
        text = f"keep {settings.arms[0].name}: {text}"
        return ArmVerdict(kind="keep_control", text=text, guardrails=guardrails)
    if found.excludes_zero:
        size, figures = share(change), f"({share(low)} to {share(high)})"
        text = f"{events} rose by {size} {figures}"
        if interleaved:
            text = f"its items got {size} more {events} {figures}"
        open_ = [one.name for one in guardrails if one.result == "unclear"]
        if open_:
            return not_yet(f"{text}, but too few requests for the guardrails {', '.join(open_)}")
        return ArmVerdict(kind="ship", text=f"ship {arm}: {text}", guardrails=guardrails)
    if max(-low, high) < smallest:
        text = f"either arm: {events} differ by less than {share(smallest)} ({ends})"
        return ArmVerdict(kind="no_difference", text=text, guardrails=guardrails)
    alpha = ALPHA / (len(settings.arms) - 1)
    needed = needed_information(smallest, alpha)
    if found.information >= needed:
        width = max(abs(change), smallest - abs(change))
        needed = information_of_width(width, smallest, alpha)
    days = ran_s / DAY_S * max(needed / found.information - 1, 0.0)
    text = f"{duration(days)} at this traffic to see a change of {share(smallest)} in {events}"
    return not_yet(f"{text} (now {format_change(change)}, {ends})", days)


def _compare(control: RateSums, sums: RateSums, settings: ExperimentSettings) -> RateChange | None:
    alpha = ALPHA / (len(settings.arms) - 1)
    compare = compare_teams if settings.mode == "interleaved" else compare_rates
    return compare(control, sums, settings.smallest_effect, alpha)


def _no_goal(settings: ExperimentSettings, arm: str) -> str:
    """Returns why the clicks of an experiment say nothing about an arm."""
    if settings.use == "text":
        return "clicks are judged for recommend and rank"
    return (
        f"in mode {settings.mode} every answer is of {settings.arms[0].name}, so clicks say "
        f"nothing about {arm}; judge clicks in mode split or interleaved"
    )


def _too_few(mode: Mode, goal: str, arms: tuple[RateSums, RateSums], other_events: int) -> str:
    """Returns what is missing before the arms can be compared."""
    events = plural(goal)
    num_events = sum(one.num_events for one in arms)
    if num_events:
        if num_events < MIN_EVENTS:
            return f"{num_events} of at least {MIN_EVENTS} {events}"
        users = min(one.num_groups for one in arms)
        where = "" if mode == "interleaved" else " in an arm"
        return f"{users} users{where}, at least {MIN_BUCKETS} are needed"
    text = f"no {events}; send events of type {goal} with the attribution_token of the answer"
    if other_events:
        text += f" ({other_events} attributed events are of other types, see goals)"
    return text


def sample_ratio_warning(p: float | None, counts: Sequence[int]) -> str | None:
    """Returns what to find out if the units are hardly divided by the weights; None if they are.

    Args:
        p: P-value that the units are divided by the weights; None if unknown.
        counts: Units of each arm.
    """
    if p is None or p >= SAMPLE_RATIO_WARNING:
        return None
    found = f"{', '.join(f'{count:,}' for count in counts)} users, p = {p:.2g}"
    if p < SAMPLE_RATIO_ALARM:
        return f"users are not divided by the weights ({found}); find out why before you read on"
    return (
        f"users may not be divided by the weights ({found}); check that no arm loses users. One "
        "fair experiment of 25 looks so at some time"
    )


def is_reached(verdict: ArmVerdict, fell_back: bool) -> bool:
    """Whether a verdict is one of the goal's interval, which holds at every look.

    A guardrail that fails says what is so now, and stops the experiment if it is to.
    """
    judged = verdict.kind in ("ship", "keep_control", "no_difference")
    return judged and not fell_back and all(one.result != "fails" for one in verdict.guardrails)


def plural(goal: str) -> str:
    """Returns the word for several events of a type."""
    return PLURALS.get(goal, f"{goal} events")


def share(value: float) -> str:
    """Returns a share such as "3.1 %" or "31 %"."""
    if value > 100:
        return "\N{INFINITY}"
    figure = f"{value * 100:.{1 if value < 0.0995 else 0}f}"
    return f"{figure.removesuffix('.0')} %"


def format_change(value: float) -> str:
    """Returns a change such as "+3.1 %", with a minus sign for a negative one."""
    return ("\N{MINUS SIGN}" if value < 0 else "+") + share(abs(value))


def duration(days: float) -> str:
    """Returns a time such as "3 more days"."""
    if days > MAX_DAYS:
        return "more than a year"
    for unit, size in (("day", 1.0), ("hour", 1 / 24), ("minute", 1 / 1440)):
        if days > 2 * size or unit == "minute":
            count = max(1, math.ceil(days / size))
            return f"{count} more {unit}{'s' if count > 1 else ''}"
    raise AssertionError(days)
