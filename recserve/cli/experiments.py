"""`recserve bench` and `recserve ab`: load on a running server, comparison of configurations."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from recserve.cli.experiment_file import read_defaults
from recserve.cli.experiment_output import run, write
from recserve.cli.flags import json_value, with_flags

if TYPE_CHECKING:
    from recserve.load.session import Workload

UrlArgument = Annotated[str, typer.Argument(help="Address of the server: http://127.0.0.1:8080.")]


@dataclass(frozen=True)
class LoadFlags:
    """Flags of `bench` and `ab`: the load, and where its results go."""

    data: Annotated[Path, typer.Option(help="Prompts (JSONL, JSON, Parquet), users, or a bundle.")]
    target: Annotated[
        Literal["auto", "recommend", "rank", "completions", "chat"],
        typer.Option(help="Route; auto: recommend for users, chat for prompts."),
    ] = "auto"
    fields: Annotated[str, typer.Option(help="Request fields, as JSON: '{\"k\": 20}'.")] = "{}"
    arrivals: Annotated[
        Literal["poisson", "trace", "closed"],
        typer.Option(help="Open loop by Poisson or a trace, or a closed loop."),
    ] = "poisson"
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests per second; default 10.")
    ] = None
    trace: Annotated[Path | None, typer.Option(help="File of arrival times.")] = None
    duration: Annotated[float, typer.Option(min=0.1, help="Seconds of load.")] = 30.0
    warmup: Annotated[float, typer.Option(min=0, help="First seconds not counted.")] = 2.0
    workers: Annotated[int, typer.Option(min=1, help="Of a closed loop.")] = 1
    max_in_flight: Annotated[int, typer.Option(min=1, help="Of an open loop.")] = 1024
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds per request.")] = 60.0
    history: Annotated[
        int, typer.Option(min=0, help="Newest items sent per user; 0: the id only.")
    ] = 50
    candidates: Annotated[int, typer.Option(min=1, help="Per user, for rank.")] = 100
    items: Annotated[
        Path | None, typer.Option(help="Parquet of all items; default: ask the server.")
    ] = None
    exact: Annotated[
        int, typer.Option(min=0, help="Slates per arm compared with the exact slate.")
    ] = 100
    header: Annotated[list[str] | None, typer.Option(help="'Name: value'; repeat for more.")] = None
    seed: Annotated[str, typer.Option(help="Of arrivals, order and arms.")] = "0"
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Of text.")] = True
    calibrate: Annotated[
        bool, typer.Option("--calibrate/--no-calibrate", help="Measure the load generator first.")
    ] = True
    report: Annotated[Path | None, typer.Option(help="HTML file to write.")] = None
    records: Annotated[Path | None, typer.Option(help="Parquet of all requests.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False


@dataclass(frozen=True)
class ComparisonFlags(LoadFlags):
    """Flags of `ab`, which needs more time by default."""

    duration: Annotated[float, typer.Option(min=0.1, help="Seconds of load.")] = 60.0


@with_flags
def bench(
    url: UrlArgument,
    load: LoadFlags,
    against: Annotated[
        Path | None, typer.Option(help="Requests of an earlier run (--records) to compare with.")
    ] = None,
) -> None:
    """Drive load on a running server and report latencies, tokens and slates."""
    from recserve.load.comparison import Criteria
    from recserve.load.generator import Arm, Design
    from recserve.load.measurements import write_records
    from recserve.load.report import make_document
    from recserve.load.session import compare_with_saved, read_records, run_session

    workload = make_workload(load)
    arms = [Arm(name="server", url=url.rstrip("/"))]
    design = Design(seed=load.seed)
    if against is not None:
        read_records(against)  # a wrong file is reported before the run
    session = run(lambda tell: run_session(workload, arms, design, tell))
    comparisons = []
    if against is not None:
        comparisons.append(compare_with_saved(session, against, Criteria(k=workload.k)))
    result = make_document(session, workload, design, sys.argv[1:], comparisons)
    if load.records:
        write_records(load.records, session.columns, ["server"])
    write(result, load.report, load.as_json)


@with_flags
def ab(
    url: UrlArgument,
    load: ComparisonFlags,
    arm: Annotated[
        list[str],
        typer.Option(help="NAME=JSON of request fields, or NAME=URL; the first is the control."),
    ],
    mode: Annotated[
        Literal["blocks", "split", "paired"],
        typer.Option(help="Drawn within small blocks; by unit, for ever; every request to all."),
    ] = "blocks",
    metric: Annotated[
        Literal["latency", "ttft", "tpot"], typer.Option(help="Time that decides.")
    ] = "latency",
    statistic: Annotated[
        Literal["mean", "p50", "p90", "p99"], typer.Option(help="Statistic that decides.")
    ] = "p99",
    sequential: Annotated[
        bool, typer.Option("--sequential", help="Intervals that hold at every look.")
    ] = False,
    overlap_margin: Annotated[float, typer.Option(min=0, help="Accepted loss of overlap.")] = 0.05,
    stop_early: Annotated[
        bool, typer.Option("--stop-early", help="End the run once the verdict is sure.")
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            is_eager=True,
            callback=read_defaults,
            help="YAML file with url, arms and any option; an option on the command line wins.",
        ),
    ] = None,
    ndcg_margin: Annotated[float, typer.Option(min=0, help="Accepted loss of NDCG.")] = 0.005,
    error_margin: Annotated[float, typer.Option(min=0, help="Accepted rise of errors.")] = 0.005,
) -> None:
    """Compare configurations of a running server on one stream of requests."""
    from recserve.load.comparison import Criteria
    from recserve.load.generator import Design, parse_arm
    from recserve.load.measurements import write_records
    from recserve.load.report import make_document
    from recserve.load.session import compare_session, run_session

    workload = make_workload(load)
    arms = [parse_arm(one, url.rstrip("/")) for one in arm]
    if len(arms) < 2:
        raise typer.BadParameter("expected at least two arms", param_hint="--arm")
    if stop_early and workload.arrivals == "closed":
        raise typer.BadParameter("a closed loop has no planned number of requests")
    design = Design(mode=mode, seed=load.seed)
    criteria = Criteria(
        metric=metric,
        statistic=statistic,
        sequential=sequential or stop_early,
        k=workload.k,
        error_margin=error_margin,
        overlap_margin=overlap_margin,
        ndcg_margin=ndcg_margin,
    )
    early = criteria if stop_early else None
    session = run(lambda tell: run_session(workload, arms, design, tell, early))
    comparisons, ratio = compare_session(session, design, criteria)
    result = make_document(session, workload, design, sys.argv[1:], comparisons, ratio)
    if load.records:
        write_records(load.records, session.columns, [one.name for one in arms])
    write(result, load.report, load.as_json)


def make_workload(flags: LoadFlags) -> Workload:
    """Returns the workload that flags describe.

    Raises:
        BadParameter: If a flag does not fit the others.
    """
    from recserve.load.datasets import UserOptions, read_samples
    from recserve.load.generator import LoadOptions
    from recserve.load.session import Workload
    from recserve.load.targets import find_target

    name = flags.target
    users = UserOptions(max_history=flags.history)
    if name == "auto":
        name = "chat" if read_samples(flags.data, users)[0].turns else "recommend"
    if name == "rank":
        users = UserOptions(max_history=flags.history, num_candidates=flags.candidates)
    rate = flags.rate
    if flags.arrivals == "poisson" and rate is None:
        rate = 10.0
    if flags.warmup >= flags.duration:
        raise typer.BadParameter("the warm-up is as long as the run", param_hint="--warmup")
    return Workload(
        target=find_target(name, flags.stream),
        data=flags.data,
        users=users,
        fields=json_value(flags.fields, "--fields"),
        arrivals=flags.arrivals,
        rate=rate,
        duration_s=flags.duration,
        trace=flags.trace,
        workers=flags.workers,
        warmup_s=flags.warmup,
        load=LoadOptions(
            max_in_flight=flags.max_in_flight,
            timeout_s=flags.timeout,
            headers=headers(flags.header),
        ),
        items=flags.items,
        exact_sample=flags.exact,
        calibrate=flags.calibrate,
    )


def headers(values: list[str] | None) -> dict[str, str]:
    """Returns HTTP headers. Raises BadParameter for what is not `Name: value`."""
    found = {}
    for value in values or []:
        name, colon, rest = value.partition(":")
        if not colon or not name.strip():
            raise typer.BadParameter(f"{value!r}: expected 'Name: value'", param_hint="--header")
        found[name.strip()] = rest.strip()
    return found
