"""The Parquet files of a slate log: complete or invisible, bounded in total size."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recserve.files import TEMPORARY, sync, whole_file
from recserve.service.slate_log.records import SCHEMAS

STALE_S = 600.0  # an unfinished file of this age belongs to a process that has died


class LogFiles:
    """Writes, deletes and rewrites the files of a folder. Several processes may share it.

    Attributes:
        folder: The folder.
        max_bytes: Bound on the size of all files; the oldest ones are deleted first.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Creates the folder and removes what dead processes left unfinished.

        Raises:
            OSError: If the folder cannot be written.
        """
        self.folder, self.max_bytes = folder, max_bytes
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(f"{TEMPORARY}*"):
            if time.time() - path.stat().st_mtime > STALE_S:
                path.unlink(missing_ok=True)

    def write(self, kind: str, rows: Sequence[dict[str, object]]) -> None:
        """Writes rows as a new file.

        Args:
            kind: `slates` or `outcomes`.
            rows: Values by column.
        """
        table = pa.Table.from_pylist(list(rows), schema=SCHEMAS[kind])
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
            users: Values of the column `user`.
        """
        gone = pa.array(list(users), pa.string())
        for path in self._paths():
            try:
                column = pq.read_table(path, columns=["user"]).column("user")
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
        return [path for kind in SCHEMAS for path in self.folder.glob(f"{kind}-*.parquet")]

    def _publish(self, table: pa.Table, path: Path) -> None:
        """Writes aside, syncs and renames, so that no reader sees a part of a file."""
        with whole_file(path, shared=True) as new:
            pq.write_table(table, new, compression="zstd")
