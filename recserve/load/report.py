"""The result of a session as one JSON document, and as one HTML page without scripts or links.

The page is for a reader with a minute. Its order: verdict, warnings, effects, guardrails,
distributions, course of the run, arms, checks, configuration, machine. Every text goes through
`markup`, which escapes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from recserve.experiments.charts import (
    COLOURS,
    Axis,
    Line,
    Markup,
    chart,
    html_page,
    interval,
    linear_axis,
    log_axis,
    percentile_axis,
    section,
    table,
    tag,
    tail,
)
from recserve.experiments.statistics import Effect, Guardrail, Interval
from recserve.load.calibration import Lateness, Overhead
from recserve.load.comparison import (
    METRIC_WORDS,
    Comparison,
    SampleRatio,
    VerdictKind,
    causes,
    failed_guardrails,
    percent,
)
from recserve.load.generator import Arm, Design
from recserve.load.measurements import ArmSummary, Spread
from recserve.load.session import Exactness, MachineInfo, Session, Workload

FORMAT = "recserve-experiment/1"
CURVE_POINTS = 200
SERIES_POINTS = 60
SECRET_FLAGS = ("--header",)
PERCENTILES = ("p50", "p90", "p95", "p99", "p99.9")
# Bytes of JSON that are shown without a fold: a line or two.
LONGEST_OPEN = 160
# The class of a verdict in the style sheet, and its badge.
KINDS: dict[VerdictKind, tuple[str, str]] = {
    "better": ("better", "better"),
    "worse": ("worse", "worse"),
    "unclear": ("unclear", "undecided"),
    "invalid": ("invalid", "not valid"),
    "do_not_ship": ("worse", "do not ship"),
}
OUTCOMES = {"pass": "holds", "fail": "fails", "unclear": "unclear"}


@dataclass(frozen=True)
class Curve:
    """The quantile function of one arm's latency.

    Attributes:
        shares: Share of requests that are faster, dense towards 1.
        milliseconds: Latency at each share.
    """

    shares: list[float]
    milliseconds: list[float]


@dataclass(frozen=True)
class Series:
    """Latency of one arm over the run, in equal slices of time.

    Attributes:
        seconds: Middle of each slice.
        p50_ms: Median in the slice; None without requests.
        p99_ms: 99th percentile in the slice; None under 20 requests.
    """

    seconds: list[float]
    p50_ms: list[float | None]
    p99_ms: list[float | None]


@dataclass(frozen=True)
class ReportDocument:
    """Everything that a reader needs.

    Attributes:
        format: Name and version of this form.
        title: What was run.
        command: The command line, without values of headers.
        configuration: Workload and design, as given.
        arms: Configurations.
        summaries: One per arm.
        curves: One per arm.
        series: One per arm.
        exactness: One per arm, None where it was not measured.
        ratio: The sample-ratio check; None for one arm.
        comparisons: Each treatment against the control.
        lateness: Of the sends.
        overhead: Of the generator; None if it was not measured.
        peak_in_flight: Most requests under way at once.
        generator_cpu_share: Cores that the generator used.
        machine: Where the generator ran.
        servers: What each server says of itself.
        warnings: What a reader must know.
    """

    format: str
    title: str
    command: list[str]
    configuration: dict[str, Any]
    arms: list[Arm]
    summaries: list[ArmSummary]
    curves: list[Curve]
    series: list[Series]
    exactness: list[Exactness | None]
    ratio: SampleRatio | None
    comparisons: list[Comparison]
    lateness: Lateness
    overhead: Overhead | None
    peak_in_flight: int
    generator_cpu_share: float
    machine: MachineInfo
    servers: dict[str, Any]
    warnings: list[str]


def make_document(
    session: Session,
    workload: Workload,
    design: Design,
    command: Sequence[str],
    comparisons: Sequence[Comparison] = (),
    ratio: SampleRatio | None = None,
) -> ReportDocument:
    """Returns the document of a session.

    Args:
        session: The finished run.
        workload: What was sent.
        design: How arms were drawn.
        command: The command line.
        comparisons: Of the arms.
        ratio: The sample-ratio check.
    """
    names = " against ".join(arm.name for arm in session.arms[::-1])
    one = len(session.arms) == 1
    return ReportDocument(
        format=FORMAT,
        title=f"{workload.target.name}: {session.arms[0].url if one else names}",
        command=without_secrets(command),
        configuration=configuration(workload, design, one),
        arms=list(session.arms),
        summaries=list(session.summaries),
        curves=[curve(session, number) for number in range(len(session.arms))],
        series=[series(session, number) for number in range(len(session.arms))],
        exactness=list(session.exactness),
        ratio=ratio,
        comparisons=list(comparisons),
        lateness=session.lateness,
        overhead=session.overhead,
        peak_in_flight=session.peak_in_flight,
        generator_cpu_share=session.generator_cpu_share,
        machine=session.machine,
        servers=session.servers,
        warnings=list(session.warnings),
    )


def to_json(document: ReportDocument) -> bytes:
    """Returns the document as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2)


def configuration(workload: Workload, design: Design, one_arm: bool) -> dict[str, Any]:
    """Returns the settings of a run that change its result."""
    closed = workload.arrivals == "closed"
    found: dict[str, Any] = {
        "route": workload.target.path,
        "data": workload.data.name,
        "arrivals": workload.arrivals,
        "rate per second": None if closed else workload.rate,
        "workers": workload.workers if closed else None,
        "duration (s)": workload.duration_s,
        "warm-up (s)": workload.warmup_s,
        "timeout (s)": workload.load.timeout_s,
        "request fields": workload.fields or None,
        "history sent": workload.users.max_history if workload.target.kind == "items" else None,
        "streaming": workload.target.streams if workload.target.kind == "text" else None,
        "mode": None if one_arm else design.mode,
        "seed": design.seed,
    }
    return {name: value for name, value in found.items() if value is not None}


def without_secrets(command: Sequence[str]) -> list[str]:
    """Returns the command line with the values of headers left out."""
    found = []
    hide = False
    for word in command:
        flag, equals, _ = word.partition("=")
        if hide:
            found.append("...")
        elif flag in SECRET_FLAGS and equals:
            found.append(f"{flag}=...")
        else:
            found.append(word)
        hide = not hide and word in SECRET_FLAGS
    return found


def curve(session: Session, number: int) -> Curve:
    """Returns the quantile function of one arm, from the minimum to the maximum."""
    columns = session.columns
    values = columns.latency_ms[(columns.arm == number) & columns.timed]
    if not len(values):
        return Curve(shares=[], milliseconds=[])
    tail = 1 - np.logspace(0, -np.log10(max(len(values), 10)), CURVE_POINTS)
    shares = np.unique(np.concatenate([tail, np.linspace(0, 1, 21)]))
    found = np.quantile(values, shares)
    return Curve(shares=shares.tolist(), milliseconds=found.tolist())


def series(session: Session, number: int) -> Series:
    """Returns median and 99th percentile of one arm in equal slices of the run."""
    columns = session.columns
    mine = (columns.arm == number) & columns.timed
    times, values = columns.sent_s[mine], columns.latency_ms[mine]
    start, end = float(columns.sent_s.min()), float(columns.sent_s.max())
    edges = np.linspace(start, max(end, start + 1e-9), SERIES_POINTS + 1)
    places = np.clip(np.searchsorted(edges, times, side="right") - 1, 0, SERIES_POINTS - 1)
    groups = [values[places == slot] for slot in range(SERIES_POINTS)]
    return Series(
        seconds=((edges[:-1] + edges[1:]) / 2 - start).tolist(),
        p50_ms=[float(np.median(group)) if len(group) else None for group in groups],
        p99_ms=[float(np.quantile(g, 0.99)) if len(g) >= 20 else None for g in groups],
    )


def pairs(found: Mapping[str, Any]) -> Markup:
    """Returns names and values; objects as JSON."""
    return tag(
        "dl",
        *(
            part
            for name, value in found.items()
            for part in (tag("dt", name), tag("dd", plain(value)))
        ),
    )


def plain(value: Any) -> str | Markup:
    """Returns a value as text, an object as code; a long one is folded under the names it has."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
    written = msgspec.json.encode(value)
    if len(written) <= LONGEST_OPEN:
        return tag("code", written.decode())
    said = ", ".join(value) if isinstance(value, Mapping) else f"{len(value):,} values"
    lines = msgspec.json.format(written, indent=2).decode()
    return tag("details", tag("summary", said), tag("pre", tag("code", lines)))


def cells(spread: Spread | None) -> list[str]:
    """Returns mean, percentiles and maximum, dashes without values."""
    if spread is None:
        return ["–"] * (len(PERCENTILES) + 2)
    values = [spread.mean, *(spread.percentiles[name] for name in PERCENTILES), spread.maximum]
    return [number(value) for value in values]


def number(value: float) -> str:
    """Returns a time with three digits or so."""
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 10 else 2}f}"


def arms_table(document: ReportDocument) -> Markup:
    """Returns requests and latencies per arm, then slates or text, then the request fields."""
    rows = [
        [
            one.name,
            f"{one.num_requests:,}",
            f"{one.requests_per_s:,.1f}",
            f"{sum(one.errors.values()):,}",
            *cells(one.latency_ms),
        ]
        for one in document.summaries
    ]
    headings = ["arm", "requests", "per s", "failed", "mean", *PERCENTILES, "max"]
    more = [_service(document), _slates(document), _text(document)]
    fields = (
        {arm.name: arm.fields or "no fields of its own" for arm in document.arms}
        if len(document.arms) > 1
        else None
    )
    return tag(
        "div",
        section(
            "Arms" if len(document.arms) > 1 else "Latency in milliseconds",
            table(headings, rows),
            *(one for one in more if one is not None),
            pairs(fields) if fields else None,
        ),
        class_="grid",
    )


def _service(document: ReportDocument) -> Markup | None:
    rows = []
    for one in document.summaries:
        rows.append([f"{one.name}: from the actual send", *cells(one.service_ms)])
        if one.server_ms:
            rows.append([f"{one.name}: as the server says", *cells(one.server_ms)])
    return table(["time in milliseconds", "mean", *PERCENTILES, "max"], rows)


def _slates(document: ReportDocument) -> Markup | None:
    rows = []
    exactness = document.exactness or [None] * len(document.summaries)
    for one, exact in zip(document.summaries, exactness, strict=True):
        if one.items is None or one.items.slate_size is None:
            continue
        illegal = one.items.illegal_share
        rows.append(
            [
                one.name,
                f"{one.items.slate_size.mean:.1f}",
                f"{one.items.short_share:.2%}",
                f"{one.items.duplicate_share:.2%}",
                "–" if illegal is None else f"{illegal:.2%}",
                "–" if exact is None else f"{exact.mean_overlap:.3f}",
                "–" if exact is None else f"{exact.identical_share:.0%} of {exact.count}",
            ]
        )
    headings = ["slates", "items", "short", "with duplicates", "illegal items"]
    return table([*headings, "overlap with exact", "identical"], rows) if rows else None


def _text(document: ReportDocument) -> Markup | None:
    rows = []
    for one in document.summaries:
        if one.text is None:
            continue
        for name, spread in (
            ("first token (ms)", one.text.ttft_ms),
            ("per output token (ms)", one.text.tpot_ms),
            ("between pieces (ms)", one.text.gap_ms),
            ("output tokens", one.text.output_tokens),
        ):
            rows.append([f"{one.name}: {name}", *cells(spread)])
    return table(["text", "mean", *PERCENTILES, "max"], rows) if rows else None


def drafting_table(document: ReportDocument) -> Markup | None:
    """Returns tokens per step by category and arm; None without drafts."""
    arms = [one for one in document.summaries if one.text and one.text.drafting]
    if not arms:
        return None
    names = list(dict.fromkeys(name for one in arms if one.text for name in one.text.drafting))
    rows = []
    for name in names:
        row = [name]
        for one in arms:
            found = one.text.drafting.get(name) if one.text else None
            row += (
                [
                    f"{found.tokens_per_step:.2f}",
                    f"{found.acceptance_rate:.0%}",
                    f"{found.share_of_time:.0%}",
                ]
                if found
                else ["–"] * 3
            )
        rows.append(row)
    headings = ["category"]
    for one in arms:
        headings += [f"{one.name}: tokens per step", "accepted", "of the time"]
    return tag("div", section("Speculative decoding", table(headings, rows)), class_="grid")


def checks(document: ReportDocument) -> Markup:
    """Returns the checks that the result rests on."""
    found: dict[str, Any] = {}
    ratio = document.ratio
    if ratio is not None:
        counts = " : ".join(f"{count:,}" for count in ratio.counts)
        state = "alarm" if ratio.alarm else "as planned"
        found["sample ratio"] = f"{counts} {ratio.counted}, p = {ratio.p_value:.3g}, {state}"
    for one in document.comparisons:
        found[f"time blocks, {one.treatment}"] = f"{one.num_blocks} of {one.block_s:.1f} s"
        found[f"difference correlated, {one.treatment}"] = (
            f"over {one.correlation_time:.0f} requests"
        )
        found[f"effective size for {one.statistic}, {one.treatment}"] = (
            f"{one.effective_size:,.0f} independent requests"
        )
        if one.order_effect is not None:
            order = one.order_effect
            found["second of a pair against first (p50)"] = (
                f"{percent(order.estimate)} ({percent(order.low)} to {percent(order.high)})"
            )
    for summary in document.summaries:
        found[f"effective size, {summary.name}"] = _effective(summary)
    late = document.lateness
    found["sends after their time"] = (
        f"p50 {late.p50_ms:.2f} ms, p99 {late.p99_ms:.2f} ms, at most {late.max_ms:.1f} ms"
    )
    found["most requests in flight"] = document.peak_in_flight
    found["processor time of the generator"] = f"{document.generator_cpu_share:.2f} cores"
    if document.overhead is not None:
        own = document.overhead
        found["generator against an instant server"] = (
            f"{own.capacity_per_s:,.0f} requests/s in a closed loop, {own.cpu_ms:.2f} ms of "
            f"processor time each; at this rate p50 {own.latency_p50_ms:.2f} ms, "
            f"p99 {own.latency_p99_ms:.2f} ms"
        )
    return section("Checks", pairs(found))


def _effective(one: ArmSummary) -> str:
    return f"{one.effective_size:,.0f} of {one.num_requests:,} requests, for the mean"


def facts(document: ReportDocument) -> Markup:
    """Returns configuration, machine, versions and the command."""
    machine = document.machine
    found: dict[str, Any] = {
        **document.configuration,
        "machine": f"{machine.processor}, {machine.num_cores} cores",
        "load average": machine.load_average,
        "system": f"{machine.system}, Python {machine.python}",
        "packages": ", ".join(f"{name} {version}" for name, version in machine.packages.items()),
    }
    for one in document.summaries:
        if one.versions:
            found[f"answered by, {one.name}"] = ", ".join(one.versions)
    for url, said in document.servers.items():
        if said:
            found[url] = said
    return section(
        "Configuration",
        pairs(found),
        tag("p", tag("code", "recserve " + " ".join(document.command))),
    )


def legend(names: Sequence[str], dashed: tuple[str, str] | None = None) -> Markup:
    """Returns the colours of the arms, and what solid and dashed lines are."""
    found = [
        tag("span", tag("i", class_=f"a{number % COLOURS}"), name)
        for number, name in enumerate(names)
    ]
    if dashed:
        found.append(tag("span", tag("i"), dashed[0]))
        found.append(tag("span", tag("i", class_="dashed"), dashed[1]))
    return tag("div", *found, class_="legend")


def distribution(document: ReportDocument) -> Markup | None:
    """Returns the latency of every arm by percentile; None without answers."""
    curves = document.curves
    times = [time for one in curves for time in one.milliseconds if time > 0]
    if not times:
        return None
    count = max(spread.count for spread in _latencies(document))
    x = percentile_axis(count)
    lines = [
        Line(
            tuple(
                (tail(share), time)
                for share, time in zip(one.shares, one.milliseconds, strict=True)
                if tail(share) <= x.high and time > 0
            ),
            f"a{number % COLOURS}",
        )
        for number, one in enumerate(curves)
    ]
    drawn = chart(x, log_axis("ms", min(times), max(times)), lines, "Latency by percentile")
    names = [arm.name for arm in document.arms]
    note = (
        "Latency in milliseconds, from the scheduled send to the last byte. The tail is stretched."
    )
    return tag(
        "section",
        tag("h2", "Latency distribution"),
        tag("p", note, class_="note"),
        legend(names) if len(names) > 1 else None,
        drawn,
        class_="card",
    )


def _latencies(document: ReportDocument) -> list[Spread]:
    return [one.latency_ms for one in document.summaries if one.latency_ms is not None]


def whole_axis(title: str, low: float, high: float) -> Axis:
    """Returns an axis that starts and ends with the data, with round ticks between."""
    axis = linear_axis(title, low, high)
    ticks = tuple(tick for tick in axis.ticks if low <= tick.value <= high)
    return replace(axis, low=low, high=high, ticks=ticks)


def course(document: ReportDocument) -> Markup | None:
    """Returns median and 99th percentile over the run; None without answers."""
    lines = []
    values: list[float] = []
    for number, one in enumerate(document.series):
        for column, style in ((one.p50_ms, ""), (one.p99_ms, " dashed")):
            points = tuple(
                (second, math.nan if value is None else value)
                for second, value in zip(one.seconds, column, strict=True)
            )
            values += [value for value in column if value is not None and value > 0]
            lines.append(Line(points, f"a{number % COLOURS}{style}"))
    if not values:
        return None
    seconds = document.series[0].seconds
    x = whole_axis("seconds of the run", 0.0, seconds[-1] + seconds[0])
    y = log_axis("ms", min(values), max(values))
    names = [arm.name for arm in document.arms]
    has_tail = any(value is not None for one in document.series for value in one.p99_ms)
    return tag(
        "section",
        tag("h2", "Course of the run"),
        tag("p", "Latency in milliseconds, in sixty slices of the run.", class_="note"),
        legend(names, ("median", "p99") if has_tail else None),
        chart(x, y, lines, "Median and 99th percentile of the latency over time"),
        class_="card",
    )


def looks(one: Comparison) -> Markup | None:
    """Returns the interval of the deciding statistic as the run went on; None without looks."""
    seen = one.looks
    if len(seen) < 2:
        return None
    lows = [look.relative.low for look in seen]
    highs = [look.relative.high for look in seen]
    # The first looks are wide and would flatten the rest.
    y = linear_axis(
        "", 100 * max(min(lows[len(lows) // 4 :]), -1), 100 * min(max(highs[len(highs) // 4 :]), 2)
    )
    x = whole_axis("time blocks seen", seen[0].num_blocks, seen[-1].num_blocks)

    def edge(values: Sequence[float]) -> tuple[tuple[float, float], ...]:
        return tuple(
            (look.num_blocks, 100 * value) for look, value in zip(seen, values, strict=True)
        )

    lines = [
        Line(edge(lows), "band", upper=edge(highs)),
        Line(
            edge([k.fixed.low for k in seen]),
            "band inner",
            upper=edge([k.fixed.high for k in seen]),
        ),
        Line(edge([k.relative.estimate for k in seen]), "a0"),
    ]
    note = (
        f"Relative change of {one.statistic} {METRIC_WORDS[one.metric]} in per cent, as the run "
        "went on. The wide band holds at every look, so a run may stop when it leaves zero. The "
        "narrow band holds for one planned look only."
    )
    return tag(
        "section",
        tag("h2", "Interval over time"),
        tag("p", note, class_="note"),
        chart(x, y, lines, "Confidence sequence of the relative change", zero=True),
        class_="card",
    )


def page(document: ReportDocument) -> str:
    """Returns the report as one HTML document."""
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
    return html_page(document.title, body)


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
        tag("p", join_units(one.verdict), class_="sentence"),
        tag("p", detail, class_="note"),
    )
    return tag("section", big, text, class_=f"card verdict {style}")


def join_units(text: str) -> str:
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
