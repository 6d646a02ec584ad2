"""Commands `recommend`, `rank`, `batch` and `history`, which use the service without a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from recserve.cli.flags import (
    BundleFlag,
    Device,
    DeviceFlag,
    HistoryFlag,
    JsonFlag,
    StoreFlag,
    UserFlag,
    ids,
    json_value,
)

if TYPE_CHECKING:
    from rich.table import Table

    from recserve.service import Service

Body = TypeVar("Body")
BAD_USAGE = 2


def recommend(
    bundle: BundleFlag,
    user: UserFlag = None,
    history: HistoryFlag = None,
    k: Annotated[int, typer.Option("-k", "--k", help="Number of items in the slate.")] = 10,
    strategy: Annotated[str, typer.Option(help="auto, beam, ...")] = "auto",
    beam_width: Annotated[int | None, typer.Option(help="Beam width; default: 50 or k.")] = None,
    filter: Annotated[str | None, typer.Option(help="Filter on items, as JSON.")] = None,
    outcome: Annotated[
        str | None,
        typer.Option(help='Outcome weights for dense, as JSON: \'{"click": 0.5, "save": 0.5}\'.'),
    ] = None,
    diversity: Annotated[
        str | None, typer.Option(help="Most items per group, as JSON: '{\"category\": 2}'.")
    ] = None,
    seen: Annotated[
        bool, typer.Option("--seen/--unseen", help="Allow items of the history, or not.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print the work that the answer took.")
    ] = False,
    store: StoreFlag = None,
    device: DeviceFlag = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Recommend items for a user or a history, without a server."""
    from recserve.cli.terminal import slate_table, titles
    from recserve.schemas.items import RecommendRequest

    body = _body(
        RecommendRequest,
        user=user and {"id": user},
        history=ids(history),
        k=k,
        strategy=strategy,
        beam_width=beam_width,
        filter=filter and json_value(filter, "--filter"),
        diversity=diversity and json_value(diversity, "--diversity"),
        outcome=outcome and json_value(outcome, "--outcome"),
        exclude={"seen": not seen},
        explain=explain,
    )
    with _service(bundle, store, device) as service:
        answer = service.recommend(body)
        _print(answer, as_json, slate_table(answer, titles(service.item)))


def rank(
    bundle: BundleFlag,
    item: Annotated[list[str], typer.Option(help="Candidate ids; repeat the flag, or use commas.")],
    user: UserFlag = None,
    history: HistoryFlag = None,
    scorer: Annotated[str, typer.Option(help="auto, ranker or likelihood.")] = "auto",
    store: StoreFlag = None,
    device: DeviceFlag = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Rank given items for a user or a history, without a server."""
    from recserve.cli.terminal import ranking_table, titles
    from recserve.schemas.items import RankRequest

    body = _body(
        RankRequest,
        user=user and {"id": user},
        history=ids(history),
        scorer=scorer,
        candidates=[{"item_id": item_id} for item_id in ids(item) or []],
    )
    with _service(bundle, store, device) as service:
        answer = service.rank(body)
        _print(answer, as_json, ranking_table(answer, titles(service.item)))
    if answer.missing_item_ids and not as_json:
        typer.echo(f"not in the catalogue: {', '.join(answer.missing_item_ids)}", err=True)


def batch(
    bundle: BundleFlag,
    input: Annotated[
        Path, typer.Option(help="Parquet: user_id; optional: history, k, strategy, ...")
    ],
    output: Annotated[Path, typer.Option(help="Folder of the answers; created when the job ends.")],
    k: Annotated[int, typer.Option("-k", "--k", help="Default for rows without k.")] = 50,
    strategy: Annotated[str, typer.Option(help="Default for rows without one.")] = "auto",
    beam_width: Annotated[int | None, typer.Option(min=1, help="Beam width.")] = None,
    rows_per_part: Annotated[int, typer.Option(min=1, help="Users per output file.")] = 20_000,
    in_flight: Annotated[int, typer.Option(min=1, max=1024, help="Users computed together.")] = 64,
    engine: Annotated[Literal["local"], typer.Option(help="Where the work runs.")] = "local",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier job's output.")
    ] = False,
    progress: Annotated[
        Literal["rich", "json"], typer.Option(help="A progress bar, or lines of JSON, on stderr.")
    ] = "rich",
    store: StoreFlag = None,
    device: DeviceFlag = "auto",
) -> None:
    """Recommend items for every user of a Parquet file.

    The exit status is 1 if the job fails and 2 if an argument is invalid.
    """
    from recserve.batch.generate import Defaults, Generator
    from recserve.batch.job import Job, check, run
    from recserve.batch.together import together
    from recserve.cli.terminal import counted, job_progress

    job = Job(input, output, rows_per_part, overwrite)
    try:
        unused = check(job)[1]
        defaults = Defaults(k, strategy, beam_width=beam_width)
    except ValueError as error:
        raise _called_wrongly(str(error)) from None
    if unused:
        typer.echo(f"{input}: columns not used: {', '.join(unused)}", err=True)
    with _service(bundle, store, device) as service:
        there = ("auto", *service.runtime.engine.strategies)
        if strategy not in there:
            raise _called_wrongly(f"strategy is {strategy!r}; expected one of {', '.join(there)}")
        with job_progress(progress) as tell:
            report = run(job, Generator(together(service), defaults, in_flight), tell)
    refused = f", {report.errors} refused (see _errors)" if report.errors else ""
    typer.echo(
        f"{counted(report.users, 'user')}, {counted(report.rows, 'row')} in "
        f"{counted(len(report.parts), 'part')}{refused}, {report.seconds:.1f} s"
    )


def show(user: str, bundle: BundleFlag, store: StoreFlag = None, as_json: JsonFlag = False) -> None:
    """Print the stored events of a user, oldest first."""
    from recserve.cli.terminal import history_table, titles

    with _service(bundle, store, "cpu") as service:
        answer = service.history(user)
        _print(answer, as_json, history_table(answer, titles(service.item)))


def delete(user: str, bundle: BundleFlag, store: StoreFlag = None) -> None:
    """Delete all stored events of a user (on a running server: DELETE /v1/users/USER)."""
    with _service(bundle, store, "cpu") as service:
        service.delete_user(user)
    typer.echo(f"deleted all stored events of {user}")


def _called_wrongly(message: str) -> typer.Exit:
    typer.echo(f"error: {message}", err=True)
    return typer.Exit(BAD_USAGE)


def _service(bundle: Path, store: str | None, device: Device) -> Service:
    from recserve.service import Service

    return Service.open(bundle, store, device)


def _body(kind: type[Body], **fields: Any) -> Body:
    """Builds a request body and validates it like the HTTP route. Raises ValueError."""
    from recserve.schemas.validation import converted

    return converted({n: v for n, v in fields.items() if v is not None}, kind)


def _print(answer: Any, as_json: bool, table: Table) -> None:
    import msgspec
    from rich.console import Console

    from recserve.cli.terminal import timing_line

    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())
        return
    Console().print(table)
    if hasattr(answer, "timing_ms"):
        typer.echo(timing_line(answer.timing_ms, answer.degraded))
