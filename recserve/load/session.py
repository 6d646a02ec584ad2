"""A load run from options to a result: read data, plan, calibrate, drive, check, summarise.

The result names machine, versions and server. A run may be compared with the saved requests of an
earlier one.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import aiohttp
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recserve.cores import usable_cores
from recserve.experiments.statistics import overlap
from recserve.load.calibration import (
    Lateness,
    Overhead,
    lateness,
    measure_overhead,
)
from recserve.load.comparison import (
    Comparison,
    Criteria,
    EarlyStop,
    SampleRatio,
    check_ratio,
    compare_arms,
)
from recserve.load.datasets import (
    Sample,
    UserOptions,
    read_item_ids,
    read_samples,
)
from recserve.load.generator import (
    Arm,
    Call,
    Design,
    HttpExchange,
    LoadOptions,
    LoadProgress,
    Run,
    Shot,
    Times,
    check_samples,
    drive,
    make_plan,
    poisson_arrivals,
    trace_arrivals,
)
from recserve.load.measurements import TIMEOUT, ArmSummary, SampleColumns, summarise
from recserve.load.targets import Json, Reply, Target

PACKAGES = ("recserve", "aiohttp", "numpy", "scipy")
CPU_INFO = Path("/proc/cpuinfo")
PROBE_S = 5.0
PATIENCE_S = 30.0
MAX_CHECKED_ITEMS = 2000
CHECKERS = 8
Arrivals = Literal["poisson", "trace", "closed"]
MAX_CLOSED = 100_000
DEFAULT_K = 10
SAVED, THIS = "saved run", "this run"
READ = ("shot", "place", "arm", "scheduled_s", "latency_ms", "status", "error")
NOTE = (
    "The two runs were made one after the other. A difference may come from the machine or from "
    "other load, which no interval covers."
)


@dataclass(frozen=True)
class MachineInfo:
    """Where the load generator ran.

    Attributes:
        time: Start of the run, UTC, ISO 8601.
        processor: Model of the processor.
        num_cores: Cores that this process may use.
        load_average: Runnable processes over the last minute, at the start.
        system: Operating system.
        python: Version of Python.
        packages: Version by package.
    """

    time: str
    processor: str
    num_cores: int
    load_average: float
    system: str
    python: str
    packages: dict[str, str]


def this_machine() -> MachineInfo:
    """Returns the machine that this process runs on."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return MachineInfo(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        processor=_processor(),
        num_cores=usable_cores(),
        load_average=os.getloadavg()[0],
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        packages=versions,
    )


def _processor() -> str:
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


async def wait_ready(url: str, headers: dict[str, str], patience_s: float = PATIENCE_S) -> None:
    """Waits until a server answers, and until it is ready if it says that it is not (503).

    Raises:
        ConnectionError: If it does not within the given time.
    """
    end = time.monotonic() + patience_s
    timeout = aiohttp.ClientTimeout(total=PROBE_S)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        while True:
            try:
                async with session.get(url + "/health/ready") as response:
                    if response.status != 503:
                        return
                    state = "is not ready"
            except (aiohttp.ClientError, TimeoutError) as error:
                state = f"does not answer ({error})"
            if time.monotonic() > end:
                raise ConnectionError(f"{url} {state}, after {patience_s:.0f} s")
            await asyncio.sleep(0.2)


async def server_facts(url: str, headers: dict[str, str]) -> dict[str, Any]:
    """Returns what a server says of itself: /version, and the first of /v1/models.

    Facts that the server does not give are left out.
    """
    facts: dict[str, Any] = {}
    timeout = aiohttp.ClientTimeout(total=PROBE_S)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        for name, path in (("version", "/version"), ("models", "/v1/models")):
            try:
                async with session.get(url + path) as response:
                    if response.status == 200:
                        facts[name] = msgspec.json.decode(await response.read())
            except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
                continue
    return facts


@dataclass(frozen=True)
class ExactCheck:
    """How the exact slate of a request is asked for.

    Attributes:
        target: Route.
        fields: Request fields, stronger than the arm's.
        count: Requests of each arm that are asked again; 0 for none.
        load: How requests are sent.
    """

    target: Target
    fields: Json
    count: int
    load: LoadOptions


@dataclass(frozen=True)
class Exactness:
    """Slates of one arm against the exact slate of the same request.

    Attributes:
        count: Requests compared.
        mean_overlap: Mean share of common items.
        identical_share: Share of slates with the same items in the same order.
    """

    count: int
    mean_overlap: float
    identical_share: float


@dataclass(frozen=True)
class SlateChecks:
    """What was found after a run.

    Attributes:
        known: Items that exist; None if it was not found out.
        exactness: One per arm; empty if it was not measured.
        overlaps: Per arm, overlaps of its slates with the first arm's for the same requests.
    """

    known: frozenset[str] | None = None
    exactness: tuple[Exactness | None, ...] = ()
    overlaps: tuple[tuple[float, ...], ...] = ()


async def known_items(columns: SampleColumns, url: str, load: LoadOptions) -> frozenset[str] | None:
    """Returns the items that exist among those answered, as the server knows them.

    The server is asked for each different item, 2,000 at most; further items are taken as known.
    None if it does not tell.
    """
    answered: dict[str, None] = {}
    for one in columns.exchanges:
        if one.reply is not None:
            answered.update(dict.fromkeys(one.reply.item_ids))
    if not answered:
        return None
    checked = list(answered)[:MAX_CHECKED_ITEMS]
    places = asyncio.Semaphore(CHECKERS)
    timeout = aiohttp.ClientTimeout(total=load.timeout_s)
    async with aiohttp.ClientSession(timeout=timeout, headers=dict(load.headers)) as session:

        async def status(item: str) -> int:
            async with places:
                try:
                    async with session.get(f"{url}/v1/items/{quote(item, safe='')}") as response:
                        return response.status
                except (aiohttp.ClientError, TimeoutError):
                    return 0

        statuses = await asyncio.gather(*(status(item) for item in checked))
    if not set(statuses) <= {200, 404}:
        return None
    missing = {item for item, code in zip(checked, statuses, strict=True) if code == 404}
    return frozenset(answered) - missing


async def exact_overlap(
    check: ExactCheck, columns: SampleColumns, samples: Sequence[Sample], number: int, arm: Arm
) -> Exactness | None:
    """Asks a sample of the arm's requests again for the exact slate, and compares.

    Args:
        check: How the exact slate is asked for.
        columns: Requests of the run.
        samples: What was asked.
        number: Number of the arm.
        arm: The arm.
    """
    answered: dict[int, Reply] = {}
    for one in columns.exchanges:
        if one.arm == number and one.reply is not None and len(answered) < check.count:
            answered.setdefault(one.sample, one.reply)

    def fields(reply: Reply) -> Json:
        # `auto` has a weight of its own.
        weight = {} if reply.dense_weight is None else {"dense_weight": reply.dense_weight}
        return {**arm.fields, **weight, **check.fields}

    shots = [
        Shot(
            at_s=0.0,
            calls=(
                Call(
                    url=arm.url + check.target.path,
                    body=check.target.body(samples[sample], fields(reply)),
                    sample=sample,
                ),
            ),
        )
        for sample, reply in answered.items()
    ]
    run = await drive(shots, check.target, replace(check.load, workers=1))
    pairs = [
        (answered[one.sample].item_ids, one.reply.item_ids)
        for one in run.exchanges
        if one.reply is not None
    ]
    if not pairs:
        return None
    return Exactness(
        count=len(pairs),
        mean_overlap=float(np.mean([overlap(a, b) for a, b in pairs])),
        identical_share=float(np.mean([a == b for a, b in pairs])),
    )


def arm_overlaps(run: Run, num_arms: int) -> tuple[tuple[float, ...], ...]:
    """Returns, per arm, overlaps of its slates with arm 0's; shots are pairs of all arms."""
    slates: dict[int, dict[int, tuple[str, ...]]] = {}
    for one in run.exchanges:
        if one.reply is not None:
            slates.setdefault(one.shot, {})[one.arm] = one.reply.item_ids
    whole = [pair for pair in slates.values() if len(pair) == num_arms]
    return tuple(tuple(overlap(pair[0], pair[arm]) for pair in whole) for arm in range(num_arms))


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


def read_records(path: Path) -> tuple[HttpExchange, ...]:
    """Returns the requests of a run that `--records` has saved, without their answers.

    Raises:
        ValueError: If the file is no such file, or holds several arms.
    """
    try:
        table = pq.read_table(path, columns=list(READ))
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path}: expected a Parquet file of --records ({error})") from None
    missing = sorted(set(READ) - set(table.column_names))
    if missing:
        raise ValueError(f"{path}: expected the columns of --records, {missing[0]} is missing")
    rows = table.to_pylist()
    arms = sorted({row["arm"] for row in rows})
    if len(arms) != 1:
        raise ValueError(f"{path}: expected the requests of one arm, got {len(arms)} arms")
    return tuple(
        HttpExchange(
            shot=row["shot"],
            place=row["place"],
            arm=0,
            sample=0,
            scheduled=row["scheduled_s"],
            sent=row["scheduled_s"],
            done=row["scheduled_s"] + row["latency_ms"] / 1e3,
            status=row["status"],
            error=row["error"],
        )
        for row in rows
    )


def compare_with_saved(session: Session, path: Path, criteria: Criteria) -> Comparison:
    """Returns the comparison of a run with a saved one; the saved run is the control.

    The n-th requests of both runs share a time block, and the longer run is cut.

    Args:
        session: The new run, with one arm.
        path: File of `--records`.
        criteria: What decides.

    Raises:
        ValueError: If the file does not fit.
    """
    saved = read_records(path)
    new = session.columns.exchanges
    size = min(len(saved), len(new))
    if not size:
        raise ValueError(f"{path}: no requests to compare with")
    both = (*saved[:size], *new[:size])
    count = np.arange(size)
    columns = SampleColumns(
        exchanges=both,
        shot=np.concatenate([count, count]).astype(np.int64),
        place=np.zeros(2 * size, dtype=np.int64),
        arm=np.repeat([0, 1], size).astype(np.int64),
        unit=np.zeros(2 * size, dtype=np.int64),
        sent_s=np.array([one.scheduled for one in both], dtype=np.float64),
        latency_ms=np.array([one.latency_ms for one in both], dtype=np.float64),
        timed=np.array([one.error in (None, TIMEOUT) for one in both], dtype=np.bool_),
        failed=np.array([one.error is not None for one in both], dtype=np.bool_),
    )
    found = compare_arms(
        columns=columns,
        samples=session.samples,
        names=(SAVED, THIS),
        treatment=1,
        mode="blocks",
        criteria=criteria,
    )
    found.notes.append(NOTE)
    return found
