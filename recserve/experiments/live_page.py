"""The experiments of a running server as one HTML page: verdicts, clicks, guardrails, arms."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from recserve.experiments.charts import Axis, Markup, html_page, interval, section, table, tag
from recserve.schemas.experiments import (
    ArmStatus,
    ArmVerdict,
    ExperimentsResponse,
    ExperimentStatus,
    FirstVerdict,
    GoalStatus,
    VerdictKind,
)

# The class of a verdict in the style sheet.
KINDS: dict[VerdictKind, str] = {
    "ship": "better",
    "keep_control": "worse",
    "no_difference": "pass",
    "not_yet": "unclear",
    "no_goal": "",
    "invalid": "invalid",
}
RESULTS = {"holds": "pass", "fails": "fail", "unclear": "unclear"}
WORDS = {"holds": "not worse", "fails": "worse", "unclear": "too few requests"}
GUARDRAILS = {"errors": "errors", "empty": "empty answers", "p99": "p99 latency"}
MINUS = "\N{MINUS SIGN}"


def live_page(found: ExperimentsResponse, url: str) -> str:
    """Returns the page.

    Args:
        found: State of the experiments.
        url: Address of the server.
    """
    title = f"Experiments of {url}"
    said = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    none = None if found.experiments else tag("p", "This server runs no experiments.")
    body = tag(
        "main",
        tag("header", tag("h1", title), tag("p", said, class_="soft")),
        none,
        *(_experiment(one) for one in found.experiments),
        tag("footer", "Written by recserve. Intervals of changes hold at every look."),
    )
    return html_page(title, body)


def _experiment(one: ExperimentStatus) -> Markup:
    state = one.status.replace("_", " ") + (f": {one.reason}" if one.reason else "")
    since = one.started[:16].replace("T", " ")
    said = f"{one.mode}, {one.coverage * 100:g} % of the users, since {since} UTC, {state}"
    treatments = [arm for arm in one.arms if arm.verdict is not None]
    servers = servers_text(msgspec.to_builtins(one))
    return tag(
        "div",
        tag("div", tag("h2", one.name), tag("p", said, class_="soft")),
        tag("p", servers, class_="soft") if servers else None,
        tag("section", tag("p", one.warning), class_="card warnings") if one.warning else None,
        *(_verdict(arm, arm.verdict) for arm in treatments if arm.verdict),
        *(_goals(one, number) for number in range(len(one.arms[0].goals))),
        section("Arms", _arms(one)),
        class_="grid",
    )


def _verdict(arm: ArmStatus, verdict: ArmVerdict) -> Markup:
    kind = KINDS[verdict.kind]
    word, _, reason = verdict.text.replace(" %", "\N{NO-BREAK SPACE}%").partition(": ")
    guards = [
        tag(
            "span",
            f"{GUARDRAILS[one.name]}: {WORDS[one.result]}",
            class_=f"badge {RESULTS[one.result]}",
        )
        for one in verdict.guardrails
    ]
    first = arm.goals[0] if arm.goals else None
    change = "" if first is None or first.change is None else percent(first.change)
    unit = "" if first is None else f"{first.type} events per answer"
    big = tag("div", change or "–", tag("small", unit), class_="big")
    text = tag(
        "div",
        tag("p", tag("span", word, class_=f"badge {kind}"), " ", tag("b", arm.name)),
        tag("p", reason, class_="sentence"),
        None if arm.first_verdict is None else _first_verdict(arm.first_verdict),
        tag("p", *(part for guard in guards for part in (guard, " "))),
    )
    return tag("section", big, text, class_=f"card verdict {kind}")


def _first_verdict(first: FirstVerdict) -> Markup:
    text = first_verdict_text(msgspec.to_builtins(first))
    return tag("p", text.replace(" %", "\N{NO-BREAK SPACE}%"), class_="note")


def first_verdict_text(first: Mapping[str, Any]) -> str:
    """Returns the first verdict on an arm with its time and counts, from its JSON."""
    time, answers = (
        first["time"][:16].replace("T", " "),
        first["answers"] + first["control_answers"],
    )
    events = first["events"] + first["control_events"]
    counts = f"{time} UTC, {answers:,} answers, {events:,} events"
    return f"First verdict ({counts}): {first['text']}"


def servers_text(one: Mapping[str, Any]) -> str:
    """Returns how many servers share an experiment and what they lack, from its JSON; or ""."""
    if one["servers"] is None:
        return ""
    text = f"Sums of {one['servers']} server{'' if one['servers'] == 1 else 's'}"
    if not one["uncounted"]:
        return text
    total = sum(arm["requests"] for arm in one["arms"]) + one["uncounted"]
    lost = one["uncounted"] / total
    return (
        f"{text}; about {one['uncounted']:,} requests ({lost:.2%}) are not counted, because a "
        "server was killed or Redis has lost them"
    )


def _goals(one: ExperimentStatus, number: int) -> Markup:
    """Returns one goal: its rate per arm, and the change with its interval."""
    goals = [arm.goals[number] for arm in one.arms]
    known = [
        end for goal in goals for end in (goal.change_low, goal.change_high) if end is not None
    ]
    low, high = min([0.0, *known]), max([0.0, *known])
    room = 0.08 * max(high - low, 1e-3)
    axis = Axis(title="", low=low - room, high=high + room, ticks=())
    rows = [_goal(arm, goal, axis) for arm, goal in zip(one.arms, goals, strict=True)]
    note = (
        f"Events of type {goals[0].type} per answer, and the change against {one.arms[0].name} "
        "with an interval of 95 % that holds at every look. Left of the dashed line is less."
    )
    if number == 0:
        note += " This goal decides."
    return section(
        f"Goal: {goals[0].type}", tag("p", note, class_="note"), tag("div", *rows, class_="rows")
    )


def _goal(arm: ArmStatus, goal: GoalStatus, axis: Axis) -> Markup:
    rate = "–" if goal.rate is None else f"{goal.rate:.4g}"
    change = plot = None
    if goal.change is not None and goal.change_low is not None and goal.change_high is not None:
        ends = (goal.change_low, goal.change, goal.change_high)
        style = "good" if ends[0] > 0 else "bad" if ends[2] < 0 else "open"
        small = tag("small", f"{percent(ends[0])} to {percent(ends[2])}")
        change = tag("span", percent(goal.change), small, class_="change")
        plot = tag("span", interval(*ends, axis, style), class_="plot")
    return tag(
        "div",
        tag("span", arm.name, class_="name"),
        tag("span", f"{goal.events:,} in {arm.answers:,} answers: {rate}", class_="values"),
        change,
        plot,
        class_="row",
    )


def _arms(one: ExperimentStatus) -> Markup:
    users = one.mode == "split"
    rows = [
        [
            arm.name,
            f"{arm.weight:.3g}",
            *([f"{arm.users:,}"] if users else []),
            *(f"{count:,}" for count in (arm.requests, arm.errors, arm.empty)),
            *(_ms(value) for value in (arm.p50_ms, arm.p99_ms)),
            f"{_ms(arm.p99_low_ms)} to {_ms(arm.p99_high_ms)}",
        ]
        for arm in one.arms
    ]
    counts = ["users", "requests"] if users else ["requests"]
    headings = ["arm", "weight", *counts, "errors", "empty", "p50 ms", "p99 ms", "95 % of p99"]
    return table(headings, rows)


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def percent(value: float) -> str:
    """Returns a change such as "+3.1 %"."""
    return f"{value * 100:+.1f}\N{NO-BREAK SPACE}%".replace("-", MINUS)
