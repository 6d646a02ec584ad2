"""Commands `bundle load|rollback|status`, which replace the bundle of a running server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from recserve.client import Client
    from recserve.schemas.admin import BundleStatus

POLL_S = 0.2

UrlArgument = Annotated[str, typer.Argument(metavar="URL", help="Address of the server.")]
KeyFlag = Annotated[
    str | None,
    typer.Option(
        "--admin-key",
        envvar="RECSERVE_ADMIN_KEYS",
        show_envvar=True,
        help="Admin key; of a list with commas, the first one.",
    ),
]


def load(
    url: UrlArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Folder in the bundles_dir.")],
    admin_key: KeyFlag = None,
    force: Annotated[
        bool, typer.Option("--force", help="Accept a bundle with other items or fewer models.")
    ] = False,
    fleet: Annotated[
        bool,
        typer.Option(
            "--fleet", help="On all servers that share the log of item changes, one after another."
        ),
    ] = False,
) -> None:
    """Load another bundle into a running server; the exit status is 1 if it is refused."""
    from recserve.schemas.admin import BundleLoadRequest

    with open_client(url, admin_key) as client:
        client.load_bundle(BundleLoadRequest(path=name, force=force, fleet=fleet))
        _follow(client, fleet)


def rollback(url: UrlArgument, admin_key: KeyFlag = None) -> None:
    """Restore the previous bundle of a running server, with the item changes since then."""
    with open_client(url, admin_key) as client:
        client.rollback_bundle()
        _follow(client)


def status(url: UrlArgument, admin_key: KeyFlag = None) -> None:
    """Print the current and the previous bundle of a running server."""
    with open_client(url, admin_key) as client:
        _show(client.bundle_status())


@contextmanager
def open_client(url: str, admin_key: str | None) -> Iterator[Client]:
    """Yields a client of the server. Raises RuntimeError if the server cannot be reached."""
    import httpx

    from recserve.client import Client, ClientOptions

    key = None if admin_key is None else admin_key.split(",")[0].strip()
    try:
        with Client(url, ClientOptions(admin_key=key)) as client:
            yield client
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise RuntimeError(f"{url}: {error}") from error


def _follow(client: Client, fleet: bool = False) -> None:
    """Prints the progress until server or fleet has finished. Raises Exit if it has failed."""
    shown = ""
    while _state(found := client.bundle_status(), fleet) in ("loading", "returning"):
        line = f"{found.progress:4.0%}  {found.message}"
        if line != shown:
            typer.echo(shown := line, err=True)
        time.sleep(POLL_S)
    _show(found)
    if _state(found, fleet) != "ready":
        raise typer.Exit(1)


def _state(found: BundleStatus, fleet: bool) -> str:
    """Returns the state of the server, or of the fleet; `lost` if Redis has forgotten its load."""
    if not fleet:
        return found.state
    return found.fleet.state if found.fleet else "lost"


def _show(found: BundleStatus) -> None:
    for name, bundle in (("current", found.current), ("previous", found.previous)):
        if bundle is not None:
            versions = f"model {bundle.model_version}, catalogue {bundle.catalog_version}"
            typer.echo(f"{name}: {bundle.path} ({versions})")
    typer.echo(f"{found.state}: {found.message}")
    if found.fleet:
        reason = f": {found.fleet.message}" if found.fleet.message else ""
        typer.echo(f"fleet: {found.fleet.path} {found.fleet.state}{reason}")
