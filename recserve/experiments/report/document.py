"""The result of a session as one JSON document, which the report page shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from recserve.experiments.load.calibration import Lateness, Overhead
from recserve.experiments.load.plan import Arm, Design
from recserve.experiments.load.session import Session, Workload
from recserve.experiments.load.slates import Exactness
from recserve.experiments.report.machine import MachineInfo
from recserve.experiments.report.measurements import ArmSummary
from recserve.experiments.statistics.comparison import Comparison
from recserve.experiments.statistics.criteria import SampleRatio

FORMAT = "recserve-experiment/1"
CURVE_POINTS = 200
SERIES_POINTS = 60
SECRET_FLAGS = ("--header",)


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
