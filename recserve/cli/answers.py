"""Commands `recommend`, `rank` and `history`, which use the service without a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from recserve.cli.flags import (
    BundleFlag,
    Device,
    DeviceFlag,
    FieldsFlag,
    HistoryFlag,
    JsonFlag,
    ScoringFlag,
    StoreFlag,
    UserFlag,
    ids,
    json_value,
)
from recserve.cli.shared_items import warn_of_shared_items

if TYPE_CHECKING:
    from rich.table import Table

    from recserve.service import Service

JournalFlag = Annotated[
    Path | None,
    typer.Option("--journal", help="Folder of item changes; default: beside the bundle."),
]
ExperimentsFlag = Annotated[
    Path | None,
    typer.Option(help="Folder of the counts of experiments; default: beside the bundle."),
]
Body = TypeVar("Body")


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
    exclude_shown: Annotated[
        str | None,
        typer.Option(help='Leave out what was shown, as JSON: \'{"within": "6h", "times": 3}\'.'),
    ] = None,
    discount_shown: Annotated[
        str | None,
        typer.Option(help='Lower what was shown, as JSON: \'{"within": "6h", "by": 0.5}\'.'),
    ] = None,
    scoring: ScoringFlag = None,
    seen: Annotated[
        bool, typer.Option("--seen/--unseen", help="Allow items of the history, or not.")
    ] = False,
    fields: FieldsFlag = None,
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
        exclude_shown=exclude_shown and json_value(exclude_shown, "--exclude-shown"),
        discount_shown=discount_shown and json_value(discount_shown, "--discount-shown"),
        scoring=scoring and json_value(scoring, "--scoring"),
        exclude={"seen": not seen},
        fields=ids(fields),
        explain=explain,
    )
    warn_of_shared_items(store)
    with _service(bundle, store, device) as service:
        answer = service.recommend(body)
        _print(answer, as_json, slate_table(answer, titles(service.item)))


def rank(
    bundle: BundleFlag,
    item: Annotated[list[str], typer.Option(help="Candidate ids; repeat the flag, or use commas.")],
    user: UserFlag = None,
    history: HistoryFlag = None,
    scorer: Annotated[str, typer.Option(help="auto, ranker or likelihood.")] = "auto",
    fields: FieldsFlag = None,
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
        fields=ids(fields),
        candidates=[{"item_id": item_id} for item_id in ids(item) or []],
    )
    warn_of_shared_items(store)
    with _service(bundle, store, device) as service:
        answer = service.rank(body)
        _print(answer, as_json, ranking_table(answer, titles(service.item)))
    if answer.missing_item_ids and not as_json:
        typer.echo(f"not in the catalogue: {', '.join(answer.missing_item_ids)}", err=True)


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


def backup(
    bundle: BundleFlag,
    out: Annotated[Path, typer.Option(help="New folder for the copy.")],
    store: StoreFlag = None,
    journal: JournalFlag = None,
    experiments_dir: ExperimentsFlag = None,
) -> None:
    """Copy events, item changes and counts, also while a server runs (LMDB only)."""
    from recserve.cli.backup import StateFolders, back_up

    copied = back_up(StateFolders.of_server(bundle, store, journal, experiments_dir), out)
    popular = "with" if copied.has_popularity else "without"
    typer.echo(
        f"copied {copied.num_keys} keys of the history store {popular} counts of the list popular, "
        f"{copied.num_journals} journals, and counts of {copied.num_experiments} experiments to "
        f"{out}"
    )


def export(
    bundle: BundleFlag,
    out: Annotated[Path, typer.Option(help="Folder for the events, of a new or an old event log.")],
    since: Annotated[
        str | None,
        typer.Option(help="Time of the oldest events, as 2026-11-29 or 2026-11-29T08:00:00Z."),
    ] = None,
    store: StoreFlag = None,
) -> None:
    """Write the stored events of all users as an event log, which `build --events` reads."""
    from recserve.cli.flags import moment
    from recserve.service.history_export import export_events

    since_us = None if since is None else moment(since, "--since")
    with _service(bundle, store, "cpu") as service:
        events, items = service.histories, service.catalog.current.items
        done = export_events(events.store, events.types, items, out, since_us)
    typer.echo(f"{done.num_events} events of {done.num_users} users in {out}")
    for number, reason in (
        (done.num_unknown, "events left out: the catalogue does not know their item"),
        (done.num_positions, "events left out: they have a position and no time"),
        (done.num_damaged, "users left out: their stored history is damaged"),
    ):
        if number:
            typer.echo(f"{number} {reason}")


def restore(
    bundle: BundleFlag,
    source: Annotated[Path, typer.Option("--from", help="Folder of a backup.")],
    store: StoreFlag = None,
    journal: JournalFlag = None,
    experiments_dir: ExperimentsFlag = None,
) -> None:
    """Put a backup in place, where no store, item changes or counts are."""
    from recserve.cli.backup import StateFolders
    from recserve.cli.backup import restore as put_back

    put_back(StateFolders.of_server(bundle, store, journal, experiments_dir), source)
    typer.echo(f"restored {source}")


def _service(bundle: Path, store: str | None, device: Device) -> Service:
    from recserve.service import Service

    return Service.open(bundle, store, device)


def _body(kind: type[Body], **fields: Any) -> Body:
    """Builds a request body and validates it like the HTTP route. Raises ValueError."""
    from recserve.schemas.validation import to_message

    return to_message({n: v for n, v in fields.items() if v is not None}, kind)


def _print(answer: Any, as_json: bool, table: Table) -> None:
    import msgspec
    from rich.console import Console

    from recserve.cli.terminal import timing_line
    from recserve.schemas.numbers import ENCODER

    if as_json:
        typer.echo(msgspec.json.format(ENCODER.encode(answer), indent=2).decode())
        return
    Console().print(table)
    if hasattr(answer, "timing_ms"):
        typer.echo(timing_line(answer.timing_ms, answer.degraded))
