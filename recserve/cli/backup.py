"""Copies of the history store and of the journal of item changes, made while a server runs."""

from __future__ import annotations

import shutil
from pathlib import Path

from recserve.features.history.lmdb_store import copy_store
from recserve.features.history.stores import split_ttl
from recserve.service.model_loader import default_journal, default_store

HISTORY, ITEMS = "history", "items"


def back_up(bundle: Path, store: str | None, journal: Path | None, out: Path) -> tuple[int, int]:
    """Copies a store and the journals of a bundle into a new folder.

    The copy of the store is one consistent state. A journal only grows, and a change that is being
    written while it is copied is left out when it is read.

    Args:
        bundle: Folder of the bundle.
        store: URL of the store; None means the folder next to the bundle.
        journal: Folder of the journals; None means the folder next to the bundle.
        out: New folder.

    Returns:
        Number of users and of journals.

    Raises:
        ValueError: If the store is no LMDB folder, or the new folder is not empty.
        StoreUnavailable: If the store cannot be read.
    """
    source = _folder(bundle, store)
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty; choose another folder")
    (out / HISTORY).mkdir(parents=True)
    users = copy_store(source, out / HISTORY)
    journals = sorted((default_journal(bundle) if journal is None else journal).glob("*.jsonl"))
    (out / ITEMS).mkdir()
    for path in journals:
        shutil.copy2(path, out / ITEMS / path.name)
    return users, len(journals)


def restore(bundle: Path, store: str | None, journal: Path | None, source: Path) -> None:
    """Puts a backup in the place of the store and the journals, of which neither may exist.

    Args:
        bundle, store, journal: As in `back_up`.
        source: Folder of the backup.

    Raises:
        ValueError: If there is no backup, or something is in its place.
    """
    pairs = (
        (source / HISTORY, _folder(bundle, store)),
        (source / ITEMS, default_journal(bundle) if journal is None else journal),
    )
    for kept, place in pairs:
        if not kept.is_dir():
            raise ValueError(f"{source} is no backup: it has no folder {kept.name}")
        if place.exists() and any(place.iterdir()):
            raise ValueError(f"{place} exists; stop the server and move it away first")
    for kept, place in pairs:
        shutil.copytree(kept, place, dirs_exist_ok=True)


def _folder(bundle: Path, store: str | None) -> Path:
    url, _ = split_ttl(default_store(bundle) if store is None else store)
    scheme, _, path = url.partition(":")
    if scheme != "lmdb":
        raise ValueError(
            f"the store is {scheme}; back it up with its own tools (for Redis: BGSAVE, or a copy "
            "of its append-only file)"
        )
    return Path(path)
