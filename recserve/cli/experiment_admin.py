"""`recserve experiments`: the experiments of a running server."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recserve.cli.flags import JsonFlag

if TYPE_CHECKING:
    from rich.table import Table

TIMEOUT_S = 10.0

UrlArgument = Annotated[str, typer.Argument(help="Address of the server: http://127.0.0.1:8080.")]
NameArgument = Annotated[str, typer.Argument(help="Name of the experiment.")]
AdminKeyFlag = Annotated[
    str | None,
    typer.Option(
        "--key", envvar="RECSERVE_ADMIN_KEYS", help="An admin key; of several, the first is used."
    ),
]
ApiKeyFlag = Annotated[
    str | None,
    typer.Option("--key", envvar="RECSERVE_API_KEYS", help="An API key, if the server has keys."),
]


def list_experiments(
    url: UrlArgument,
    key: ApiKeyFlag = None,
    report: Annotated[Path | None, typer.Option("--report", help="HTML file to write.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show the experiments of a server: clicks, errors and latencies of arms, and verdicts."""
    found = ask("GET", url, "/v1/experiments", key)
    if report is not None:
        import msgspec

        from recserve.experiments.live_page import live_page
        from recserve.schemas.experiments import ExperimentsResponse

        page = live_page(msgspec.convert(found, ExperimentsResponse), url)
        report.write_text(page, encoding="utf-8")
        typer.echo(f"report: {report}", err=True)
    if as_json:
        typer.echo(json.dumps(found))
        return
    for one in found["experiments"]:
        print_experiment(one)
    if not found["experiments"]:
        typer.echo("this server runs no experiments")


def plan(
    rate: Annotated[float, typer.Option(help="Clicks per answer today.")],
    traffic: Annotated[float, typer.Option(help="Answers per day of the whole service.")],
    effect: Annotated[
        float, typer.Option(help="Smallest relative change to find; 0.1 for 10 %.")
    ] = 0.1,
    arms: Annotated[int, typer.Option(min=2, max=8, help="Arms with equal weights.")] = 2,
    coverage: Annotated[float, typer.Option(help="Share of the users that take part.")] = 1.0,
    power: Annotated[float, typer.Option(help="Share of such experiments that find it.")] = 0.8,
    spread: Annotated[
        float,
        typer.Option(help="Variance over number of clicks, from the list of an experiment."),
    ] = 1.0,
) -> None:
    """Compute how long an experiment on clicks has to run."""
    from recserve.experiments.conversions import plan_experiment

    weights = (1 / arms,) * arms
    found = plan_experiment(rate, effect, traffic, weights, coverage, spread, power)
    days = f"{found.days:.1f} days" if found.days < 10 else f"{found.days:,.0f} days"
    typer.echo(
        f"{days}: {found.answers:,.0f} answers with {found.events:,.0f} clicks find a change of "
        f"{effect * 100:g} % with power {power:g}, and you may look at any time"
    )


def stop(url: UrlArgument, name: NameArgument, key: AdminKeyFlag = None) -> None:
    """Stop an experiment: every request gets the control."""
    print_experiment(ask("POST", url, f"/admin/experiments/{urllib.parse.quote(name)}:stop", key))


def start(url: UrlArgument, name: NameArgument, key: AdminKeyFlag = None) -> None:
    """Start a stopped or fallen-back experiment again."""
    print_experiment(ask("POST", url, f"/admin/experiments/{urllib.parse.quote(name)}:start", key))


def ask(method: str, url: str, path: str, key: str | None) -> Any:
    """Sends a request without a body and returns the JSON of the response.

    Raises:
        RuntimeError: If the server does not answer, or answers with an error.
    """
    if not url.startswith(("http://", "https://")):
        raise typer.BadParameter(f"expected http://HOST:PORT, got {url!r}", param_hint="URL")
    try:
        request = urllib.request.Request(url.rstrip("/") + path, method=method)
        if key:
            request.add_header("Authorization", f"Bearer {key.split(',')[0].strip()}")
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        try:
            message = json.load(error)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = error.reason
        raise RuntimeError(f"{url} answered {error.code}: {message}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise RuntimeError(f"{url} does not answer: {error}") from None


def print_experiment(one: dict[str, Any]) -> None:
    """Prints one experiment as a table of its arms."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from recserve.experiments.live_page import first_verdict_text, servers_text

    status, reason = one["status"].replace("_", " "), one["reason"] or ""
    state = reason if reason.startswith(status) else f"{status}: {reason}".removesuffix(": ")
    since = one["started"][:16].replace("T", " ")
    title = f"{one['name']} ({one['mode']}, coverage {one['coverage']:g}, since {since}): {state}"
    table = Table(title=Text(title), title_justify="left")
    users = ("users",) if one["mode"] == "split" else ()
    counts = (*users, "requests", "errors", "empty")
    for heading in ("arm", "weight", *counts, "p50 ms", "p99 ms", "95 %"):
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    for arm in one["arms"]:
        low, high = (_number(arm[name]) for name in ("p99_low_ms", "p99_high_ms"))
        table.add_row(
            Text(arm["name"]),
            f"{arm['weight']:.3g}",
            *(str(arm[name]) for name in counts),
            _number(arm["p50_ms"]),
            _number(arm["p99_ms"]),
            "-" if low == high == "-" else f"{low} to {high}",
        )
    console = Console()
    console.print(table)
    if any(arm["goals"] for arm in one["arms"]):
        console.print(_goal_table(one["arms"]))
    for arm in one["arms"]:
        if arm["verdict"] is not None:
            name = f"{arm['name']}: " if len(one["arms"]) > 2 else ""
            console.print(Text(f"{name}{arm['verdict']['text']}", style="bold"))
        if arm["first_verdict"] is not None:
            console.print(Text(first_verdict_text(arm["first_verdict"])))
    if one["warning"] is not None:
        console.print(Text(one["warning"], style="red"))
    if servers := servers_text(one):
        console.print(Text(servers))
    elif not one["durable"]:
        console.print(Text("a restart forgets this state and these counts", style="yellow"))


def _goal_table(arms: list[dict[str, Any]]) -> Table:
    """Returns the rates of all goals, with an interval that holds at every look."""
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for heading in (
        "goal",
        "arm",
        "answers",
        "events",
        "per answer",
        "change",
        "interval",
        "spread",
    ):
        table.add_column(heading, justify="left" if heading in ("goal", "arm") else "right")
    for number, goal in enumerate(arms[0]["goals"]):
        for arm in arms:
            mine = arm["goals"][number]
            change, low, high = (_percent(mine[f"change{end}"]) for end in ("", "_low", "_high"))
            table.add_row(
                Text(goal["type"] if arm is arms[0] else ""),
                Text(arm["name"]),
                str(arm["answers"]),
                str(mine["events"]),
                "-" if mine["rate"] is None else f"{mine['rate']:.4g}",
                change,
                "-" if change == "-" else f"{low} to {high}",
                "-" if mine["spread"] is None else f"{mine['spread']:.2f}",
            )
    return table


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:+.1f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
