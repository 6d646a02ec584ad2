"""Reads CSV files and files of JSON lines as Arrow tables, without changing what they say.

Text stays text unless a whole column has one other form, so an id such as `0056` keeps its zeros.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF16_BE, BOM_UTF16_LE, getincrementaldecoder
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pc_csv

from recserve.features.tables.parquet import SchemaError

# Delimiters of each suffix; the first one that the header has is taken.
DELIMITERS = {".csv": (",", ";", "\t"), ".tsv": ("\t",)}
LINE_SUFFIXES = (".jsonl", ".ndjson", ".json")
BLOCK_BYTES = 16 << 20  # a row of CSV must be shorter
# Columns of CSV whose text is never read as numbers here.
TEXT_COLUMNS = ("user_id", "item_id", "title", "categories", "timestamp", "type")
ID_COLUMNS = ("user_id", "item_id")
INT64 = range(-(2**63), 2**63)
# A number with leading zeros is a code, not a number. 18 digits always fit into int64.
_INTEGER = r"^-?(0|[1-9][0-9]{0,17})$"
_NUMBER = r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?$"
_FRACTION = r"[.eE]"


def read_csv(path: Path) -> pa.Table:
    """Reads a CSV file with a header. An empty field is null.

    Spreadsheets write semicolons where a comma is the decimal point.

    A column is int64, double or bool if all its fields are; the other columns and TEXT_COLUMNS are
    text.

    Raises:
        SchemaError: If the file is not CSV in UTF-8.
    """
    delimiter = _delimiter(path)
    parse = pc_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    blocks = pc_csv.ReadOptions(block_size=BLOCK_BYTES)
    try:
        with pc_csv.open_csv(path, blocks, parse) as reader:
            names = reader.schema.names
        texts = pc_csv.ConvertOptions(
            column_types={name: pa.string() for name in names},
            strings_can_be_null=True,
            null_values=[""],
        )
        table = pc_csv.read_csv(path, blocks, parse, texts)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise SchemaError(
            f"{path}: not a readable CSV file in UTF-8 ({error}){_encoding_hint(path)}"
        ) from error
    columns = [
        values if name in TEXT_COLUMNS else _infer(values, "," if delimiter == ";" else ".")
        for name, values in zip(table.column_names, table.columns, strict=True)
    ]
    return pa.Table.from_arrays(columns, names=table.column_names)


def _delimiter(path: Path) -> str:
    with path.open("rb") as file:
        header = file.readline(BLOCK_BYTES)
    known = DELIMITERS[path.suffix.lower()]
    return next((one for one in known if one.encode() in header), known[0])


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


def _infer(texts: pa.ChunkedArray, point: str) -> pa.ChunkedArray:
    """Returns a column of text as numbers or booleans if all of its fields have that form.

    Args:
        texts: The column.
        point: Decimal point of the file; columns with "." are read in every file.
    """
    if texts.null_count == len(texts):
        return pa.chunked_array([pa.nulls(len(texts))])

    def every(pattern: str) -> bool:
        return bool(pc.all(pc.match_substring_regex(texts, pattern)).as_py())

    if every(_INTEGER):
        return texts.cast(pa.int64())
    if point != "." and every(_NUMBER.replace(r"\.", point)):
        texts = pc.replace_substring(texts, point, ".")
    if every(_NUMBER) and pc.any(pc.match_substring_regex(texts, _FRACTION)).as_py():
        return texts.cast(pa.float64())
    if every("^(?i:true|false)$"):
        return texts.cast(pa.bool_())
    return texts


def _is_wide(value: Any) -> bool:
    """Whether a JSON value is or has an integer beyond 64 bits."""
    if isinstance(value, int):
        return value not in INT64
    if isinstance(value, list | dict):
        return any(map(_is_wide, value.values() if isinstance(value, dict) else value))
    return False


def read_lines(path: Path) -> pa.Table:
    """Reads a file with one JSON object per line. An absent field is null.

    Ids that are integers beyond 64 bits become their digits.

    Raises:
        SchemaError: If a line is not a JSON object, a column mixes types, or another integer does
            not fit into 64 bits.
    """
    rows: list[dict[str, Any]] = []
    lines: list[int] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)  # skips a byte order mark
            except (ValueError, RecursionError) as error:
                raise SchemaError(f"{path}: line {number}: not JSON ({error})") from error
            if not isinstance(row, dict):
                raise SchemaError(
                    f"{path}: line {number}: expected one JSON object per line, "
                    f"got {type(row).__name__}"
                )
            rows.append(row)
            lines.append(number)
    columns, problems = {}, []
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowException, TypeError, OverflowError) as error:
            wide = next((n for n, value in enumerate(values) if _is_wide(value)), None)
            is_id = name in ID_COLUMNS
            if is_id and wide is not None and all(type(v) is int for v in values if v is not None):
                columns[name] = pa.array([None if v is None else str(v) for v in values])
            elif is_id or wide is None:
                problems.append(f"{path}: column {name} has values of several types ({error})")
            else:
                problems.append(
                    f"{path}: column {name}, line {lines[wide]}: an integer does not fit into "
                    f"64 bits: {json.dumps(values[wide])[:80]}"
                )
    if problems:
        raise SchemaError("\n".join(problems))
    return pa.table(columns)
