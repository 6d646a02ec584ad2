"""Charts of the report: distribution, course of the run, confidence sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from recserve.experiments.report.charts import (
    COLOURS,
    Axis,
    Line,
    chart,
    linear_axis,
    log_axis,
    percentile_axis,
    tail,
)
from recserve.experiments.report.document import ReportDocument
from recserve.experiments.report.markup import Markup, tag
from recserve.experiments.report.measurements import Spread
from recserve.experiments.statistics.comparison import Comparison
from recserve.experiments.statistics.criteria import METRIC_WORDS


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
