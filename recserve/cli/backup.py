"""Copies of what a server stores beside a bundle, made while it runs."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from recserve.experiments.saved_counts import SUFFIX
from recserve.features.history.lmdb_store import copy_store
from recserve.features.state_files import (
    POPULARITY,
    default_experiments,
    default_journal,
    default_store,
    lmdb_folder,
)

HISTORY, ITEMS, EXPERIMENTS = "history", "items", "experiments"


@dataclass(frozen=True)
class StateFolders:
    """The folders of a server's state, which are also those of a backup.

    Attributes:
        history: The history store, with the counts of the list `popular`.
        items: The journals of item changes.
        experiments: The counts of experiments.
    """

    history: Path
    items: Path
    experiments: Path

    @staticmethod
    def of_server(
        bundle: Path, store: str | None, journal: Path | None, experiments: Path | None
    ) -> StateFolders:
        """Returns the folders of a server. Each one is next to the bundle unless it is given.

        Raises:
            ValueError: If the store is no LMDB folder.
        """
        url = default_store(bundle) if store is None else store
        folder = lmdb_folder(url)
        if folder is None:
            raise ValueError(
                f"the store is {url.partition(':')[0]}; back it up with its own tools (for Redis: "
                "BGSAVE, or a copy of its append-only file, which has item changes too with "
                "catalog_log=redis), and copy the folders of the journal and of experiments"
            )
        return StateFolders(
            folder,
            default_journal(bundle) if journal is None else journal,
            default_experiments(bundle) if experiments is None else experiments,
        )

    @staticmethod
    def of_backup(folder: Path) -> StateFolders:
        """Returns the folders of a backup."""
        return StateFolders(folder / HISTORY, folder / ITEMS, folder / EXPERIMENTS)

    def pairs(self, other: StateFolders) -> tuple[tuple[Path, Path], ...]:
        """Returns each folder with that of the other state."""
        return (
            (self.history, other.history),
            (self.items, other.items),
            (self.experiments, other.experiments),
        )


@dataclass(frozen=True)
class Backup:
    """What a backup holds.

    Attributes:
        num_keys: Keys of the history store.
        has_popularity: True if the server has written counts of the list `popular`.
        num_journals: Journals of item changes.
        num_experiments: Experiments with counts.
    """

    num_keys: int
    has_popularity: bool
    num_journals: int
    num_experiments: int


def back_up(server: StateFolders, out: Path) -> Backup:
    """Copies the state of a server into a new folder.

    The copy of the store is one consistent state. A journal only grows, and a change that is being
    written while it is copied is left out when it is read. Files of counts are replaced as a whole.

    Raises:
        ValueError: If the new folder is not empty.
        StoreUnavailable: If the store cannot be read.
    """
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty; choose another folder")
    copy = StateFolders.of_backup(out)
    for folder in (copy.history, copy.items, copy.experiments):
        folder.mkdir(parents=True)
    num_keys = copy_store(server.history, copy.history)
    # Counts that the server has set aside: of other settings, or damaged ones.
    _copy_files(server.experiments, copy.experiments, f"[!.]*{SUFFIX}.old*")
    _copy_files(server.history, copy.history, f"{POPULARITY}.old*")
    return Backup(
        num_keys,
        bool(_copy_files(server.history, copy.history, POPULARITY)),
        _copy_files(server.items, copy.items, "*.jsonl"),
        _copy_files(server.experiments, copy.experiments, f"[!.]*{SUFFIX}"),
    )


def restore(server: StateFolders, source: Path) -> None:
    """Puts a backup in the place of a server's state, of which nothing may exist.

    Raises:
        ValueError: If there is no backup, or something is in its place.
    """
    pairs = StateFolders.of_backup(source).pairs(server)
    for copy, place in pairs:
        if not copy.is_dir():
            raise ValueError(f"{source} is no backup: it has no folder {copy.name}")
        if place.exists() and any(place.iterdir()):
            raise ValueError(f"{place} exists; stop the server and move it away first")
    for copy, place in pairs:
        shutil.copytree(copy, place, dirs_exist_ok=True)


def _copy_files(source: Path, target: Path, pattern: str) -> int:
    """Copies the files of a pattern and returns their number."""
    paths = sorted(source.glob(pattern))
    for path in paths:
        shutil.copy2(path, target / path.name)
    return len(paths)
