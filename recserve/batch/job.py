"""Runs a batch job on one machine: reads one file and writes parts with a manifest.

The job writes into a hidden folder next to the output and renames that folder at the end. A reader
of the output therefore never sees a partial job. Part names and bytes depend on input, bundle and
options only.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from recserve.batch.generate import Generated, Generator, check_schema
from recserve.bundle.new_folder import new_folder
from recserve.features.tables.parquet import SchemaError

MANIFEST = "_manifest.jsonl"
ERRORS_FOLDER = "_errors"


class OutputExists(ValueError):
    """The output folder is not empty and may not be replaced."""


@dataclass(frozen=True)
class Job:
    """Input, output and options of one batch job.

    Attributes:
        input: Parquet file of users.
        output: Folder for the parts and the manifest.
        rows_per_part: Input rows of a part, at least 1.
        overwrite: True replaces the output of an earlier job.

    Raises:
        ValueError: If `rows_per_part` is below 1.
    """

    input: Path
    output: Path
    rows_per_part: int = 20_000
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.rows_per_part < 1:
            raise ValueError(f"rows_per_part is {self.rows_per_part}; a part needs at least 1 row")


@dataclass(frozen=True)
class JobPart:
    """One part, as a line of the manifest.

    Attributes:
        part: File name of the part.
        first_row: Input row number of the part's first user.
        users: Number of input rows.
        rows: Number of rows in the part's file.
        errors: Number of rejected input rows.
        sha256: Hash of the part's file, 64 hex digits.
    """

    part: str
    first_row: int
    users: int
    rows: int
    errors: int
    sha256: str


@dataclass(frozen=True)
class Progress:
    """Progress of a running job.

    Attributes:
        done: Input rows processed.
        total: Input rows in all.
        errors: Input rows rejected in parts that are complete.
        seconds: Time since the start.
    """

    done: int
    total: int
    errors: int
    seconds: float


@dataclass(frozen=True)
class Report:
    """Result of a finished job.

    Attributes:
        parts: Manifest lines in input order.
        seconds: Duration of the job.
        unused_columns: Input columns that were ignored.
    """

    parts: tuple[JobPart, ...]
    seconds: float
    unused_columns: tuple[str, ...]

    @property
    def users(self) -> int:
        """Number of input rows."""
        return sum(part.users for part in self.parts)

    @property
    def rows(self) -> int:
        """Number of output rows."""
        return sum(part.rows for part in self.parts)

    @property
    def errors(self) -> int:
        """Number of rejected input rows."""
        return sum(part.errors for part in self.parts)


def check(job: Job) -> tuple[int, tuple[str, ...]]:
    """Checks input and output of a job. Call it before a model is loaded.

    Returns:
        The number of input rows, and the names of ignored columns.

    Raises:
        SchemaError: If the input is unreadable or empty, or has a missing or mistyped column.
        OutputExists: If the output exists, is not empty, and may not be replaced.
    """
    if not job.input.is_file():
        raise SchemaError(f"{job.input}: no such file")
    try:
        with pq.ParquetFile(job.input) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
    except (pa.ArrowException, OSError) as error:
        raise SchemaError(f"{job.input}: not a readable Parquet file ({error})") from error
    unused = check_schema(schema, job.input)
    if rows == 0:
        raise SchemaError(f"{job.input}: the file has no rows; expected at least one")
    free = not job.output.exists() or (job.output.is_dir() and not any(job.output.iterdir()))
    replaceable = job.overwrite and (job.output / MANIFEST).is_file()
    if not free and not replaceable:
        hint = (
            f"--overwrite needs a folder with a {MANIFEST}"
            if job.overwrite
            else "--overwrite replaces the output of an earlier job"
        )
        raise OutputExists(f"{job.output} is not empty; choose another folder ({hint})")
    return rows, unused


def run(job: Job, generate: Generator, progress: Callable[[Progress], None]) -> Report:
    """Runs a whole job.

    Args:
        job: Input, output and options.
        generate: Computes the slates of one part.
        progress: Called after each group of requests.

    Raises:
        Exception: Whatever `check` or `generate` raises. No new output is left then.
    """
    total, unused = check(job)
    started = time.monotonic()
    done = errors = 0

    def report(rows: int) -> None:
        nonlocal done
        done += rows
        progress(Progress(done, total, errors, time.monotonic() - started))

    parts: list[JobPart] = []
    with new_folder(job.output) as folder:
        with (folder / MANIFEST).open("w", encoding="utf-8") as manifest:
            for number, (first_row, users) in enumerate(_slices(job)):
                generated = generate(users, first_row, report)
                errors += generated.errors.num_rows
                parts.append(
                    _write(folder, f"part-{number:05d}.parquet", first_row, users, generated)
                )
                manifest.write(json.dumps(asdict(parts[-1])) + "\n")
            manifest.flush()
            os.fsync(manifest.fileno())
        # `new_folder` renames only onto a free path.
        if job.output.exists():
            shutil.rmtree(job.output)
    return Report(tuple(parts), time.monotonic() - started, unused)


def _slices(job: Job) -> Iterator[tuple[int, pa.Table]]:
    """Yields the first row and the table of each part, reading one part at a time."""
    with pq.ParquetFile(job.input) as file:
        first_row = 0
        waiting: list[pa.RecordBatch] = []
        rows = 0
        for batch in file.iter_batches(batch_size=job.rows_per_part):
            # A batch can end in the middle of a part: its rest waits for the next batch.
            while rows + batch.num_rows >= job.rows_per_part:
                need = job.rows_per_part - rows
                yield first_row, pa.Table.from_batches([*waiting, batch.slice(0, need)])
                first_row += job.rows_per_part
                batch, waiting, rows = batch.slice(need), [], 0
            if batch.num_rows:
                waiting.append(batch)
                rows += batch.num_rows
        if rows:
            yield first_row, pa.Table.from_batches(waiting)


def _write(
    folder: Path, name: str, first_row: int, users: pa.Table, generated: Generated
) -> JobPart:
    path = folder / name
    pq.write_table(generated.answers, path, compression="zstd")
    if generated.errors.num_rows:
        (folder / ERRORS_FOLDER).mkdir(exist_ok=True)
        pq.write_table(generated.errors, folder / ERRORS_FOLDER / name, compression="zstd")
    return JobPart(
        name,
        first_row,
        users.num_rows,
        generated.answers.num_rows,
        generated.errors.num_rows,
        _sha256(path),
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
