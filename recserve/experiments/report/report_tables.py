"""Tables of the report: arms, drafting, checks, configuration and machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from recserve.experiments.report.document import ReportDocument
from recserve.experiments.report.markup import Markup, section, table, tag
from recserve.experiments.report.measurements import ArmSummary, Spread
from recserve.experiments.statistics.criteria import percent

PERCENTILES = ("p50", "p90", "p95", "p99", "p99.9")
# Bytes of JSON that are shown without a fold: a line or two.
LONGEST_OPEN = 160


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
