"""`recserve bench` and `recserve ab`: load on a running server, comparison of configurations."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from recserve.cli.experiment_file import read_defaults
from recserve.cli.experiment_output import run, write
from recserve.cli.flags import json_value

if TYPE_CHECKING:
    from recserve.load.session import Workload

UrlArgument = Annotated[str, typer.Argument(help="Address of the server: http://127.0.0.1:8080.")]
DataFlag = Annotated[
    Path, typer.Option("--data", help="Prompts (JSONL, JSON, Parquet), users, or a bundle.")
]
TargetFlag = Annotated[
    Literal["auto", "recommend", "rank", "completions", "chat"],
    typer.Option("--target", help="Route; auto: recommend for users, chat for prompts."),
]
FieldsFlag = Annotated[
    str, typer.Option("--fields", help="Request fields, as JSON: '{\"k\": 20}'.")
]
ArrivalsFlag = Annotated[
    Literal["poisson", "trace", "closed"],
    typer.Option("--arrivals", help="Open loop by Poisson or a trace, or a closed loop."),
]
RateFlag = Annotated[
    float | None, typer.Option("--rate", min=0.001, help="Requests per second; default 10.")
]
TraceFlag = Annotated[Path | None, typer.Option("--trace", help="File of arrival times.")]
DurationFlag = Annotated[float, typer.Option("--duration", min=0.1, help="Seconds of load.")]
WarmupFlag = Annotated[float, typer.Option("--warmup", min=0, help="First seconds not counted.")]
WorkersFlag = Annotated[int, typer.Option("--workers", min=1, help="Of a closed loop.")]
InFlightFlag = Annotated[int, typer.Option("--max-in-flight", min=1, help="Of an open loop.")]
TimeoutFlag = Annotated[float, typer.Option("--timeout", min=0.001, help="Seconds per request.")]
HistoryFlag = Annotated[
    int, typer.Option("--history", min=0, help="Newest items sent per user; 0: the id only.")
]
CandidatesFlag = Annotated[int, typer.Option("--candidates", min=1, help="Per user, for rank.")]
ItemsFlag = Annotated[
    Path | None, typer.Option("--items", help="Parquet of all items; default: ask the server.")
]
ExactFlag = Annotated[
    int, typer.Option("--exact", min=0, help="Slates per arm compared with the exact slate.")
]
HeaderFlag = Annotated[
    list[str] | None, typer.Option("--header", help="'Name: value'; repeat for more.")
]
SeedFlag = Annotated[str, typer.Option("--seed", help="Of arrivals, order and arms.")]
StreamFlag = Annotated[bool, typer.Option("--stream/--no-stream", help="Of text.")]
CalibrateFlag = Annotated[
    bool, typer.Option("--calibrate/--no-calibrate", help="Measure the load generator first.")
]
ReportFlag = Annotated[Path | None, typer.Option("--report", help="HTML file to write.")]
RecordsFlag = Annotated[Path | None, typer.Option("--records", help="Parquet of all requests.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def bench(
    url: UrlArgument,
    data: DataFlag,
    target: TargetFlag = "auto",
    fields: FieldsFlag = "{}",
    arrivals: ArrivalsFlag = "poisson",
    rate: RateFlag = None,
    trace: TraceFlag = None,
    duration: DurationFlag = 30.0,
    warmup: WarmupFlag = 2.0,
    workers: WorkersFlag = 1,
    max_in_flight: InFlightFlag = 1024,
    timeout: TimeoutFlag = 60.0,
    history: HistoryFlag = 50,
    candidates: CandidatesFlag = 100,
    items: ItemsFlag = None,
    exact: ExactFlag = 100,
    header: HeaderFlag = None,
    seed: SeedFlag = "0",
    stream: StreamFlag = True,
    calibrate: CalibrateFlag = True,
    report: ReportFlag = None,
    records: RecordsFlag = None,
    against: Annotated[
        Path | None, typer.Option(help="Requests of an earlier run (--records) to compare with.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Drive load on a running server and report latencies, tokens and slates."""
    from recserve.load.comparison import Criteria
    from recserve.load.generator import Arm, Design
    from recserve.load.measurements import write_records
    from recserve.load.report import make_document
    from recserve.load.session import compare_with_saved, read_records, run_session

    workload = make_workload(locals())
    arms = [Arm(name="server", url=url.rstrip("/"))]
    design = Design(seed=seed)
    if against is not None:
        read_records(against)  # a wrong file is reported before the run
    session = run(lambda tell: run_session(workload, arms, design, tell))
    comparisons = []
    if against is not None:
        comparisons.append(compare_with_saved(session, against, Criteria(k=workload.k)))
    result = make_document(session, workload, design, sys.argv[1:], comparisons)
    if records:
        write_records(records, session.columns, ["server"])
    write(result, report, as_json)


def ab(
    url: UrlArgument,
    data: DataFlag,
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
    target: TargetFlag = "auto",
    fields: FieldsFlag = "{}",
    arrivals: ArrivalsFlag = "poisson",
    rate: RateFlag = None,
    trace: TraceFlag = None,
    duration: DurationFlag = 60.0,
    warmup: WarmupFlag = 2.0,
    workers: WorkersFlag = 1,
    max_in_flight: InFlightFlag = 1024,
    timeout: TimeoutFlag = 60.0,
    history: HistoryFlag = 50,
    candidates: CandidatesFlag = 100,
    items: ItemsFlag = None,
    exact: ExactFlag = 100,
    header: HeaderFlag = None,
    seed: SeedFlag = "0",
    stream: StreamFlag = True,
    calibrate: CalibrateFlag = True,
    report: ReportFlag = None,
    records: RecordsFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare configurations of a running server on one stream of requests."""
    from recserve.load.comparison import Criteria
    from recserve.load.generator import Design, parse_arm
    from recserve.load.measurements import write_records
    from recserve.load.report import make_document
    from recserve.load.session import compare_session, run_session

    workload = make_workload(locals())
    arms = [parse_arm(one, url.rstrip("/")) for one in arm]
    if len(arms) < 2:
        raise typer.BadParameter("expected at least two arms", param_hint="--arm")
    if stop_early and workload.arrivals == "closed":
        raise typer.BadParameter("a closed loop has no planned number of requests")
    design = Design(mode=mode, seed=seed)
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
    if records:
        write_records(records, session.columns, [one.name for one in arms])
    write(result, report, as_json)


def make_workload(flags: dict[str, Any]) -> Workload:
    """Returns the workload of a command's flags, by their names.

    Raises:
        BadParameter: If a flag does not fit the others.
    """
    from recserve.load.datasets import UserOptions, read_samples
    from recserve.load.generator import LoadOptions
    from recserve.load.session import Workload
    from recserve.load.targets import find_target

    name = flags["target"]
    users = UserOptions(max_history=flags["history"])
    if name == "auto":
        name = "chat" if read_samples(flags["data"], users)[0].turns else "recommend"
    if name == "rank":
        users = UserOptions(max_history=flags["history"], num_candidates=flags["candidates"])
    rate = flags["rate"]
    if flags["arrivals"] == "poisson" and rate is None:
        rate = 10.0
    if flags["warmup"] >= flags["duration"]:
        raise typer.BadParameter("the warm-up is as long as the run", param_hint="--warmup")
    return Workload(
        target=find_target(name, flags["stream"]),
        data=flags["data"],
        users=users,
        fields=json_value(flags["fields"], "--fields"),
        arrivals=flags["arrivals"],
        rate=rate,
        duration_s=flags["duration"],
        trace=flags["trace"],
        workers=flags["workers"],
        warmup_s=flags["warmup"],
        load=LoadOptions(
            max_in_flight=flags["max_in_flight"],
            timeout_s=flags["timeout"],
            headers=headers(flags["header"]),
        ),
        items=flags["items"],
        exact_sample=flags["exact"],
        calibrate=flags["calibrate"],
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
