"""Where a server stores what must survive a restart; `recserve history backup` copies all of it.

history store     events of users, names of event types, what has been imported
counts_file       counts behind the list `popular`
journal           changes of items
experiments       counts of experiments
"""

from __future__ import annotations

from pathlib import Path

from recserve.features.history.stores import split_ttl

POPULARITY = "popularity.safetensors"
EXPERIMENTS = ".experiments"  # in bundles_dir, or the end of a name next to the bundle


def default_store(bundle: Path) -> str:
    """Returns the URL of the default history store: an LMDB folder next to the bundle."""
    bundle = bundle.resolve()
    return f"lmdb:{bundle.with_name(bundle.name + '.history')}"


def default_journal(bundle: Path) -> Path:
    """Returns the default folder of the journal of item changes, next to the bundle."""
    bundle = bundle.resolve()
    return bundle.with_name(bundle.name + ".items")


def default_experiments(bundle: Path) -> Path:
    """Returns the default folder of the counts of experiments, next to the bundle.

    The name of a link counts, because it may name another bundle after the next start.
    """
    bundle = bundle.absolute()
    return bundle.with_name(bundle.name + EXPERIMENTS)


def lmdb_folder(url: str) -> Path | None:
    """Returns the folder of an LMDB store; None if the URL names another store."""
    scheme, _, path = split_ttl(url)[0].partition(":")
    return Path(path) if scheme == "lmdb" else None


def counts_file(store: str, journal: Path) -> Path:
    """Returns the file of the live counts of events.

    It lies with the events in the folder of an LMDB store, and otherwise with the journal.

    Args:
        store: URL of the history store.
        journal: Folder of the journal.
    """
    return (lmdb_folder(store) or journal) / POPULARITY
