"""A log of rows as Parquet files: buffered, written whole on a thread of its own, and bounded.

    a request -> ParquetLog.offer: the buffer -> a thread: LogFiles.write -> KIND-TIME-*.parquet

A request never waits for the disk. Several processes may share a folder: each writes its own files.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recserve.files import TEMPORARY, sync, whole_file
from recserve.metrics import LogCounts

log = logging.getLogger(__name__)

STALE_S = 600.0  # an unfinished file of this age belongs to a process that has died
# In units of `LogRecord.size`. A file is written when so many are buffered; a record beyond the
# second is dropped.
ROTATE_SIZE, MAX_SIZE = 200_000, 400_000


class LogRecord(Protocol):
    """A record of a log."""

    @property
    def kind(self) -> str:
        """The kind of files that hold the record."""
        ...

    @property
    def size(self) -> int:
        """Cost of the record in the buffer."""
        ...

    @property
    def user(self) -> str | None:
        """The user, as the log names him."""
        ...

    def row(self) -> dict[str, object]:
        """Returns the row of the record."""
        ...


@dataclass(frozen=True)
class LogOptions:
    """How rows are logged.

    Attributes:
        folder: Where the files are.
        rotate_s: Time after which buffered rows are written.
        max_bytes: Bound on the size of all files.
    """

    folder: Path
    rotate_s: float = 60.0
    max_bytes: int = 10 << 30


class LogFiles:
    """Writes, deletes and rewrites the files of a folder. Several processes may share it.

    Attributes:
        folder: The folder.
        max_bytes: Bound on the size of all files; the oldest ones are deleted first.
        schemas: Schema of each kind of files.
        user_column: Column that names the user of a row.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        schemas: Mapping[str, pa.Schema],
        user_column: str = "user",
    ) -> None:
        """Creates the folder and removes what dead processes left unfinished.

        Raises:
            OSError: If the folder cannot be written.
        """
        self.folder, self.max_bytes = folder, max_bytes
        self.schemas, self.user_column = schemas, user_column
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(f"{TEMPORARY}*"):
            if time.time() - path.stat().st_mtime > STALE_S:
                path.unlink(missing_ok=True)

    def write(self, kind: str, rows: Sequence[dict[str, object]]) -> None:
        """Writes rows as a new file.

        Args:
            kind: A kind of `schemas`.
            rows: Values by column.
        """
        self.write_table(kind, pa.Table.from_pylist(list(rows), schema=self.schemas[kind]))

    def write_table(self, kind: str, table: pa.Table) -> None:
        """Writes a table of a kind's schema as a new file."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        name = f"{kind}-{stamp}-{time.time_ns():x}-{os.getpid()}.parquet"
        self._publish(table, self.folder / name)

    def limit(self) -> int:
        """Deletes the oldest files beyond the bound. Returns the size of the others in bytes."""
        sizes = {path: path.stat().st_size for path in self._paths()}
        total = sum(sizes.values())
        for path in sorted(sizes, key=lambda path: path.name.split("-")[1:3]):
            if total <= self.max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= sizes[path]
        return total

    def forget(self, users: Collection[str]) -> None:
        """Rewrites all files without the rows of these users.

        Args:
            users: Values of the user column.
        """
        gone = pa.array(list(users), pa.string())
        for path in self._paths():
            try:
                column = pq.read_table(path, columns=[self.user_column]).column(0)
                hit = pc.is_in(column, value_set=gone)
                if not pc.any(hit).as_py():
                    continue
                kept = pq.read_table(path).filter(pc.invert(hit))
            except FileNotFoundError:  # another process has deleted it
                continue
            if kept.num_rows:
                self._publish(kept, path)
            else:
                path.unlink(missing_ok=True)
        sync(self.folder)

    def _paths(self) -> list[Path]:
        return [path for kind in self.schemas for path in self.folder.glob(f"{kind}-*.parquet")]

    def _publish(self, table: pa.Table, path: Path) -> None:
        """Writes aside, syncs and renames, so that no reader sees a part of a file."""
        with whole_file(path, shared=True) as new:
            pq.write_table(table, new, compression="zstd")


@dataclass
class _Deletion:
    """A user whose rows are to be removed.

    Attributes:
        users: Values of the user column.
        done: Set once no file has such a row, or after an error.
        error: Why rows may be left.
    """

    users: frozenset[str]
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


class ParquetLog:
    """Buffers records, and writes them every `rotate_s` seconds or ROTATE_SIZE units.

    A crash loses the buffered records only.

    Attributes:
        name: What the log holds, for messages.
        counts: Running figures for the metrics.
    """

    def __init__(
        self,
        name: str,
        options: LogOptions,
        schemas: Mapping[str, pa.Schema],
        user_column: str = "user",
    ) -> None:
        """Opens the folder and starts the thread.

        Args:
            name: What the log holds, for messages.
            options: How rows are logged.
            schemas: Schema of each kind of files.
            user_column: Column that names the user of a row.

        Raises:
            OSError: If the folder cannot be written.
        """
        self.name, self.counts = name, LogCounts(dict.fromkeys(schemas, 0))
        self._files = LogFiles(options.folder, options.max_bytes, schemas, user_column)
        self._rotate_s = options.rotate_s
        self.counts.bytes = self._files.limit()
        self._changed = threading.Condition()
        self._records: list[LogRecord] = []
        self._deletions: list[_Deletion] = []
        self._size = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name.replace(" ", "-"), daemon=True)
        self._thread.start()

    def offer(self, *records: LogRecord) -> None:
        """Takes records, or drops and counts them if the buffer is full; it returns at once."""
        with self._changed:
            for record in records:
                if self._closing or self._size + record.size > MAX_SIZE:
                    self.counts.dropped["queue_full"] += 1
                    continue
                self._records.append(record)
                self._size += record.size
            if self._size >= ROTATE_SIZE:
                self._changed.notify()

    def remove(self, users: Collection[str]) -> None:
        """Removes the rows of users, and returns once no file holds one.

        Args:
            users: Values of the user column.

        Raises:
            OSError: If a file could not be rewritten.
        """
        deletion = _Deletion(frozenset(users))
        with self._changed:
            if self._closing:
                raise OSError(f"the {self.name} is closed")
            self._deletions.append(deletion)
            self._changed.notify()
        deletion.done.wait()
        if deletion.error is not None:
            raise deletion.error

    def close(self) -> None:
        """Writes what is buffered and stops the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        closing = False
        while not closing:
            with self._changed:
                self._changed.wait_for(self._has_work, self._rotate_s)
                records, self._records, self._size = self._records, [], 0
                deletions, self._deletions = self._deletions, []
                closing = self._closing
            gone = frozenset[str]().union(*(deletion.users for deletion in deletions))
            self._write([record for record in records if record.user not in gone])
            self._delete(deletions, gone)

    def _has_work(self) -> bool:
        return self._closing or bool(self._deletions) or self._size >= ROTATE_SIZE

    def _write(self, records: list[LogRecord]) -> None:
        order = list(self._files.schemas)
        records.sort(key=lambda record: order.index(record.kind))
        for kind, group in groupby(records, lambda record: record.kind):
            rows = [record.row() for record in group]
            try:
                self._files.write(kind, rows)
                self.counts.rows[kind] += len(rows)
                self.counts.bytes = self._files.limit()
            except Exception as error:
                self.counts.dropped["write_failed"] += len(rows)
                log.error("%d rows of the %s could not be written: %s", len(rows), self.name, error)

    def _delete(self, deletions: list[_Deletion], gone: frozenset[str]) -> None:
        if not deletions:
            return
        error = None
        try:
            self._files.forget(gone)
        except Exception as failed:
            error = failed
            log.error("a user's rows of the %s could not be removed: %s", self.name, failed)
        for deletion in deletions:
            deletion.error = error
            deletion.done.set()
