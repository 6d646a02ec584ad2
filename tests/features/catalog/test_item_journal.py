"""The journal of items after a loss of power: what was acknowledged is there, in every moment."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from recserve.features.catalog.catalog_log import JournalError
from recserve.features.catalog.item_journal import ItemJournal
from recserve.features.catalog.versions import ChangeSet


class Disk:
    """A disk that keeps only what was synced: the content of files, and the names in folders.

    Attributes:
        root: The watched folder.
        at_sync: Called after each sync.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.at_sync: Callable[[], None] = lambda: None
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._sync = os.fsync
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, handle: int) -> None:
        """Notes what a file or folder holds now."""
        self._sync(handle)
        number = os.fstat(handle).st_ino
        for path in [self.root, *self.root.rglob("*")]:
            if path.stat().st_ino != number:
                continue
            if path.is_dir():
                self._names[number] = {each.name: each.stat().st_ino for each in path.iterdir()}
            else:
                self._contents[number] = path.read_bytes()
        self.at_sync()

    def lose_power(self, path: Path, copy: Path) -> Path:
        """Writes what is left of a file under another name; without a synced name, nothing is."""
        copy.unlink(missing_ok=True)
        number = self._names.get(path.parent.stat().st_ino, {}).get(path.name)
        if number is not None:
            copy.write_bytes(self._contents.get(number, b""))
        return copy


def entry(number: int) -> ChangeSet:
    return ChangeSet(number, hidden=(f"item {number}",))


def read(path: Path) -> list[ChangeSet]:
    return ItemJournal(path).read()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "disk" / "items" / "v.jsonl"


@pytest.fixture
def disk(path, monkeypatch):
    path.parent.mkdir(parents=True)
    return Disk(path.parent.parent, monkeypatch)


def test_a_change_is_on_the_disk_before_it_is_acknowledged(path, disk, tmp_path):
    journal = ItemJournal(path)
    for number in range(1, 5):
        journal.append(entry(number))
        left = read(disk.lose_power(path, tmp_path / "left"))
        assert left == [entry(n) for n in range(1, number + 1)]


def test_a_restart_counts_bytes_and_items(path, disk):
    journal = ItemJournal(path)
    journal.append(ChangeSet(1, hidden=("a", "b")))
    journal.append(entry(2))
    counts = journal.num_changes, journal.length
    assert counts == (3, path.stat().st_size)
    again = ItemJournal(path)
    again.read()
    assert (again.num_changes, again.length) == counts


def test_a_change_after_a_restart_is_on_the_disk_too(path, disk, tmp_path):
    for number in (1, 2):
        journal = ItemJournal(path)
        journal.read()
        journal.append(entry(number))
        journal.close()
    assert read(disk.lose_power(path, tmp_path / "left")) == [entry(1), entry(2)]


def test_a_replacement_is_the_old_file_or_the_new_one_in_every_moment(path, disk, tmp_path):
    journal = ItemJournal(path)
    old, new = [entry(1), entry(2)], [ChangeSet(2, hidden=("both",))]
    for one in old:
        journal.append(one)
    seen = []
    disk.at_sync = lambda: seen.append(read(disk.lose_power(path, tmp_path / "left")))
    journal.replace(new)
    assert seen and all(left in (old, new) for left in seen)
    assert read(disk.lose_power(path, tmp_path / "left")) == new
    journal.append(entry(3))
    assert read(disk.lose_power(path, tmp_path / "left")) == [*new, entry(3)]


def test_a_change_that_cannot_be_synced_is_refused_and_leaves_nothing(path, disk, monkeypatch):
    journal = ItemJournal(path)
    journal.append(entry(1))
    whole = path.read_bytes()

    def refuse(_: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", refuse)
        with pytest.raises(JournalError, match="not writable"):
            journal.append(entry(2))
        assert path.read_bytes() == whole
        with pytest.raises(JournalError, match="not writable"):
            journal.replace([entry(9)])
        assert path.read_bytes() == whole
    journal.append(entry(3))
    journal.close()
    assert read(path) == [entry(1), entry(3)]
