"""The report: one HTML page without scripts or links, for a reader with a minute.

Order: verdict, warnings, effects, guardrails, distributions, course of the run, arms, checks,
configuration, machine. Every text goes through `markup`, which escapes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

from recserve.experiments.report.charts import (
    Axis,
    interval,
)
from recserve.experiments.report.document import ReportDocument
from recserve.experiments.report.markup import Markup, tag
from recserve.experiments.report.report_charts import course, distribution, looks
from recserve.experiments.report.report_tables import arms_table, checks, drafting_table, facts
from recserve.experiments.statistics.comparison import Comparison
from recserve.experiments.statistics.criteria import (
    METRIC_WORDS,
    VerdictKind,
    causes,
    failed_guardrails,
    percent,
)
from recserve.experiments.statistics.intervals import Effect, Interval
from recserve.experiments.statistics.quality import Guardrail

STYLE = "report.css"
# The class of a verdict in the style sheet, and its badge.
KINDS: dict[VerdictKind, tuple[str, str]] = {
    "better": ("better", "better"),
    "worse": ("worse", "worse"),
    "unclear": ("unclear", "undecided"),
    "invalid": ("invalid", "not valid"),
    "do_not_ship": ("worse", "do not ship"),
}
OUTCOMES = {"pass": "holds", "fail": "fails", "unclear": "unclear"}


def page(document: ReportDocument) -> str:
    """Returns the report as one HTML document."""
    style = (resources.files("recserve.experiments.report") / STYLE).read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", document.title),
        tag("style", Markup(style)),
    )
    comparisons = document.comparisons
    body = tag(
        "main",
        _header(document),
        *(_verdict(one) for one in comparisons),
        None if comparisons else _figures(document),
        _warnings(document),
        *(_effects(one) for one in comparisons),
        tag(
            "div",
            distribution(document),
            course(document),
            *(_guardrails(one) for one in comparisons),
            *(looks(one) for one in comparisons),
            class_="grid two",
        ),
        arms_table(document),
        drafting_table(document),
        tag("div", checks(document), facts(document), class_="grid two"),
        tag("footer", "Written by recserve. Times are in milliseconds unless they say otherwise."),
    )
    return "<!doctype html>\n" + tag("html", head, tag("body", body), lang="en")


def _header(document: ReportDocument) -> Markup:
    machine = document.machine
    requests = sum(one.num_requests for one in document.summaries)
    time = machine.time.replace("T", " ").replace("+00:00", " UTC")
    said = f"{time} · {requests:,} requests · {machine.processor}, {machine.num_cores} cores"
    return tag("header", tag("h1", document.title), tag("p", said, class_="soft"))


def _verdict(one: Comparison) -> Markup:
    effect = decisive(one)
    shown = one.looks[-1].relative if one.sequential and one.looks else effect.relative
    figure, label = percent(shown.estimate), f"{one.statistic} {METRIC_WORDS[one.metric]}"
    style, word = KINDS[one.kind]
    if one.kind == "do_not_ship":  # what decides is the guardrail
        failed = failed_guardrails(one.guardrails)
        figure, label = format_signed(failed[0].change.estimate), failed[0].name
        word = f"{word}: {causes(failed)}"
    big = tag("div", figure, tag("small", label), class_="big")
    reach = f"A run like this finds a change of {one.detectable:.1%} with power 0.9."
    if one.detectable > 1:
        reach = "A run of this length finds only very large changes."
    detail = f"{reach} {one.num_blocks} time blocks of {one.block_s:.1f} s."
    text = tag(
        "div",
        tag("p", tag("span", word, class_=f"badge {style}")),
        tag("p", unbroken(one.verdict), class_="sentence"),
        tag("p", detail, class_="note"),
    )
    return tag("section", big, text, class_=f"card verdict {style}")


def unbroken(text: str) -> str:
    """Returns the text with numbers and their units on one line."""
    return text.replace(" %", "\N{NO-BREAK SPACE}%").replace(" ms", "\N{NO-BREAK SPACE}ms")


def decisive(one: Comparison) -> Effect:
    """Returns the effect that the verdict rests on."""
    return next(e for e in one.effects[one.metric] if e.statistic == one.statistic)


def _figures(document: ReportDocument) -> Markup:
    """The main figure of a run with one arm."""
    one = document.summaries[0]
    if one.latency_ms is None:
        return tag(
            "section",
            tag("p", "No request was answered.", class_="sentence"),
            class_="card verdict worse",
        )
    p50, p99 = one.latency_ms.percentiles["p50"], one.latency_ms.percentiles["p99"]
    parts = [f"{one.requests_per_s:.1f} requests per second", f"p50 {ms(p50)}", f"p99 {ms(p99)}"]
    if one.items and one.items.illegal_share is not None:
        parts.append(f"illegal share {one.items.illegal_share:.2%}")
    exact = document.exactness[0] if document.exactness else None
    if exact:
        parts.append(f"overlap with the exact slate {exact.mean_overlap:.3f}")
    if one.text:
        parts.append(f"{one.text.tokens_per_s:.0f} tokens per second")
        if one.text.ttft_ms:
            parts.append(f"first token p50 {ms(one.text.ttft_ms.percentiles['p50'])}")
    failed = sum(one.errors.values())
    parts.append(f"{failed:,} of {one.num_requests:,} requests failed")
    big = tag("div", ms(p99), tag("small", "p99 latency"), class_="big")
    kind = "worse" if failed else "better"
    return tag(
        "section",
        big,
        tag("p", ", ".join(parts) + ".", class_="sentence"),
        class_=f"card verdict {kind}",
    )


def _warnings(document: ReportDocument) -> Markup | None:
    found = [*document.warnings, *(note for one in document.comparisons for note in one.notes)]
    if not found:
        return None
    listed = [tag("li", one[:1].upper() + one[1:]) for one in dict.fromkeys(found)]
    return tag("section", tag("h2", "Read this first"), tag("ul", *listed), class_="card warnings")


def _effects(one: Comparison) -> Markup:
    every = [effect.relative for effects in one.effects.values() for effect in effects]
    axis = common_axis(every)
    blocks: list[Markup] = []
    for metric, effects in one.effects.items():
        if len(one.effects) > 1:
            blocks.append(tag("h2", METRIC_WORDS[metric].capitalize()))
        decides = one.statistic if metric == one.metric else None
        blocks.append(tag("div", *(_effect(e, axis, decides) for e in effects), class_="rows"))
    note = (
        f"Change of {one.treatment} against {one.control}, with intervals that allow for waves of "
        "slow requests. Left of the dashed line is faster."
    )
    heading = "Effects" if len(one.effects) > 1 else f"Effect on {METRIC_WORDS[one.metric]}"
    return tag(
        "div",
        tag("section", tag("h2", heading), tag("p", note, class_="note"), *blocks, class_="card"),
        class_="grid",
    )


def _effect(effect: Effect, axis: Axis, decides: str | None) -> Markup:
    found = effect.relative
    style = "open" if not found.excludes_zero else ("good" if found.high < 0 else "bad")
    named = tag("span", " decides", class_="decides") if effect.statistic == decides else None
    return tag(
        "div",
        tag("span", effect.statistic, named, class_="name"),
        tag("span", f"{ms(effect.control)} → {ms(effect.treatment)}", class_="values"),
        tag(
            "span",
            percent(found.estimate),
            tag("small", f"{percent(found.low)} to {percent(found.high)}"),
            class_="change",
        ),
        tag("span", interval(found.low, found.estimate, found.high, axis, style), class_="plot"),
        class_="row",
    )


def common_axis(intervals: Sequence[Interval]) -> Axis:
    """Returns an axis that holds zero, all estimates, and all intervals that are not very wide."""
    estimates = [one.estimate for one in intervals]
    widest = max([1.0, *(3 * abs(value) for value in estimates)])
    shown = [one for one in intervals if one.high - one.low < widest]
    low = min([0.0, *estimates, *(one.low for one in shown)])
    high = max([0.0, *estimates, *(one.high for one in shown)])
    room = 0.08 * max(high - low, 1e-3)
    return Axis(title="", low=low - room, high=high + room, ticks=())


def _guardrails(one: Comparison) -> Markup | None:
    if not one.guardrails:
        return None
    note = (
        "A guardrail holds when the whole interval of the change stays above the accepted loss. "
        "Below zero is worse."
    )
    rows = tag("div", *(_guardrail(guard) for guard in one.guardrails), class_="rows")
    return tag(
        "section", tag("h2", "Guardrails"), tag("p", note, class_="note"), rows, class_="card"
    )


def _guardrail(guard: Guardrail) -> Markup:
    style = {"pass": "good", "fail": "bad", "unclear": "open"}[guard.outcome]
    change = guard.change
    axis = common_axis([change, Interval(0, -guard.margin, guard.margin)])
    before = "" if guard.control is None else f"{guard.control:.4g} → "
    return tag(
        "div",
        tag("span", guard.name, class_="name"),
        tag(
            "span",
            f"{before}{guard.treatment:.4g}, accepted loss {guard.margin:g}",
            class_="values",
        ),
        tag(
            "span",
            tag("span", OUTCOMES[guard.outcome], class_=f"badge {guard.outcome}"),
            tag("small", f"{format_signed(change.low)} to {format_signed(change.high)}"),
            class_="change",
        ),
        tag("span", interval(change.low, change.estimate, change.high, axis, style), class_="plot"),
        class_="row",
    )


def format_signed(value: float) -> str:
    """Returns a number with its sign and three digits."""
    return f"{value:+.3g}".replace("-", "\N{MINUS SIGN}")


def ms(value: float) -> str:
    """Returns "12.3 ms" with three digits, seconds from 10 s on."""
    if value >= 10_000:
        return f"{value / 1e3:.1f} s"
    digits = 0 if value >= 100 else (1 if value >= 10 else 2)
    return f"{value:,.{digits}f} ms"
