"""Runs a batch job: gives partitions to a runner and records the finished parts.

A part is entered in the manifest as soon as its file is on the disk. The same job, run again in the
same folder, computes only what the manifest lacks. Part names and bytes depend on input, models and
options only.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from recserve.batch.generate import check_schema
from recserve.batch.manifest import VERSION, OutputFolder, check_output
from recserve.batch.part import Advance, JobPart, Step
from recserve.batch.source import InputFile, Partition, is_lines, partitions, scan
from recserve.features.tables.parquet import SchemaError

# The share of rejected rows is judged from this number of rows on.
JUDGED_ROWS = 1000


class TooManyErrors(RuntimeError):
    """More rows are rejected than the job allows; what is finished stays in the output folder."""


@dataclass(frozen=True)
class Job:
    """Input, output and options of one batch job.

    Attributes:
        input: Parquet file of users, or a folder of them.
        output: Folder for the parts and the manifest.
        rows_per_part: Most input rows of a part, at least 1.
        overwrite: True replaces the output of an earlier job.
        max_error_rate: Share of rejected rows, 0 to 1, that ends the job. It is judged once
            JUDGED_ROWS rows have been seen.
        columns: Names of columns in Parquet files by our name, such as `user_id`.

    Raises:
        ValueError: If `rows_per_part` is below 1, or `max_error_rate` is not a share.
    """

    input: Path
    output: Path
    rows_per_part: int = 20_000
    overwrite: bool = False
    max_error_rate: float = 0.1
    columns: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rows_per_part < 1:
            raise ValueError(f"rows_per_part is {self.rows_per_part}; a part needs at least 1 row")
        if not 0 <= self.max_error_rate <= 1:
            raise ValueError(f"max_error_rate is {self.max_error_rate}; expected 0 to 1")


class PartRunner(Protocol):
    """Computes partitions: in this process, in others, or on other machines."""

    @property
    def suffix(self) -> str:
        """Suffix of the output files."""
        ...

    @property
    def facts(self) -> Mapping[str, object]:
        """What determines the output besides the input, as far as it is known before `open`."""
        ...

    def open(self, lock: int) -> Mapping[str, object]:
        """Starts the runner.

        Args:
            lock: Handle of the locked output folder. Processes that write there keep it open.

        Returns:
            What determines the output besides the input.
        """
        ...

    def run(self, partitions: Sequence[Partition], folder: Path) -> Iterator[Step]:
        """Computes partitions in any order, and yields what happens."""
        ...

    def close(self) -> None:
        """Ends all work at once."""
        ...


@dataclass(frozen=True)
class Progress:
    """Progress of a running job.

    Attributes:
        done: Input rows processed, by earlier runs of the job too.
        total: Input rows in all.
        errors: How many of the processed rows were rejected.
        seconds: Time since the models of this run were loaded.
        rows_per_s: Rows per second of this run.
        seconds_left: Expected time to the end; None before the first rows.
        parts: Finished parts.
    """

    done: int
    total: int
    errors: int
    seconds: float
    rows_per_s: float
    seconds_left: float | None
    parts: int


@dataclass(frozen=True)
class Report:
    """Result of a finished job.

    Attributes:
        parts: Manifest lines in input order.
        seconds: Duration of this run.
        unused_columns: Input columns that were ignored.
        resumed: Number of parts that earlier runs had finished.
    """

    parts: tuple[JobPart, ...]
    seconds: float
    unused_columns: tuple[str, ...]
    resumed: int = 0

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


Check = Callable[[Sequence[InputFile]], tuple[str, ...]]


@dataclass(frozen=True)
class Plan:
    """A checked job.

    Attributes:
        job: The job.
        partitions: All partitions in input order.
        facts: Identity of the input and its division into parts.
        unused_columns: Input columns that are ignored.
    """

    job: Job
    partitions: tuple[Partition, ...]
    facts: Mapping[str, object]
    unused_columns: tuple[str, ...]

    @property
    def num_rows(self) -> int:
        """Number of input rows."""
        return sum(partition.rows for partition in self.partitions)


def check_users(files: Sequence[InputFile]) -> tuple[str, ...]:
    """Checks the columns of files of users and returns the ignored ones.

    Raises:
        SchemaError: If a column is missing or mistyped, or a file is not Parquet.
    """
    for file in files:
        if is_lines(file.path):
            raise SchemaError(
                f"{file.path}: users come as Parquet with a column user_id; JSON lines are prompts "
                "for --llm"
            )
    return tuple(name for file in files for name in check_schema(file.schema, file.path))


def check(job: Job, check_files: Check = check_users) -> Plan:
    """Checks input and output of a job. Call it before a model is loaded.

    Args:
        job: The job.
        check_files: Checks the input files and returns the names of their ignored columns.

    Raises:
        SchemaError: If the input is unreadable or empty, has a missing or mistyped column, or
            two requests of texts with the same `custom_id`.
        OutputExists: If the output exists, is not empty, and may not be replaced.
        ValueError: If the output lies in the input folder, whose files it would join.
    """
    if job.output.resolve().is_relative_to(job.input.resolve()):
        raise ValueError(f"output is {job.output}, inside the input {job.input}; choose another")
    check_output(job.output, job.overwrite)
    files = scan(job.input, job.rows_per_part, job.columns)
    unused = check_files(files)
    content = "\n".join(f"{file.sha256} {file.name}" for file in files)
    facts = {
        "format": VERSION,
        "input_files": len(files),
        "input_sha256": hashlib.sha256(content.encode()).hexdigest(),
        "rows_per_part": job.rows_per_part,
        **({"columns": dict(job.columns)} if job.columns else {}),
    }
    parts = tuple(partitions(files, job.rows_per_part))
    return Plan(job, parts, facts, tuple(dict.fromkeys(unused)))


def run(
    job: Job | Plan, runner: PartRunner, progress: Callable[[Progress], None] = lambda _: None
) -> Report:
    """Runs a job, or what an earlier run has left of it.

    Args:
        job: A job, or what `check` returned for it.
        runner: Computes the parts, in this process or in others.
        progress: Called after each group of rows, and for each finished part of an earlier run
            once its file has been compared with its hash.

    Raises:
        OutputExists: If the output folder belongs to another job, or its manifest is damaged.
        TooManyErrors: If the share of rejected rows exceeds the job's limit.
        Exception: Whatever the runner raises. Finished parts stay for the next run.
    """
    plan = check(job) if isinstance(job, Job) else job
    started = time.monotonic()
    with OutputFolder(plan.job.output, plan.job.overwrite) as folder:
        folder.claim({**plan.facts, **runner.facts})
        names = [partition.name + runner.suffix for partition in plan.partitions]
        count = _Count(plan)
        known = set(names)
        for part in folder.check_parts():
            if part.part in known:
                progress(count.resume(part))
        resumed = len(known & folder.done.keys())
        count.judge()
        if not folder.whole:
            try:
                folder.claim(runner.open(folder.lock))
                count.start()
                left = [
                    partition
                    for partition, name in zip(plan.partitions, names, strict=True)
                    if name not in folder.done
                ]
                for step in runner.run(left, folder.path):
                    if isinstance(step, JobPart):
                        folder.add(step)
                        count.count_part()
                    else:
                        progress(count.advance(step))
                        count.judge()
            finally:
                runner.close()
        parts = folder.finish(plan.partitions, runner.suffix)
    return Report(tuple(parts), time.monotonic() - started, plan.unused_columns, resumed)


class _Count:
    """Counts rows, rejected rows and parts, and judges the share of rejected rows."""

    def __init__(self, plan: Plan) -> None:
        self._limit, self._started, self._before = plan.job.max_error_rate, 0.0, 0
        self._example = ""
        self._now = Progress(0, plan.num_rows, 0, 0.0, 0.0, None, 0)

    def resume(self, part: JobPart) -> Progress:
        """Counts a part of an earlier run."""
        now = self._now
        done, errors = now.done + part.users, now.errors + part.errors
        self._now = replace(now, done=done, errors=errors, parts=now.parts + 1)
        return self._now

    def start(self) -> None:
        """Starts the clock: the models are loaded."""
        self._started, self._before = time.monotonic(), self._now.done

    def count_part(self) -> None:
        """Counts a finished part."""
        self._now = replace(self._now, parts=self._now.parts + 1)

    def advance(self, step: Advance) -> Progress:
        """Counts a group of rows."""
        self._example = self._example or step.example
        seconds = time.monotonic() - self._started
        done = self._now.done + step.rows
        rate = (done - self._before) / max(seconds, 1e-9)
        self._now = replace(
            self._now,
            done=done,
            errors=self._now.errors + step.errors,
            seconds=round(seconds, 3),
            rows_per_s=round(rate, 1),
            seconds_left=round((self._now.total - done) / max(rate, 1e-9), 1),
        )
        return self._now

    def judge(self) -> None:
        """Raises TooManyErrors if too many rows were rejected so far."""
        done, errors = self._now.done, self._now.errors
        if done >= JUDGED_ROWS and errors > self._limit * done:
            raise TooManyErrors(
                f"{errors} of {done} rows were rejected, which is more than {self._limit:.1%}"
                f"{f' ({self._example})' if self._example else ''}. Finished parts are kept; the "
                "same command with a higher --max-error-rate continues"
            )
