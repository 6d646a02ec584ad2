"""Reads CSV files and files of JSON lines as Arrow tables, without changing what they say.

    file -> blocks of rows as they were read -> columns with the types of all their fields

Text stays text unless a whole column has one other form, so an id such as `0056` keeps its zeros.
Numbers keep all their digits: a column is decimal if doubles would round a number beyond 2**53.
"""

from __future__ import annotations

import csv
import io
import json
import re
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE, getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pc_csv

from recserve.bounds import MAX_WHOLE
from recserve.features.tables.column_names import OTHER_NAMES, suggest
from recserve.features.tables.parquet import Places, RowsError, SchemaError, explain
from recserve.features.tables.plain_columns import (
    MAX_COLUMNS,
    TOO_WIDE,
    check_width,
    unreadable_rows,
    without_rows,
)

# Delimiters of each suffix; the first one is that of a file with one column.
DELIMITERS = {".csv": (",", ";", "\t"), ".tsv": ("\t",)}
LINE_SUFFIXES = (".jsonl", ".ndjson", ".json")
BLOCK_BYTES = 16 << 20  # a row of CSV must be shorter
HEAD_BYTES = 1 << 20  # of a CSV file, from which header and delimiter are read
HEAD_ROWS, HEAD_COLUMNS = 20, 64
CHUNK_LINES = 1 << 18  # of JSON, of a file that is read in chunks
# Columns of CSV whose text is never read as numbers here.
TEXT_COLUMNS = ("user_id", "item_id", "title", "categories", "timestamp", "type")
ID_COLUMNS = ("user_id", "item_id")
INT64, UINT64 = range(-(2**63), 2**63), range(2**64)
MAX_DIGITS = 76  # of a decimal column
# A number with leading zeros is a code, not a number. 18 digits always fit into int64.
_INTEGER = r"^-?(0|[1-9][0-9]{0,17})$"
_LONG_INTEGER = r"^-?(0|[1-9][0-9]{0,19})$"
_NUMBER = r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?$"
_FRACTION = r"[.eE]"
_MAYBE_WIDE = r"^-?[0-9]{16}"  # at least 10**15
_DIGITS = re.compile(rb"[0-9]{16}")
_SURROGATE = re.compile("[\ud800-\udfff]")

Rename = Callable[[list[str]], list[str | None]]
Report = Callable[[int], str]


@dataclass(frozen=True)
class Unreadable:
    """Rows that a file has and that no column can hold.

    Attributes:
        column: Name of the column; None if the whole row is unreadable.
        rows: [n] int64 rows of the table, in which the column is null.
        reason: Short name of the reason.
        describe: Maps a row to the details in the message.
    """

    column: str | None
    rows: np.ndarray
    reason: str
    describe: Report


@dataclass(frozen=True)
class Block:
    """Consecutive rows of a file as they were read.

    Attributes:
        path: The file.
        first: Rows of the file before them.
        table: The rows; of CSV with columns of text; None for JSON lines.
        ragged: Rows of CSV with a wrong number of fields, by row of the table, where they are null.
        delimiter: Delimiter of CSV.
        lines: Lines of JSON with their numbers.
    """

    path: Path
    first: int
    table: pa.Table | None = None
    ragged: dict[int, pc_csv.InvalidRow] = field(default_factory=dict)
    delimiter: str = ","
    lines: Iterable[tuple[int, bytes]] = ()


@dataclass(frozen=True)
class Content:
    """What a file holds.

    Attributes:
        table: The columns with our names.
        unreadable: Rows that cannot be read.
        notes: How a column was converted, by our name.
        places: Where the rows come from; None: they are those of the file.
    """

    table: pa.Table
    unreadable: tuple[Unreadable, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)
    places: Places | None = None


def read_csv_blocks(path: Path, delimiter: str, at_once: bool) -> Iterator[Block]:
    """Yields the rows of a CSV file with a header, as text. An empty field is null.

    Spreadsheets write semicolons where a comma is the decimal point.

    Args:
        path: The file.
        delimiter: What `find_delimiter` returns.
        at_once: Whether there is one block.

    Raises:
        SchemaError: If the file is not CSV, or has too many columns.
    """
    parse = pc_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    with _csv_errors(path):
        names = _names(path, delimiter)
        check_width(names)
        texts, ragged = _as_texts(names), dict[int, pc_csv.InvalidRow]()
        try:
            if at_once:
                # On several threads, which cannot number the rows that have other fields.
                blocks = pc_csv.ReadOptions(block_size=BLOCK_BYTES)
                table = pc_csv.read_csv(path, blocks, parse, texts)
                yield Block(path, 0, table, {}, delimiter)
                return
        except pa.ArrowInvalid as error:
            if " columns, got " not in str(error):
                raise

        def note(row: pc_csv.InvalidRow) -> str:
            ragged[row.number - 2] = row  # numbers count from 1, with the header
            return "skip"

        parse.invalid_row_handler = note
        blocks = pc_csv.ReadOptions(block_size=BLOCK_BYTES, use_threads=False)  # numbers the rows
        if at_once:
            table = pc_csv.read_csv(path, blocks, parse, texts)
            yield _with_ragged(path, 0, table, ragged, delimiter, is_last=True)
            return
        first, block = 0, None
        with pc_csv.open_csv(path, blocks, parse, texts) as reader:
            for batch in reader:
                table = pa.Table.from_batches([batch])
                block = _with_ragged(path, first, table, ragged, delimiter)
                assert block.table is not None
                first += block.table.num_rows
                yield block
            if ragged or block is None:
                table = reader.schema.empty_table()
                yield _with_ragged(path, first, table, ragged, delimiter, is_last=True)


def _with_ragged(
    path: Path,
    first: int,
    table: pa.Table,
    ragged: dict[int, pc_csv.InvalidRow],
    delimiter: str,
    is_last: bool = False,
) -> Block:
    """Returns rows with a null row for each ragged one between them, which it takes out.

    Args:
        path: The file.
        first: Rows of the file before them.
        table: The other rows.
        ragged: Rows with a wrong number of fields, by their number in the file.
        delimiter: Delimiter of the file.
        is_last: Whether all ragged rows that are left follow.
    """
    end, own = first + table.num_rows, list[int]()
    for row in sorted(list(ragged)):
        if row < end or is_last:
            end += 1
            own.append(row)
    if own:
        null = np.zeros(end - first, bool)
        null[np.array(own) - first] = True
        table = table.take(pa.array(np.cumsum(~null) - 1, mask=null))
    return Block(path, first, table, {row - first: ragged.pop(row) for row in own}, delimiter)


@contextmanager
def _csv_errors(path: Path) -> Iterator[None]:
    """Raises SchemaError for what reading a CSV file raises."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = f" ({error})"
        if isinstance(error, UnicodeDecodeError):
            reason = ": the header has other bytes"
        elif "Empty CSV file" in reason:
            reason = ": it has no rows; expected a header and at least one row"
        raise SchemaError(
            f"{path}: not a readable CSV file in UTF-8{reason}{_encoding_hint(path)}"
        ) from error
    except ValueError as error:
        raise error if isinstance(error, SchemaError) else SchemaError(f"{path}: {error}") from None


def csv_content(blocks: Sequence[Block], rename: Rename) -> Content:
    """Returns the rows of blocks of CSV, with the types of their fields.

    A column is of integers, double, decimal or bool if all its fields are; the other columns and
    TEXT_COLUMNS are text.

    Args:
        blocks: The blocks, of files with the same names of columns.
        rename: Returns our names of the columns, None for those to leave out.

    Raises:
        SchemaError: If the columns cannot be named.
    """
    table = pa.concat_tables([block.table for block in blocks])
    places = places_of(blocks)
    try:
        ours = rename(table.column_names)
    except ValueError as error:
        raise SchemaError(f"{blocks[0].path}: {error}") from None
    ragged: dict[int, pc_csv.InvalidRow] = {}
    for block, (first, _, _) in zip(blocks, places.runs, strict=True):
        ragged |= {first + row: invalid for row, invalid in block.ragged.items()}
    delimiter = blocks[0].delimiter
    found = []
    if ragged:
        found.append(
            Unreadable(
                None,
                np.array(sorted(ragged), np.int64),
                "wrong number of fields",
                lambda row: (
                    f"it has {ragged[row].actual_columns} fields; expected "
                    f"{ragged[row].expected_columns}, as in the header, divided at {delimiter!r}"
                ),
            )
        )
    columns: dict[str, pa.ChunkedArray] = {}
    notes: dict[str, str] = {}
    for name, values in zip(ours, table.columns, strict=True):
        if name is None:
            continue
        rows = unreadable_rows(values)
        if rows.size:
            hint = _encoding_hint(places.of(int(rows[0]))[0])
            found.append(Unreadable(name, rows, *_not_utf8(hint, values)))
            values = without_rows(values, rows)
        if name not in TEXT_COLUMNS:
            values, note = _infer(values, "," if delimiter == ";" else ".")
            notes |= {name: note} if note else {}
        columns[name] = values
    return Content(pa.table(columns), tuple(found), notes, places)


def places_of(blocks: Iterable[Block]) -> Places:
    """Returns where the rows of some tables, one after another, come from."""
    runs, total = [], 0
    for block in blocks:
        runs.append((total, block.path, block.first))
        assert block.table is not None
        total += block.table.num_rows
    return Places(tuple(runs))


def _as_texts(names: Iterable[str]) -> pc_csv.ConvertOptions:
    """Returns options that read all columns as text, and an empty field as null."""
    return pc_csv.ConvertOptions(
        column_types={name: pa.string() for name in names},
        strings_can_be_null=True,
        null_values=[""],
        check_utf8=False,
    )


def _names(path: Path, delimiter: str) -> list[str]:
    """Returns the names in the header, as Arrow reads them."""
    parse = pc_csv.ParseOptions(
        delimiter=delimiter, newlines_in_values=True, invalid_row_handler=lambda row: "skip"
    )
    plain = pc_csv.ConvertOptions(check_utf8=False)
    with pc_csv.open_csv(path, pc_csv.ReadOptions(block_size=BLOCK_BYTES), parse, plain) as reader:
        return list(reader.schema.names)


def _not_utf8(hint: str, values: pa.ChunkedArray) -> tuple[str, Report]:
    def describe(row: int) -> str:
        raw = values.slice(row, 1).combine_chunks().view(pa.binary())[0].as_py()
        return f"the text is not UTF-8: {raw[:60]!r}{hint}"

    return "not UTF-8", describe


def find_delimiter(path: Path) -> str:
    """Returns the delimiter with which the first rows have as many fields as the header.

    Of several it is the one with the most columns of known names, then the one with the most
    columns.

    Raises:
        SchemaError: If the header has too many columns.
    """
    with path.open("rb") as file:
        raw = file.read(HEAD_BYTES)
    head = raw.removeprefix(BOM_UTF8).decode("utf-8", "replace")
    known = DELIMITERS[path.suffix.lower()]
    best, delimiter, width = (False, 0, 0), known[0], 0
    for one in known:
        rows: list[list[str]] = []
        try:
            reader = csv.reader(io.StringIO(head, newline=""), delimiter=one)
            rows += filter(None, islice(reader, HEAD_ROWS))
            fits = True
        except csv.Error:
            fits = False
        if not rows or len(rows[0]) < 2:
            continue
        if len(raw) == HEAD_BYTES and len(rows) > 1:
            rows.pop()  # its end may be missing
        header = rows[0]
        fits = fits and all(len(row) == len(header) for row in rows)
        names = sum(
            name in OTHER_NAMES or suggest(name, OTHER_NAMES) is not None
            for name in header[:HEAD_COLUMNS]
        )
        rank = (fits, names, len(header))
        if rank > best:
            best, delimiter, width = rank, one, len(header)
    if width > MAX_COLUMNS:
        raise SchemaError(f"{path}: {TOO_WIDE}")
    return delimiter


def _encoding_hint(path: Path) -> str:
    """Returns how to convert a file that is not UTF-8; empty if its first block is."""
    with path.open("rb") as file:
        start = file.read(BLOCK_BYTES)
    if start.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        return f"; convert it: iconv -f utf-16 -t utf-8 {path.name}"
    try:
        getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return f"; convert it from its own encoding: iconv -f windows-1252 -t utf-8 {path.name}"
    return ""


def _infer(texts: pa.ChunkedArray, point: str) -> tuple[pa.ChunkedArray, str]:
    """Returns a column of text as numbers or booleans if all of its fields have that form.

    Args:
        texts: The column.
        point: Decimal point of the file; columns with "." are read in every file.

    Returns:
        The column, and a note if its numbers are no doubles or were rounded.
    """
    if texts.null_count == len(texts):
        return pa.chunked_array([pa.nulls(len(texts))]), ""

    def every(pattern: str) -> bool:
        return bool(pc.all(pc.match_substring_regex(texts, pattern)).as_py())

    if every(_INTEGER):
        return texts.cast(pa.int64()), ""
    if every(_LONG_INTEGER):
        for kind in (pa.int64(), pa.uint64()):
            try:
                return texts.cast(kind), ""
            except pa.ArrowInvalid:
                continue
    if point != "." and every(_NUMBER.replace(r"\.", point)):
        texts = pc.replace_substring(texts, point, ".")
    if every(_NUMBER) and pc.any(pc.match_substring_regex(texts, _FRACTION)).as_py():
        long = texts.filter(pc.match_substring_regex(texts, _MAYBE_WIDE)).to_pylist()
        wide = next((text for text in long if isinstance(_number(text), Decimal)), None)
        if wide is None:
            return texts.cast(pa.float64()), ""
        return _decimals([None if t is None else Decimal(t) for t in texts.to_pylist()], wide)
    if every("^(?i:true|false)$"):
        return texts.cast(pa.bool_()), ""
    return texts, ""


def _number(text: str) -> float | Decimal:
    """Returns the number of a text: a decimal if a double would round it beyond 2**53.

    A number with an exponent is a double.
    """
    short = float(text)
    if -MAX_WHOLE < short < MAX_WHOLE or "e" in text or "E" in text:
        return short
    exact = Decimal(text)
    return short if exact == Decimal(short) else exact


def _exact(value: float | Decimal) -> Decimal:
    """Returns a number as a decimal; a double beyond 2**53 is exact, another is its short text."""
    if isinstance(value, float) and abs(value) < MAX_WHOLE:
        return Decimal(repr(value))
    return Decimal(value)


def _decimals(values: Sequence[Decimal | None], wide: object) -> tuple[pa.ChunkedArray, str]:
    """Returns numbers as decimals, or as doubles if no decimal has so many digits; and a note.

    Args:
        values: The numbers.
        wide: A number that a double would round.
    """
    shown = str(wide) if len(str(wide)) <= 80 else f"{str(wide)[:40]}..."
    numbers = [value for value in values if value is not None]
    exponents = [value.as_tuple().exponent for value in numbers]
    if all(isinstance(exponent, int) for exponent in exponents):  # neither NaN nor infinity
        scale = max(0, *(-int(exponent) for exponent in exponents), 0)
        size = scale + max(value.adjusted() + 1 for value in numbers if value)
        if size <= MAX_DIGITS:
            kind = (pa.decimal128 if size <= 38 else pa.decimal256)(size, scale)
            return pa.chunked_array([pa.array(values, kind)]), f"exact: doubles would round {shown}"
    rounded = [None if value is None else float(value) for value in values]
    return pa.chunked_array([pa.array(rounded)]), f"doubles, which round {shown}"


class LineError(SchemaError):
    """A line is no JSON object, or has too many fields."""


def read_line_blocks(path: Path, at_once: bool) -> Iterator[Block]:
    """Yields the lines of a file with one JSON object per line.

    Args:
        path: The file.
        at_once: Whether there is one block.
    """
    with path.open("rb") as file:
        numbered, first = enumerate(file, 1), 0
        if at_once:
            yield Block(path, 0, lines=numbered)
            return
        while lines := list(islice(numbered, CHUNK_LINES)):
            yield Block(path, first, lines=lines)
            first += sum(bool(line.strip()) for _, line in lines)


def lines_content(path: Path, blocks: Iterable[Block], rename: Rename) -> Content:
    """Returns the rows of JSON lines, with the types of all their values.

    An absent field is null. Ids that are integers beyond 64 bits become their digits.

    Args:
        path: The file, or the folder of several.
        blocks: The lines.
        rename: Returns our names of the fields, None for those to leave out.

    Raises:
        LineError: If a line is not a JSON object, or there are too many columns.
        SchemaError: If a column mixes types, or an integer does not fit.
    """
    rows: list[dict[str, Any]] = []
    lines: list[int] = []
    wide: list[int] = []  # rows with long numbers
    broken: dict[str, dict[int, str]] = {}  # texts that are no Unicode, by column and row
    nested: set[tuple[str, str]] = set()  # column and name of nested fields
    misnamed: dict[int, str] = {}  # names that are no Unicode, by row
    names: dict[str, None] = {}
    runs: list[tuple[int, Path, int]] = []
    for block in blocks:
        runs.append((len(rows), block.path, block.first))
        for number, line in block.lines:
            if not line.strip():
                continue
            try:
                text, is_text = line.removeprefix(BOM_UTF8).decode(), b"\\u" not in line
            except UnicodeDecodeError:
                text, is_text = line.decode("utf-8", "surrogateescape"), False
            is_wide = _DIGITS.search(line) is not None
            row = _json_object(block.path, number, text, is_wide)
            if is_wide:
                wide.append(len(rows))
            if not is_text:
                for name in [one for one in row if not _is_text(one)]:
                    misnamed[len(rows)] = ascii(name)
                    del row[name]
                for name in [one for one, value in row.items() if not _is_text(value)]:
                    broken.setdefault(name, {})[len(rows)] = ascii(row.pop(name))
            names |= dict.fromkeys(row)
            for name, value in row.items():
                if isinstance(value, list | dict):
                    _add_nested(nested, name, value)
            if len(names) + len(nested) > MAX_COLUMNS:
                raise LineError(f"{block.path}: line {number}: {TOO_WIDE}, nested ones included")
            rows.append(row)
            lines.append(number)
    names |= dict.fromkeys(broken)
    places = Places(tuple(runs))
    try:
        own_names = dict(zip(names, rename(list(names)), strict=True))
    except ValueError as error:
        raise SchemaError(f"{path}: {error}") from None
    columns: dict[str, pa.ChunkedArray] = {}
    problems, notes = [], dict[str, str]()
    for name, own in own_names.items():
        if own is None:
            continue
        values = [row.get(name) for row in rows]
        try:
            columns[own], note = _column(values, wide, own in ID_COLUMNS)
            notes |= {own: note} if note else {}
        except RowsError as error:
            place = lambda row: (places.of(row)[0], lines[row])  # noqa: E731
            file, reason = explain(error, place, "line")
            problems.append(f"{file or path}: column {name}{reason}")
    if problems:
        raise SchemaError("\n".join(problems))
    unreadable: dict[str | None, dict[int, str]] = {None: misnamed} if misnamed else {}
    unreadable |= {own: broken[name] for name, own in own_names.items() if name in broken and own}

    def describe(texts: dict[int, str]) -> Report:
        hint = _encoding_hint(places.of(min(texts))[0])
        return {
            row: f"line {lines[row]}: no Unicode text: {text[:80]}{hint}"
            for row, text in texts.items()
        }.__getitem__

    found = [
        Unreadable(column, np.array(sorted(texts)), "no Unicode text", describe(texts))
        for column, texts in unreadable.items()
    ]
    return Content(pa.table(columns), tuple(found), notes, places)


def _json_object(path: Path, number: int, text: str, is_wide: bool) -> dict[str, Any]:
    """Returns the object of a line. Raises LineError with the line's number."""
    try:
        row = json.loads(text, parse_float=_number) if is_wide else json.loads(text)
    except json.JSONDecodeError as error:
        part = ascii(text[error.pos : error.pos + 30].rstrip())
        reason = f"not JSON from character {error.pos + 1} on: {part}{_encoding_hint(path)}"
    except RecursionError:
        reason = "not JSON that can be read: it is nested too deep"
    except ValueError:
        reason = "not JSON that can be read: a number has thousands of digits"
    else:
        if isinstance(row, dict):
            return row
        reason = f"expected one JSON object per line, got {type(row).__name__}"
    raise LineError(f"{path}: line {number}: {reason}")


def _add_nested(found: set[tuple[str, str]], column: str, value: Any) -> None:
    """Adds the names of all objects in a value."""
    if isinstance(value, dict):
        found.update((column, name) for name in value)
        value = list(value.values())
    for one in value:
        if isinstance(one, list | dict):
            _add_nested(found, column, one)


def _is_text(value: Any) -> bool:
    """Whether all texts of a JSON value are Unicode."""
    if isinstance(value, str):
        return not _SURROGATE.search(value)
    if isinstance(value, list):
        return all(map(_is_text, value))
    if isinstance(value, dict):
        return all(map(_is_text, value)) and all(map(_is_text, value.values()))
    return True


def _column(values: list[Any], wide: Sequence[int], is_id: bool) -> tuple[pa.ChunkedArray, str]:
    """Returns the values of a field as a column, and a note about its numbers.

    Args:
        values: The values by row.
        wide: Rows in which numbers may be long.
        is_id: Whether the values are ids.

    Raises:
        RowsError: If the values are of several types, or a number has no exact type.
    """
    try:
        array = pa.array(values)
    except (pa.ArrowException, TypeError, OverflowError):
        array = None
    lossy = [
        row
        for row in wide
        if array is None or isinstance(values[row], Decimal) or array[row].as_py() != values[row]
    ]
    if array is not None and not lossy:
        return pa.chunked_array([array]), ""
    kinds = {type(value) for value in values if value is not None}
    beyond = next((row for row in lossy if _is_beyond(values[row])), None)
    if lossy and kinds == {int}:
        if is_id:
            return pa.chunked_array([pa.array([None if v is None else str(v) for v in values])]), ""
        if all(value is None or value in UINT64 for value in values):
            return pa.chunked_array([pa.array(values, pa.uint64())]), ""
    elif lossy and kinds <= {int, float, Decimal}:
        return _decimals([None if v is None else _exact(v) for v in values], values[lossy[0]])
    if beyond is not None:
        shown = json.dumps(values[beyond], default=str)[:80]
        raise RowsError(lambda at: f", {at(beyond)}: an integer does not fit into 64 bits: {shown}")
    if array is not None or any(_has_decimal(values[row]) for row in lossy):
        row = lossy[0]
        shown = json.dumps(values[row], default=str)[:80]
        raise RowsError(lambda at: f", {at(row)}: doubles would round a number of {shown}")
    row = _first_misfit(values)
    before = pa.array(values[:row]).type
    shown = json.dumps(values[row], default=str)[:60]
    hint = "; a list or object holds no integer beyond 2**53 beside a fraction" if wide else ""
    raise RowsError(
        lambda at: (
            f" has values of several types: {at(row)} has {shown}, "
            f"and the lines before it are {before}{hint}"
        )
    )


def _first_misfit(values: list[Any]) -> int:
    """Returns the first row whose value does not fit those before it, by bisection."""
    low, high = 0, len(values)  # the first `low` values fit, the first `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        try:
            pa.array(values[:middle])
            low = middle
        except (pa.ArrowException, TypeError, OverflowError):
            high = middle
    return low


def _is_beyond(value: Any) -> bool:
    """Whether a JSON value is or has an integer beyond 64 bits."""
    if isinstance(value, int):
        return value not in INT64
    if isinstance(value, list | dict):
        return any(map(_is_beyond, value.values() if isinstance(value, dict) else value))
    return False


def _has_decimal(value: Any) -> bool:
    if isinstance(value, list | dict):
        return any(map(_has_decimal, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Decimal)
