"""`recserve experiments`: the experiments of a running server."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Annotated, Any

import typer

from recserve.cli.flags import JsonFlag

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


def list_experiments(url: UrlArgument, key: ApiKeyFlag = None, as_json: JsonFlag = False) -> None:
    """Show the experiments of a server with the latencies and errors of their arms."""
    found = ask("GET", url, "/v1/experiments", key)
    if as_json:
        typer.echo(json.dumps(found))
        return
    for one in found["experiments"]:
        print_experiment(one)
    if not found["experiments"]:
        typer.echo("this server runs no experiments")


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
    request = urllib.request.Request(url.rstrip("/") + path, method=method)
    if key:
        request.add_header("Authorization", f"Bearer {key.split(',')[0].strip()}")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        try:
            message = json.load(error)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = error.reason
        raise RuntimeError(f"{url} answered {error.code}: {message}") from None
    except (OSError, ValueError) as error:
        raise RuntimeError(f"{url} does not answer: {error}") from None


def print_experiment(one: dict[str, Any]) -> None:
    """Prints one experiment as a table of its arms."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    state = one["status"].replace("_", " ") + (f": {one['reason']}" if one["reason"] else "")
    title = f"{one['name']} ({one['mode']}, coverage {one['coverage']:g}): {state}"
    table = Table(title=Text(title), title_justify="left")
    for heading in ("arm", "weight", "requests", "errors", "empty", "p50 ms", "p99 ms", "95 %"):
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    for arm in one["arms"]:
        low, high = (_number(arm[name]) for name in ("p99_low_ms", "p99_high_ms"))
        table.add_row(
            Text(arm["name"]),
            f"{arm['weight']:.3g}",
            *(str(arm[name]) for name in ("requests", "errors", "empty")),
            _number(arm["p50_ms"]),
            _number(arm["p99_ms"]),
            f"{low} to {high}",
        )
    console = Console()
    console.print(table)
    if one["sample_ratio_p"] is not None and one["sample_ratio_p"] < 0.001:
        share = f"{one['sample_ratio_p']:.2g}"
        console.print(Text(f"users are not divided by the weights (p = {share})", style="red"))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
