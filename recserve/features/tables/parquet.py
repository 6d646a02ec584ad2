"""Reads Parquet tables from outside, checks their schema and records rejected rows.

A wrong schema is always an error. An invalid row is an error under `on_bad_rows="error"`. Under
`"skip"` it is dropped and counted, and the first examples are recorded.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recserve.features.tables.column_names import list_names
from recserve.features.tables.plain_columns import check_parquet

OnBadRows = Literal["error", "skip"]
MAX_TABLE_BYTES = 32 << 30
MAX_EXAMPLES = 10
READ_BYTES = 1 << 20  # of a column of a file that is read in chunks, at once
# How a column of another type is converted, by expected type; `column` is table[name].
CONVERSIONS: dict[str, tuple[str, Callable[[pa.ChunkedArray], Any]]] = {
    "string": ("pyarrow.compute.cast(column, 'string')", lambda c: pc.cast(c, "string")),
    "list<string>": (
        "pyarrow.compute.split_pattern(pyarrow.compute.cast(column, 'string'), '|')",
        lambda c: pc.split_pattern(pc.cast(c, "string"), "|"),
    ),
    "float": ("pyarrow.compute.cast(column, 'float32')", lambda c: pc.cast(c, "float32")),
}


class SchemaError(ValueError):
    """The file is unreadable or empty, or a column is missing or of the wrong type."""


class RowsError(SchemaError):
    """A SchemaError that names rows of a column, which may be those of several files."""

    def __init__(self, text: Callable[[Callable[[int], str]], str]) -> None:
        """Makes the error.

        Args:
            text: Returns the message from what names a row of the column, as in `row 3`.
        """
        super().__init__(text(lambda row: f"row {row}"))
        self.text = text


class BadRowError(ValueError):
    """A row of the file is invalid; the message names file, column and row."""


@dataclass(frozen=True)
class Places:
    """The files and rows that the rows of a table come from.

    Attributes:
        runs: For each run of consecutive rows: its first row in the table, its file, and the number
            of that row in the file.
    """

    runs: tuple[tuple[int, Path, int], ...]

    def of(self, row: int) -> tuple[Path, int]:
        """Returns the file of a row, and its number there."""
        first, path, number = self.runs[bisect_right(self.runs, row, key=lambda run: run[0]) - 1]
        return path, number + row - first


def name_beside(path: Path, other: Path) -> str:
    """Returns the name of a file, with the folders that another file is not in."""
    return path.relative_to(os.path.commonpath([path.parent, other.parent])).as_posix()


def explain(
    error: Exception, place: Callable[[int], tuple[Path, int]], word: str = "row"
) -> tuple[Path | None, str]:
    """Returns the message of an error of a column, and the file of the first row in it.

    Args:
        error: The error.
        place: Returns the file of a row of the column, and its number there.
        word: What a row is called.
    """
    if not isinstance(error, RowsError):
        return None, str(error)
    files: list[Path] = []

    def name(row: int) -> str:
        path, number = place(row)
        files.append(path)
        beside = f" of {name_beside(path, files[0])}" if path != files[0] else ""
        return f"{word} {number}{beside}"

    text = error.text(name)
    return files[0] if files else None, text


@dataclass(frozen=True)
class ColumnUse:
    """What a column of an input file became.

    Attributes:
        name: Name of the column.
        type: Arrow type in the file.
        use: What it is used for, how it was converted, or why it is ignored.
    """

    name: str
    type: str
    use: str


@dataclass(frozen=True)
class BadRows:
    """Report of rejected and changed rows of a file, and of its columns.

    Attributes:
        file: Path of the file.
        num_rows: Rows in the file.
        kept_rows: [n] int64 file rows that were accepted, in file order; empty of a file that was
            read in chunks.
        dropped: Number of rejected rows, by reason.
        notes: Number of accepted but changed rows, by reason.
        examples: Messages about the first rejected rows.
        columns: What each column of the file became.
    """

    file: str
    num_rows: int
    kept_rows: np.ndarray
    dropped: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    examples: tuple[str, ...] = ()
    columns: tuple[ColumnUse, ...] = ()

    @property
    def num_dropped(self) -> int:
        """Number of rejected rows."""
        return sum(self.dropped.values())

    def lines(self) -> list[str]:
        """Returns the report as lines for a terminal; no lines if there is nothing to report."""
        lines = []
        if self.num_dropped:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
            lines.append(
                f"{self.file}: dropped {self.num_dropped} of {self.num_rows} rows: {reasons}"
            )
            lines += [f"  {example}" for example in self.examples]
        lines += [f"{self.file}: {count} {reason}" for reason, count in self.notes.items()]
        return lines


class RowCheck:
    """Collects rejected rows of one table under one policy. Rows are numbered from 0.

    Attributes:
        path: Path of the file, for messages.
        on_bad_rows: "error" raises in `finish` if a row is rejected, "skip" counts rejected rows.
        kept: [num_rows] bool, True for rows that are not rejected.
        dropped: Number of rejected rows, by reason.
        notes: Number of accepted but changed rows, by reason.
        examples: Messages about the first rejected rows.
    """

    def __init__(
        self,
        path: Path,
        num_rows: int,
        on_bad_rows: OnBadRows,
        labels: Mapping[str, str] | None = None,
        places: Places | None = None,
    ) -> None:
        """Begins with no row rejected.

        Args:
            path: Path of the file, for messages.
            num_rows: Rows of the table.
            on_bad_rows: The policy.
            labels: Names of columns in messages, where they differ from ours.
            places: Where the rows come from; None: they are those of the file.

        Raises:
            ValueError: If the policy is neither "error" nor "skip".
        """
        if on_bad_rows not in ("error", "skip"):
            raise ValueError(f"on_bad_rows is {on_bad_rows!r}; expected 'error' or 'skip'")
        self.path = path
        self.on_bad_rows = on_bad_rows
        self.kept = np.ones(num_rows, dtype=bool)
        self.dropped: dict[str, int] = {}
        self.notes: dict[str, int] = {}
        self.examples: list[str] = []
        self._problems: list[str] = []
        self._labels = labels or {}
        self._places = places or Places(((0, path, 0),))

    def refuse(
        self, bad: np.ndarray, reason: str, column: str, describe: Callable[[int], str]
    ) -> None:
        """Rejects rows that are invalid and not yet rejected.

        Args:
            bad: [num_rows] bool, True for invalid rows.
            reason: Short name of the reason, used for counting.
            column: Name of the column; empty for whole rows.
            describe: Maps a file row to the details in the message.
        """
        rows = np.flatnonzero(bad & self.kept)
        if not rows.size:
            return
        # Each reason has an example, however many rows other reasons have.
        num_examples = max(1, MAX_EXAMPLES - len(self.examples))
        found = [(row, describe(row)) for row in rows[:num_examples].tolist()]
        self._add(found, reason, column, int(rows.size), self.kept.size)
        self.kept[rows] = False

    def _add(
        self, rows: list[tuple[int, str]], reason: str, column: str, count: int, num_rows: int
    ) -> None:
        """Adds rejected rows to the report, of which `rows` are the first, with details."""
        for place, (row, text) in enumerate(rows):
            path, number = self._places.of(row)
            at = f"column {self._labels.get(column, column)}, row" if column else "row"
            message = f"{at} {number}: {text}"
            self.examples.append(message if path == self.path else f"{path}: {message}")
            if not place:
                self._problems.append(
                    f"{path}: {message} ({reason}; {count} such rows of {num_rows}, "
                    "rows count from 0)"
                )
        self.dropped[reason] = self.dropped.get(reason, 0) + count

    def refuse_unreadable(
        self, bad: np.ndarray, reason: str, column: str, describe: Callable[[int], str]
    ) -> None:
        """Rejects rows that a column cannot hold."""
        self.refuse(bad, reason, column, describe)

    def note(self, reason: str, count: int) -> None:
        """Counts accepted rows that were changed."""
        if count:
            self.notes[reason] = self.notes.get(reason, 0) + count

    def finish(self) -> np.ndarray:
        """Returns the [n] int64 rows that are not rejected.

        Raises:
            BadRowError: If a row is rejected under "error". The message has a line per reason.
            SchemaError: If no row is left.
        """
        self._raise_problems()
        kept = np.flatnonzero(self.kept)
        if not kept.size:
            raise SchemaError(f"{self.path}: no usable rows among {self.kept.size}")
        return kept

    def _raise_problems(self) -> None:
        if self._problems and self.on_bad_rows == "error":
            *others, last = self._problems
            remedy = "; repair the file, or drop such rows with --on-bad-rows skip"
            raise BadRowError("\n".join([*others, last + remedy]))

    def report(self, columns: tuple[ColumnUse, ...] = ()) -> BadRows:
        """Returns the collected report."""
        return BadRows(
            str(self.path),
            self.kept.size,
            np.flatnonzero(self.kept),
            dict(self.dropped),
            dict(self.notes),
            tuple(self.examples),
            columns,
        )


class ChunkedRowCheck(RowCheck):
    """A RowCheck of a table that comes in chunks; it reports as if the table came at once.

    Attributes:
        first_row: Rows before the present chunk.
    """

    def __init__(self, path: Path, on_bad_rows: OnBadRows) -> None:
        super().__init__(path, 0, on_bad_rows)
        self.first_row = 0
        self._steps: dict[tuple[int, object], _Step] = {}
        self._runs: list[tuple[int, Path, int]] = []
        self._number = 0

    @property
    def num_rows(self) -> int:
        """Rows of all chunks."""
        return self.first_row + self.kept.size

    @property
    def num_refused(self) -> int:
        """Rejected rows of all chunks."""
        return sum(step.count for step in self._steps.values())

    def begin(self, num_rows: int, labels: Mapping[str, str], places: Places) -> None:
        """Begins a chunk. Afterwards each chunk calls `refuse` for the same reasons in order."""
        self.first_row += self.kept.size
        for first, path, number in places.runs:
            if not self._runs or self._runs[-1][1] != path:
                self._runs.append((self.first_row + first, path, number))
        self.kept = np.ones(num_rows, dtype=bool)
        self._labels = {**self._labels, **labels}
        self._number = 0

    def refuse(
        self, bad: np.ndarray, reason: str, column: str, describe: Callable[[int], str]
    ) -> None:
        """Rejects rows of the present chunk, as of RowCheck."""
        self._number += 1
        self._refuse((1, self._number), bad, reason, column, describe)

    def refuse_unreadable(
        self, bad: np.ndarray, reason: str, column: str, describe: Callable[[int], str]
    ) -> None:
        """Rejects rows that a column cannot hold, which not every chunk has."""
        self._refuse((0, column), bad, reason, column, describe)

    def refuse_later(
        self, count: int, reason: str, column: str, rows: list[int], texts: list[str]
    ) -> None:
        """Rejects rows when all chunks have passed.

        Args:
            count: Number of the rows.
            reason: As of `refuse`.
            column: As of `refuse`.
            rows: Numbers of the first MAX_EXAMPLES of them.
            texts: Their details.
        """
        found = list(zip(rows, texts, strict=True))
        self._steps[2, len(self._steps)] = _Step(reason, column, count, found)

    def _refuse(
        self,
        key: tuple[int, object],
        bad: np.ndarray,
        reason: str,
        column: str,
        describe: Callable[[int], str],
    ) -> None:
        step = self._steps.setdefault(key, _Step(reason, column))
        rows = np.flatnonzero(bad & self.kept)
        step.count += rows.size
        for row in rows[: MAX_EXAMPLES - len(step.rows)].tolist():
            step.rows.append((self.first_row + row, describe(row)))
        self.kept[rows] = False

    def close(self, columns: list[str]) -> None:
        """Puts what was rejected in order. Call it once, before `finish` or `report`.

        Args:
            columns: Names of the table's columns in order.
        """
        self._places = Places(tuple(self._runs) or self._places.runs)
        order = {name: place for place, name in enumerate(["", *columns])}
        for key in sorted(self._steps, key=lambda k: (k[0], order.get(k[1], k[1]))):  # type: ignore[call-overload]
            step = self._steps[key]
            if step.count:
                rows = step.rows[: max(1, MAX_EXAMPLES - len(self.examples))]
                self._add(rows, step.reason, step.column, step.count, self.num_rows)

    def finish(self) -> np.ndarray:
        """Raises as RowCheck does; the rows are not recorded, so the result is empty."""
        self._raise_problems()
        if self.num_refused == self.num_rows:
            raise SchemaError(f"{self.path}: no usable rows among {self.num_rows}")
        return np.zeros(0, np.int64)

    def report(self, columns: tuple[ColumnUse, ...] = ()) -> BadRows:
        """Returns the collected report, without the numbers of the accepted rows."""
        nothing = np.zeros(0, np.int64)
        return replace(super().report(columns), num_rows=self.num_rows, kept_rows=nothing)


@dataclass
class _Step:
    """Rows that were rejected for one reason.

    Attributes:
        reason: Short name of the reason.
        column: Name of the column; empty for whole rows.
        count: Number of rows.
        rows: Number and details of the first rows.
    """

    reason: str
    column: str
    count: int = 0
    rows: list[tuple[int, str]] = field(default_factory=list)


def read_table(path: Path) -> pa.Table:
    """Reads a whole file. Raises SchemaError if it is missing, not Parquet, too large or empty."""
    table = next(read_table_chunks(path, None))
    check_rows(table, path)
    return table


def read_table_chunks(path: Path, rows: int | None) -> Iterator[pa.Table]:
    """Yields the rows of a file in chunks of at most `rows` rows; None: at once.

    Raises:
        SchemaError: If the file is missing, not Parquet or too large.
    """
    with parquet_errors(path), pq.ParquetFile(path, buffer_size=READ_BYTES if rows else 0) as file:
        meta = file.metadata
        check_parquet(file)
        size = sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
        if size > MAX_TABLE_BYTES:
            raise SchemaError(f"{path}: {size} bytes uncompressed; at most {MAX_TABLE_BYTES}")
        if rows is None:
            yield file.read()
            return
        for batch in file.iter_batches(rows):
            yield pa.Table.from_batches([batch])


@contextmanager
def parquet_errors(path: Path) -> Iterator[None]:
    """Raises SchemaError for what reading a Parquet file raises."""
    try:
        yield
    except FileNotFoundError:
        raise SchemaError(f"{path}: no such file") from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise SchemaError(f"{path}: not a readable Parquet file ({error})") from error
    except ValueError as error:
        raise error if isinstance(error, SchemaError) else SchemaError(f"{path}: {error}") from None


def check_rows(table: pa.Table, path: Path) -> None:
    """Raises SchemaError if a table has no rows."""
    if table.num_rows == 0:
        raise SchemaError(f"{path}: the file has no rows; expected at least one")


def is_text(kind: Any) -> bool:
    """Whether an Arrow type is a string type, plain or dictionary-encoded."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view()
    )


def is_list(kind: Any) -> bool:
    """Whether an Arrow type is a list of any kind, a map excepted."""
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def column(
    table: pa.Table, path: Path, name: str, accepts: Callable[[Any], bool], expected: str
) -> pa.ChunkedArray:
    """Returns one column.

    Args:
        table: Table of the file.
        path: Path of the file, for messages.
        name: Name of the column.
        accepts: Whether an Arrow type is accepted.
        expected: Name of the accepted type, for messages.

    Raises:
        SchemaError: If the column is missing or mistyped. The message names file and column.
    """
    if name not in table.column_names:
        listed = list_names(table.column_names)
        raise SchemaError(f"{path}: column {name} ({expected}) is missing; the file has {listed}")
    values = table.column(name)
    if not accepts(values.type):
        raise SchemaError(f"{path}: column {name} {type_error(values, expected)}")
    return values


def type_error(values: pa.ChunkedArray, expected: str) -> SchemaError:
    """Returns the error of a mistyped column, with a conversion that works on its values."""
    # A float as text is another id, 1.0 instead of 1, and bytes need not be text.
    kind = values.type
    safe = not (pa.types.is_floating(kind) or kind in (pa.binary(), pa.large_binary()))
    if expected in CONVERSIONS and safe:
        code, convert = CONVERSIONS[expected]
        try:
            convert(values)
        except (pa.ArrowException, TypeError):
            pass
        else:
            return SchemaError(f"is {kind}; expected {expected}; convert it with {code}")
    return SchemaError(f"is {kind}; expected {expected}")


def null_or_blank(values: pa.Array) -> np.ndarray:
    """Returns [n] bool, True where a text is null or empty."""
    blank = pc.fill_null(pc.equal(pc.binary_length(values), 0), True)
    return np.asarray(blank.to_numpy(zero_copy_only=False), dtype=bool)


def longer_than(values: pa.Array, most: int) -> np.ndarray:
    """Returns [n] bool, True where a text has more than `most` characters."""
    longer = pc.fill_null(pc.greater(pc.utf8_length(values), most), False)
    return np.asarray(longer.to_numpy(zero_copy_only=False), dtype=bool)
