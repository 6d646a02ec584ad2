"""The journal of a live catalogue stores every accepted change set before it is served.

There is one file per catalogue of a bundle and one line per change set: checksum and JSON. A last
line that a crash cut short was never acknowledged, so it is dropped. Any other damage is an error.
From time to time, and when a version is restored, a shorter file with the same content replaces the
file. A process that opens a bundle replays the journal. Only one process at a time may write to it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, ClassVar

from recserve.features.catalog.catalog_log import Appended, JournalError
from recserve.features.catalog.change_lines import format_line, parse_line
from recserve.features.catalog.versions import ChangeSet
from recserve.files import UnreadableFile, sync

log = logging.getLogger(__name__)
# What a line that a crash cut short may be: its beginning, or zeros that were not written yet.
CUT_LINE = re.compile(rb"[0-9a-f]{0,8}|[0-9a-f]{8} (\{[^\0-\x1f]*)?\0*|\0+")


@dataclass
class ItemJournal:
    """One journal file.

    Attributes:
        path: Path of the file, which need not exist.
        length: Bytes of the file that this process has read or written.
        num_changes: Changed items in these bytes.
        shared: Always false: another process that writes it makes this one fail.
    """

    path: Path
    length: int = 0
    num_changes: int = 0
    shared: ClassVar[bool] = False
    _file: IO[bytes] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """Path of the file."""
        return str(self.path)

    def read(self, first: int = 0, epoch: int = 0) -> list[ChangeSet]:
        """Returns the change sets from a position on. Raises JournalError if one is damaged."""
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")
        change_sets, self.length, self.num_changes = [], 0, 0
        for number, line in enumerate(lines):
            if number == len(lines) - 1:
                self._check_rest(line)
                break
            try:
                change_sets.append(parse_line(line))
            except UnreadableFile as error:
                raise JournalError(f"{self.path}: line {number + 1}: {error}") from error
            except ValueError as error:
                raise JournalError(
                    f"{self.path}: line {number + 1} is damaged ({error})"
                ) from error
            self.length += len(line) + 1
            self.num_changes += len(change_sets[-1])
        return [each for each in change_sets if each.number >= first]

    def _check_rest(self, rest: bytes) -> None:
        """Checks what follows the last line end: nothing, or a line that a crash cut short."""
        if not CUT_LINE.fullmatch(rest):
            raise JournalError(
                f"{self.path}: the last {len(rest)} bytes are damaged; they are no beginning of a "
                "line of this file"
            )
        if rest:
            log.warning(
                "%s: the last %d bytes are a line that was cut short, so no change in them was "
                "acknowledged; they are left out",
                self.path, len(rest),
            )  # fmt: skip

    def append(self, change_set: ChangeSet) -> Appended:
        """Appends a change set and syncs it to disk.

        Raises:
            JournalError: If the file is not writable, another process holds it, or another process
                has written since `read`.
        """
        file = self._open()
        line = format_line(change_set)
        try:
            _write(file, line)
        except OSError as error:
            # Remove a partially written line, or the next line would be appended to it.
            file.truncate(self.length)
            raise JournalError(f"{self.path}: not writable ({error})") from error
        self.length += len(line)
        self.num_changes += len(change_set)
        return Appended(change_set)

    def replace(self, change_sets: Sequence[ChangeSet]) -> None:
        """Replaces the whole file atomically.

        Args:
            change_sets: Change sets of the new file.

        Raises:
            JournalError: As in `append`. The file is unchanged then.
        """
        old = self._open()
        new_path = self.path.with_name(self.path.name + ".new")
        text = b"".join(map(format_line, change_sets))
        try:
            new_path.unlink(missing_ok=True)
            file = new_path.open("ab", buffering=0)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(file, text)
            new_path.replace(self.path)
            sync(self.path.parent)
        except OSError as error:
            new_path.unlink(missing_ok=True)
            raise JournalError(f"{self.path}: not writable ({error})") from error
        old.close()
        self._file, self.length = file, len(text)
        self.num_changes = sum(map(len, change_sets))

    def wait(self, first: int, timeout_s: float) -> bool:
        """Returns False at once: while this process may write, no other one does."""
        return False

    def close(self) -> None:
        """Closes the file, so that another process can write."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> IO[bytes]:
        """Returns the file, opened and locked, after checking that no other process changed it."""
        if self._file is not None:
            return self._file
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.open("ab", buffering=0)
            sync(self.path.parent)
        except OSError as error:
            raise JournalError(f"{self.path}: not writable ({error})") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise JournalError(f"{self.path}: another process changes these items") from error
        # `replace` renames a new file over the old one, so the lock may be on a deleted file.
        same = os.path.samestat(os.fstat(file.fileno()), self.path.stat())
        if not same or self.path.stat().st_size < self.length or b"\n" in self._read_rest():
            file.close()
            raise JournalError(f"{self.path}: another process changed items; restart this one")
        file.truncate(self.length)
        self._file = file
        return file

    def _read_rest(self) -> bytes:
        """Returns the bytes after the part that this process has read or written."""
        with self.path.open("rb") as file:
            file.seek(self.length)
            return file.read()


def _write(file: IO[bytes], data: bytes) -> None:
    """Writes all bytes and syncs them. An unbuffered write may accept only a part."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
    os.fsync(file.fileno())
