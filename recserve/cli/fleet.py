"""Command `fleet status`: the servers that share a live catalogue in Redis."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from recserve.features.catalog.fleet import Fleet

DISAGREE = 1
TIMEOUT_S = 2.0


def status(
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="URL",
            envvar="RECSERVE_STORE",
            show_envvar=True,
            help="Redis that has the log of item changes: redis://HOST:PORT/DB.",
        ),
    ] = None,
    catalog_name: Annotated[
        str,
        typer.Option(
            envvar="RECSERVE_CATALOG_NAME", show_envvar=True, help="The setting catalog_name."
        ),
    ] = "items",
    config: Annotated[
        Path | None,
        typer.Option(help="Settings file of a server, which names the Redis and the catalogue."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the servers that share a live catalogue, with their bundles, versions, lag and queue.

    The exit status is 0 if all that take requests have one bundle and one version of the catalogue,
    and 1 if not. While items change, versions differ for a few seconds.
    """
    if config is not None:
        from recserve.config import ServerConfig

        settings = ServerConfig.load({}, config)
        url, catalog_name = settings.catalog_url, settings.catalog_name
        if url is None:
            raise ValueError(f"{config}: catalog_log is file, so this server shares no catalogue")
    if url is None:
        raise typer.BadParameter(
            "expected redis://HOST:PORT/DB, or --config", param_hint="URL"
        ) from None
    fleet = _read(url, catalog_name)
    if as_json:
        typer.echo(json.dumps(_as_json(fleet, catalog_name), indent=2))
    else:
        _print(fleet)
        for fault in fleet.malformed:
            typer.echo(f"error: {fault}", err=True)
    if not fleet.replicas and not fleet.malformed:
        raise RuntimeError(
            f"no server has reported to the catalogue {catalog_name} within 15 s; servers do with "
            "catalog_log=redis, and catalog_name says to which one"
        )
    if not fleet.agrees:
        raise typer.Exit(DISAGREE)


def _read(url: str, name: str) -> Fleet:
    """Reads the reports. Raises ValueError for a malformed URL or name, and FleetUnavailable."""
    import re

    from recserve.features.catalog.fleet import FleetDirectory, FleetUnavailable
    from recserve.features.history.stores import split_ttl
    from recserve.features.redis_connection import FAILURES, connect, describe

    if not re.fullmatch(r"[A-Za-z0-9._:-]{1,64}", name):
        raise ValueError(f"catalog_name is {name[:80]!r}; expected 1 to 64 of A-Z a-z 0-9 . _ : -")
    try:
        client = connect(split_ttl(url)[0], timeout_s=TIMEOUT_S)
    except FAILURES as error:
        raise FleetUnavailable(f"redis: {describe(error)}") from error
    directory = FleetDirectory(client, name)
    try:
        return directory.read()
    finally:
        directory.close()


def _as_json(fleet: Fleet, name: str) -> dict[str, object]:
    from msgspec.structs import asdict

    pairs = zip(fleet.replicas, fleet.ages_s, strict=True)
    return {
        "catalog_name": name,
        "agrees": fleet.agrees,
        "replicas": [{**asdict(one), "age_s": age_s} for one, age_s in pairs],
        "malformed": list(fleet.malformed),
    }


def _print(fleet: Fleet) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    agreed = "one bundle, one catalogue" if fleet.agrees else "bundles or catalogues differ"
    table = Table(title=f"{len(fleet.replicas)} servers: {agreed}", title_justify="left")
    for heading in ("server", "state", "bundle", "model", "catalogue"):
        table.add_column(heading)
    for heading in ("behind", "queue", "up", "reported"):
        table.add_column(heading, justify="right")
    for one, age_s in zip(fleet.replicas, fleet.ages_s, strict=True):
        names = (one.address, one.state, one.bundle, one.model_version, one.catalog_version)
        table.add_row(
            *map(Text, names),
            f"{one.lag_positions}, {one.lag_s:.1f} s",
            str(one.queue_depth),
            f"{max(0.0, time.time() - one.started_at) / 3600:.1f} h",
            f"{age_s:.0f} s ago",
        )
    Console().print(table)
