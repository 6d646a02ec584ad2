"""Computes one partition and writes its output file, which appears complete or not at all.

The file is written under a temporary name, synced and renamed. Its bytes depend on the partition,
the models and the options of the job, and on nothing that was computed before.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from recserve.batch.source import LINE, Partition, read
from recserve.files import TEMPORARY, sync

ERRORS_FOLDER = "_errors"
ROW_GROUP_ROWS = 65_536
PART_NAME = r"part-[0-9]{5,12}\.(parquet|jsonl)"
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


@dataclass(frozen=True)
class Generated:
    """Result of one table of input rows.

    Attributes:
        answers: Output rows, in input order.
        errors: Rejected rows, in input order.
        example: Reason of the first rejection; empty without any.
    """

    answers: pa.Table
    errors: pa.Table
    example: str = ""


class Task(Protocol):
    """Computes output rows from input rows."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Input columns that are read."""
        ...

    @property
    def group_rows(self) -> int:
        """Number of rows that are computed together."""
        ...

    @property
    def suffix(self) -> str:
        """`.parquet`, or `.jsonl` for tables whose column `line` holds finished lines."""
        ...

    @property
    def facts(self) -> dict[str, object]:
        """What determines the output besides the input and the job's own options."""
        ...

    def begin_part(self) -> None:
        """Forgets everything that could make the next rows depend on earlier ones."""
        ...

    def __call__(self, users: pa.Table, first_row: int) -> Generated:
        """Returns the output of up to `group_rows` rows.

        Args:
            users: The rows.
            first_row: Number of the first row in its input file.
        """
        ...


@dataclass(frozen=True)
class Advance:
    """A group of rows has been computed.

    Attributes:
        rows: Number of input rows.
        errors: How many of them were rejected.
        example: Reason of one rejection; empty without any.
    """

    rows: int
    errors: int
    example: str = ""


@dataclass(frozen=True)
class JobPart:
    """One part, as a line of the manifest.

    Attributes:
        part: File name of the part.
        input: Name of the input file.
        first_row: Row of the input file at which the part begins.
        users: Number of input rows.
        rows: Number of output rows.
        errors: Number of rejected input rows.
        bytes: Size of the part's file.
        sha256: Hash of the part's file, 64 hex digits.
    """

    part: Annotated[str, msgspec.Meta(pattern=rf"^{PART_NAME}\Z")]
    input: str
    first_row: Count
    users: Count
    rows: Count
    errors: Count
    bytes: Count
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


Step = Advance | JobPart


def write_part(task: Task, partition: Partition, folder: Path) -> Iterator[Step]:
    """Computes a partition and writes its file.

    Yields:
        An Advance after each group of rows, and at the end the JobPart.
    """
    name = partition.name + task.suffix
    answers, errors = _Output(folder, name), _Output(folder / ERRORS_FOLDER, name)
    rejected = 0
    try:
        task.begin_part()
        first = partition.first_row
        for table in read(partition, task.group_rows, task.columns):
            generated = task(table, first)
            answers.add(generated.answers)
            errors.add(generated.errors)
            first += table.num_rows
            rejected += generated.errors.num_rows
            yield Advance(table.num_rows, generated.errors.num_rows, generated.example)
        if first - partition.first_row != partition.rows:
            raise RuntimeError(f"{partition.path} has changed while the job ran")
        if rejected:
            errors.publish()
        answers.publish()
    finally:
        answers.discard()
        errors.discard()
    path = folder / name
    yield JobPart(
        part=name,
        input=partition.input,
        first_row=partition.first_row,
        users=partition.rows,
        rows=answers.num_rows,
        errors=rejected,
        bytes=path.stat().st_size,
        sha256=hash_file(path),
    )


class _Output:
    """A file under a temporary name, Parquet or lines by the suffix of its final name."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path, self.num_rows = folder / name, 0
        self._temporary = folder / f"{TEMPORARY}{uuid.uuid4().hex}-{name}"
        self._writer: pq.ParquetWriter | None = None
        self._waiting: list[pa.Table] = []

    def add(self, table: pa.Table) -> None:
        """Appends rows. Rows of Parquet wait until they fill a row group."""
        self.num_rows += table.num_rows
        self._waiting.append(table)
        if sum(waiting.num_rows for waiting in self._waiting) >= ROW_GROUP_ROWS:
            self._flush()

    def publish(self) -> None:
        """Writes and syncs what is left, and gives the file its name."""
        if self._waiting:
            self._flush()
        if self._writer is not None:
            self._writer.close()
        sync(self._temporary)
        self._temporary.replace(self.path)
        sync(self.path.parent)

    def discard(self) -> None:
        """Removes the temporary file, if it is still there."""
        if self._writer is not None and self._writer.is_open:
            self._writer.close()
        self._temporary.unlink(missing_ok=True)

    def _flush(self) -> None:
        table = pa.concat_tables(self._waiting).combine_chunks()
        self._waiting = []
        self.path.parent.mkdir(exist_ok=True)
        if self.path.suffix == ".jsonl":
            with self._temporary.open("ab") as file:
                file.writelines(line + b"\n" for line in table.column(LINE).to_pylist())
            return
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._temporary, table.schema, compression="zstd")
        self._writer.write_table(table)


def hash_file(path: Path) -> str:
    """Returns the sha256 of a file, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
