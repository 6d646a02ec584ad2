"""Rows on disk, divided into buckets that are read one after another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from recserve.features.tables.mapped_arrays import temporary_files


class Buckets:
    """Rows in one file per bucket. LZ4 leaves little of columns that are all zeros."""

    def __init__(self, folder: Path, name: str, number: int, schema: pa.Schema) -> None:
        """Opens the files.

        Args:
            folder: Where they lie.
            name: Their name; a folder may have several.
            number: Number of buckets.
            schema: Columns of the rows.
        """
        self.schema, self.number = schema, number
        self._paths = [folder / f"{name}-{bucket}" for bucket in range(number)]
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with temporary_files():
            self._writers = [pa.ipc.new_stream(p, schema, options=options) for p in self._paths]

    def add(self, rows: pa.Table, buckets: np.ndarray) -> None:
        """Appends rows; `buckets` [n] is the bucket of each."""
        ordered = rows.take(pa.array(np.argsort(buckets, kind="stable")))
        ends = np.cumsum(np.bincount(buckets, minlength=self.number)).tolist()
        for writer, first, last in zip(self._writers, [0, *ends[:-1]], ends, strict=True):
            if first < last:
                with temporary_files():
                    writer.write_table(ordered.slice(first, last - first))

    def take(self, bucket: int) -> pa.Table:
        """Returns the rows of a bucket in the order in which they were added, and deletes it."""
        with temporary_files():
            self._writers[bucket].close()
        with pa.OSFile(str(self._paths[bucket])) as file:
            table = pa.ipc.open_stream(file).read_all()
        self._paths[bucket].unlink()
        return table
