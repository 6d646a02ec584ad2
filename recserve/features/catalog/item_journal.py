"""The journal of a live catalogue: every accepted change set, on disk before it is served.

One file per catalogue of a bundle, one line per change set: checksum and JSON. A line that a kill
cut short was never answered for and is dropped; any other damage is an error. Now and then, and
when a version is restored, the file is replaced by a short one of the same content. Whoever opens a
bundle replays the journal, one process at a time may write to it.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from recserve.features.catalog.item_records import ItemRecord
from recserve.features.catalog.live_catalog import ItemChange


class JournalError(RuntimeError):
    """The journal is damaged, cannot be written, or belongs to another process."""


@dataclass(frozen=True)
class JournalEntry:
    """One change set, as `number` of the catalogue's versions: items put, ids of items hidden."""

    number: int
    changes: tuple[ItemChange, ...] = ()
    hidden: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.changes) + len(self.hidden)


@dataclass
class ItemJournal:
    """path: of the file, which need not exist. length, num_changes: bytes and changes in it, as
    read or written here.
    """

    path: Path
    length: int = 0
    num_changes: int = 0
    _file: IO[bytes] | None = field(default=None, repr=False)

    def read(self) -> list[JournalEntry]:
        """Every change set, in order. Raises JournalError where the file is damaged."""
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")
        entries, self.length, self.num_changes = [], 0, 0
        for number, line in enumerate(lines):
            if number == len(lines) - 1:
                break  # what follows the last line end: nothing, or a line cut short
            entries.append(_entry(line, self.path, number + 1))
            self.length += len(line) + 1
            self.num_changes += len(entries[-1])
        return entries

    def append(self, entry: JournalEntry) -> None:
        """Write a change set through to the disk.

        Raises JournalError where another process writes, or has written since `read`.
        """
        file = self._opened()
        line = _line(entry)
        try:
            _write(file, line)
        except OSError as error:
            # The line may be there in part: cut it off, or the next one would stand behind it.
            file.truncate(self.length)
            raise JournalError(f"{self.path}: not writable ({error})") from error
        self.length += len(line)
        self.num_changes += len(entry)

    def replace(self, entries: Sequence[JournalEntry]) -> None:
        """Put these in the place of all that is there, at once.

        Raises JournalError as `append` does; then nothing has changed.
        """
        old = self._opened()
        beside = self.path.with_name(self.path.name + ".new")
        text = b"".join(map(_line, entries))
        try:
            beside.unlink(missing_ok=True)
            file = beside.open("ab", buffering=0)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(file, text)
            beside.replace(self.path)
            _sync(self.path.parent)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise JournalError(f"{self.path}: not writable ({error})") from error
        old.close()
        self._file, self.length = file, len(text)
        self.num_changes = sum(map(len, entries))

    def close(self) -> None:
        """Let others write."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> IO[bytes]:
        if self._file is not None:
            return self._file
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.open("ab", buffering=0)
            _sync(self.path.parent)
        except OSError as error:
            raise JournalError(f"{self.path}: not writable ({error})") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise JournalError(f"{self.path}: another process changes these items") from error
        same = os.path.samestat(os.fstat(file.fileno()), self.path.stat())
        if not same or self.path.stat().st_size < self.length or b"\n" in self._unread():
            file.close()
            raise JournalError(f"{self.path}: another process changed items; restart this one")
        file.truncate(self.length)
        self._file = file
        return file

    def _unread(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.length)
            return file.read()


def _write(file: IO[bytes], data: bytes) -> None:
    """All of it, on the disk: an unbuffered file may take a part first and refuse the rest."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
    os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """What was created or renamed in a folder is on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _line(entry: JournalEntry) -> bytes:
    said: dict[str, Any] = {"number": entry.number}
    if entry.changes:
        said["put"] = [_said(change) for change in entry.changes]
    if entry.hidden:
        said["hide"] = list(entry.hidden)
    text = json.dumps(said, ensure_ascii=False, separators=(",", ":"), default=str).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _said(change: ItemChange) -> dict[str, Any]:
    said: dict[str, Any] = dict(vars(change.record))
    said["attributes"] = dict(change.record.attributes)
    if change.vector is not None and change.codes is not None:
        raw = np.ascontiguousarray(change.vector, "<f4").tobytes()
        said["vector"] = base64.b64encode(raw).decode()
        said["codes"] = change.codes.tolist()
    return said


def _entry(line: bytes, path: Path, number: int) -> JournalEntry:
    text = line[9:]
    try:
        if int(line[:8], 16) != zlib.crc32(text):
            raise ValueError("the checksum differs")
        said = json.loads(text)
        changes = tuple(_change(one) for one in said.get("put", ()))
        return JournalEntry(int(said["number"]), changes, tuple(said.get("hide", ())))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise JournalError(f"{path}: line {number} is damaged ({error})") from error


def _change(said: dict[str, Any]) -> ItemChange:
    record = ItemRecord(said["item_id"], said["title"], said["categories"], said["attributes"])
    if "vector" not in said:
        return ItemChange(record)
    vector = np.frombuffer(base64.b64decode(said["vector"]), "<f4").astype(np.float32)
    return ItemChange(record, vector, np.array(said["codes"], np.uint16))
