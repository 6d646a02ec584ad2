"""A load run from options to a result: read data, plan, calibrate, drive, check, summarise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from recserve.experiments.load.arrivals import Times, poisson_arrivals, trace_arrivals
from recserve.experiments.load.calibration import (
    Lateness,
    Overhead,
    lateness,
    measure_overhead,
)
from recserve.experiments.load.datasets import (
    Sample,
    UserOptions,
    read_item_ids,
    read_samples,
)
from recserve.experiments.load.generator import LoadOptions, LoadProgress, Run, drive
from recserve.experiments.load.plan import Arm, Design, check_samples, make_plan
from recserve.experiments.load.slates import (
    ExactCheck,
    Exactness,
    SlateChecks,
    arm_overlaps,
    exact_overlap,
    known_items,
)
from recserve.experiments.load.targets import Json, Target
from recserve.experiments.report.machine import (
    MachineInfo,
    server_facts,
    this_machine,
    wait_ready,
)
from recserve.experiments.report.measurements import ArmSummary, SampleColumns, summarise
from recserve.experiments.statistics.comparison import (
    Comparison,
    check_ratio,
    compare_arms,
)
from recserve.experiments.statistics.criteria import Criteria, SampleRatio
from recserve.experiments.statistics.early_stop import EarlyStop

Arrivals = Literal["poisson", "trace", "closed"]
MAX_CLOSED = 100_000
DEFAULT_K = 10


@dataclass(frozen=True)
class Workload:
    """What is sent, and when.

    Attributes:
        target: Route.
        data: Data set.
        users: How users are read.
        fields: Request fields of every request.
        arrivals: Poisson, the times of a trace, or a closed loop.
        rate: Requests per second; of a trace, None keeps its own.
        duration_s: Length of the run, the warm-up included.
        trace: File of arrival times.
        workers: Of a closed loop.
        warmup_s: Requests scheduled before this are sent and not counted.
        load: How requests are sent.
        items: Table of all items, for the illegal share; None asks the server.
        exact_sample: Answered requests that are asked again for the exact slate.
        exact_fields: Request fields of the exact slate.
        calibrate: Whether the generator is measured first.
    """

    target: Target
    data: Path
    users: UserOptions = UserOptions()
    fields: Json = field(default_factory=dict)
    arrivals: Arrivals = "poisson"
    rate: float | None = 10.0
    duration_s: float = 30.0
    trace: Path | None = None
    workers: int = 1
    warmup_s: float = 2.0
    load: LoadOptions = LoadOptions()
    items: Path | None = None
    exact_sample: int = 100
    exact_fields: Json = field(default_factory=lambda: {"strategy": "beam"})
    calibrate: bool = True

    @property
    def k(self) -> int | None:
        """Items asked for; None where the route has no such number."""
        if self.target.name != "recommend":
            return None
        k = self.fields.get("k", DEFAULT_K)
        return k if isinstance(k, int) else DEFAULT_K


@dataclass(frozen=True)
class Session:
    """A finished load run.

    Attributes:
        columns: Requests after the warm-up.
        samples: What was asked.
        arms: Configurations.
        summaries: One per arm.
        exactness: One per arm; empty for text.
        overlaps: Per arm, overlaps of its slates with the first arm's for the same requests.
        lateness: Of the sends.
        overhead: Of the generator; None if it was not measured.
        peak_in_flight: Most shots under way at once.
        generator_cpu_share: Processor time of the generator per second, in cores.
        machine: Where the generator ran.
        servers: What each server says of itself, by address.
        warnings: What a reader must know.
        planned_shots: Shots after the warm-up of a run that may stop early; None for other runs.
    """

    columns: SampleColumns
    samples: tuple[Sample, ...]
    arms: tuple[Arm, ...]
    summaries: tuple[ArmSummary, ...]
    exactness: tuple[Exactness | None, ...]
    overlaps: tuple[tuple[float, ...], ...]
    lateness: Lateness
    overhead: Overhead | None
    peak_in_flight: int
    generator_cpu_share: float
    machine: MachineInfo
    servers: dict[str, Any]
    warnings: tuple[str, ...]
    planned_shots: int | None = None


def arrival_times(workload: Workload, seed: str) -> Times:
    """Returns the scheduled seconds of the shots.

    Raises:
        ValueError: If a rate or a trace is missing.
    """
    if workload.arrivals == "closed":
        return np.zeros(MAX_CLOSED)
    if workload.arrivals == "trace":
        if workload.trace is None:
            raise ValueError("arrivals by trace: expected a file of arrival times")
        return trace_arrivals(workload.trace, workload.rate, workload.duration_s)
    if workload.rate is None:
        raise ValueError("Poisson arrivals: expected a rate")
    number = int.from_bytes(seed.encode(), "little") if seed else 0
    return poisson_arrivals(workload.rate, workload.duration_s, number)


async def run_session(
    workload: Workload,
    arms: Sequence[Arm],
    design: Design,
    progress: Callable[[str, LoadProgress | None], None],
    early: Criteria | None = None,
) -> Session:
    """Runs a workload against one or more arms.

    Args:
        workload: What is sent.
        arms: Configurations, the control first.
        design: How requests are divided among them.
        progress: Receives the stage and the position in the run.
        early: What decides when the run stops early; None runs to the end.

    Raises:
        ValueError: If the data does not fit the route, or no request was sent.
    """
    samples = tuple(read_samples(workload.data, workload.users))
    check_samples(samples, workload.target)
    times = arrival_times(workload, design.seed)
    if not len(times):
        raise ValueError("no arrivals: raise the rate or lengthen the run")
    shots = make_plan(samples, arms, workload.target, times, design, workload.fields)
    load = workload.load
    if workload.arrivals == "closed":
        load = replace(load, workers=workload.workers, stop_after_s=workload.duration_s)
    machine = this_machine()
    headers = dict(load.headers)
    for url in sorted({arm.url for arm in arms}):
        progress(f"waiting for {url}", None)
        await wait_ready(url, headers)
    servers = {url: await server_facts(url, headers) for url in sorted({arm.url for arm in arms})}
    overhead = None
    if workload.calibrate:
        progress("measuring the load generator", None)
        overhead = await measure_overhead(
            len(times) / workload.duration_s if not load.workers else 100.0
        )
    warmup = sum(shot.at_s < workload.warmup_s for shot in shots)
    planned = None if early is None else len(shots) - warmup
    until = None
    if early is not None:
        early = replace(early, planned_shots=planned)
        until = EarlyStop(samples, len(arms), design.mode, early, warmup, workload.warmup_s)
    run = await drive(shots, workload.target, load, lambda state: progress("load", state), until)
    columns = SampleColumns.of(run, samples, workload.warmup_s)
    if not columns.exchanges:
        raise ValueError("no request was sent after the warm-up: lengthen the run")
    slates = SlateChecks()
    if workload.target.kind == "items":
        progress("checking items and exact slates", None)
        slates = await check_slates(workload, columns, samples, arms, design)
    names = [arm.name for arm in arms]
    summaries = tuple(
        summarise(
            columns=columns,
            arms=names,
            samples=samples,
            kind=workload.target.kind,
            known_items=slates.known,
            k=workload.k,
        )
    )
    return Session(
        columns=columns,
        samples=samples,
        arms=tuple(arms),
        summaries=summaries,
        exactness=slates.exactness,
        overlaps=slates.overlaps,
        lateness=lateness(columns.exchanges),
        overhead=overhead,
        peak_in_flight=run.peak_in_flight,
        generator_cpu_share=run.cpu_seconds / run.seconds if run.seconds else 0.0,
        machine=machine,
        servers=servers,
        warnings=tuple(find_warnings(workload, columns, summaries, machine, run)),
        planned_shots=planned,
    )


async def check_slates(
    workload: Workload,
    columns: SampleColumns,
    samples: Sequence[Sample],
    arms: Sequence[Arm],
    design: Design,
) -> SlateChecks:
    """Asks the servers again after the run: for items, exact slates, and the same for all arms."""
    if workload.items is not None:
        known: frozenset[str] | None = read_item_ids(workload.items)
    else:
        known = await known_items(columns, arms[0].url, workload.load)
    if workload.target.name != "recommend" or not workload.exact_sample:
        return SlateChecks(known=known)
    check = ExactCheck(
        target=workload.target,
        fields={**workload.fields, **workload.exact_fields},
        count=workload.exact_sample,
        load=workload.load,
    )
    exactness = [await exact_overlap(check, columns, samples, n, arm) for n, arm in enumerate(arms)]
    overlaps: tuple[tuple[float, ...], ...] = ()
    if len(arms) > 1 and design.mode != "paired":
        pairs = make_plan(
            samples=samples,
            arms=arms,
            target=workload.target,
            times=np.zeros(check.count),
            design=Design(mode="paired", seed=design.seed),
            fields=workload.fields,
        )
        again = await drive(pairs, workload.target, replace(workload.load, workers=1))
        overlaps = arm_overlaps(again, len(arms))
    return SlateChecks(known=known, exactness=tuple(exactness), overlaps=overlaps)


def compare_session(
    session: Session, design: Design, criteria: Criteria
) -> tuple[list[Comparison], SampleRatio]:
    """Returns the comparison of each further arm with the first, and the sample-ratio check.

    Raises:
        ValueError: If an arm has no latencies.
    """
    names = [arm.name for arm in session.arms]
    silent = [one.name for one in session.summaries if not one.latency_ms]
    if silent:
        listed = "; ".join(session.warnings)
        raise ValueError(f"arms without any answer: {', '.join(silent)}; {listed}")
    criteria = replace(criteria, planned_shots=session.planned_shots)
    ratio = check_ratio(session.columns, len(names), design.mode, design.weights)
    overlaps = session.overlaps or ((),) * len(names)
    comparisons = [
        compare_arms(
            columns=session.columns,
            samples=session.samples,
            names=names,
            treatment=number,
            mode=design.mode,
            criteria=criteria,
            overlaps=overlaps[number],
        )
        for number in range(1, len(names))
    ]
    return comparisons, ratio


def find_warnings(
    workload: Workload,
    columns: SampleColumns,
    summaries: Sequence[ArmSummary],
    machine: MachineInfo,
    run: Run,
) -> list[str]:
    """Returns what a reader of the figures must know, in sentences."""
    found = []
    p50 = float(np.median(columns.latency_ms[columns.timed])) if columns.timed.any() else 0.0
    late = lateness(columns.exchanges).warning(p50)
    if late and workload.arrivals != "closed":
        found.append(late)
    if run.peak_in_flight >= workload.load.max_in_flight:
        found.append(
            f"{workload.load.max_in_flight} requests were in flight at once, the limit; later ones "
            "waited in the generator, and their latency includes that"
        )
    if machine.load_average > machine.num_cores:
        found.append(
            f"the machine of the load generator was busy: load {machine.load_average:.1f} on "
            f"{machine.num_cores} cores"
        )
    drawn = Counter(
        one.reply.experiment for one in columns.exchanges if one.reply and one.reply.experiment
    )
    if drawn:
        listed = ", ".join(f"{count} {arm}" for arm, count in sorted(drawn.items()))
        found.append(
            f"the server divides these requests by its own experiments ({listed}): latencies, "
            "items and overlaps are a mixture of their arms; stop them, or set the fields of one "
            "arm with --fields"
        )
    for one in summaries:
        if one.errors:
            listed = ", ".join(f"{count} {kind}" for kind, count in sorted(one.errors.items()))
            said = f' ("{one.example}")' if one.example else ""
            found.append(f"arm {one.name}: failed requests: {listed}{said}")
        if one.items and one.items.degraded:
            listed = ", ".join(
                f"{count} {why}" for why, count in sorted(one.items.degraded.items())
            )
            found.append(f"arm {one.name}: degraded answers: {listed}")
    return found
