"""Says where a command without a server does not see what servers have changed."""

from __future__ import annotations

import os

import typer

from recserve.features.redis_urls import SCHEMES

DEFAULT_NAME = "items"


def warn_of_shared_items(store: str | None) -> None:
    """Warns if a history store in Redis also has a log of item changes.

    Commands and batch jobs answer from the items of the bundle and the journal beside it. A log
    goes on while they run, so two parts of a job would have different items.

    Args:
        store: URL of the history store; None means an LMDB folder.
    """
    if store is None or store.partition("://")[0] not in SCHEMES:
        return
    from recserve.features.history.stores import split_ttl
    from recserve.features.redis_connection import FAILURES, call_many, connect

    name = os.environ.get("RECSERVE_CATALOG_NAME", DEFAULT_NAME)
    keys = [f"recserve:items:{{{name}}}:{part}" for part in ("log", "snapshot")]
    try:
        client = connect(split_ttl(store)[0])
        found = call_many(client, [("EXISTS", key) for key in keys])
        client.close()
    except (*FAILURES, ValueError):
        return  # the command itself says what is wrong with its store
    if 1 in found:
        typer.echo(
            f"warning: servers have changed items in this Redis (catalog_name {name}). This "
            "command does not read them: it answers from the bundle and the journal beside it",
            err=True,
        )
