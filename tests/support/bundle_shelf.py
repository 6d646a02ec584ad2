"""A folder of bundles that replace each other: other weights, other catalogue, damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

from recserve.features.synthetic import SyntheticFiles, SyntheticOptions, write_synthetic
from tests.support.shared_folders import shared_folder
from tests.support.tiny_bundle import NUM_ITEMS, NUM_USERS, built, with_models

# Items that the catalogue of `other` does not have.
DROPPED = [f"item{number:06d}" for number in (3, 5)]


def _make(folder: Path) -> None:
    files = write_synthetic(folder / ".data", SyntheticOptions(NUM_ITEMS, NUM_USERS, 12, seed=3))
    built(files, folder / "one")
    shutil.copytree(folder / "one", folder / "two")
    built(_without(files, folder / ".fewer"), folder / "other", seed=1)
    built(files, folder / "anew", seed=2)
    for number, name in enumerate(("one", "two", "other", "anew")):
        with_models(folder / name, seed=5 + number)


def _without(files: SyntheticFiles, folder: Path) -> SyntheticFiles:
    """Writes the files again without the items of DROPPED."""
    folder.mkdir()
    items, events = folder / "items.parquet", folder / "events.parquet"
    for source, target in ((files.items, items), (files.events, events)):
        table = pq.read_table(source)
        gone = pc.is_in(table["item_id"], pc.cast(DROPPED, table["item_id"].type))
        pq.write_table(table.filter(pc.invert(gone)), target)
    return SyntheticFiles(items, events)


def shelf(folder: Path) -> Path:
    """Returns a folder with four bundles, which a test may change.

    `one` and `two` have the same catalogue and other weights. `anew` has the same items with other
    semantic ids. `other` has another catalogue, built from the same events without two items.
    """
    target = folder / "bundles"
    shutil.copytree(shared_folder("shelf", _make), target, ignore=shutil.ignore_patterns(".*"))
    return target
