"""Input files of each kind, and folders that hold the same rows in parts."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

KINDS = ("parquet", "csv", "jsonl")
FOLDERS = ("a=1", "a=2/b=x", "c", "")  # in the order of the files in them
SEPARATOR = "|"  # of lists in CSV


def part_names(draw: random.Random, count: int, suffix: str) -> list[str]:
    """Returns paths of parts in their order, in one folder or in drawn sub-folders."""
    folders = [""] * count
    if draw.random() < 0.5:
        folders = sorted((draw.choice(FOLDERS) for _ in range(count)), key=FOLDERS.index)
    return [f"{one}/part-{n}.{suffix}".lstrip("/") for n, one in enumerate(folders)]


def write_table(path: Path, table: pa.Table) -> None:
    """Writes a table in the kind that the suffix of the path names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
        return
    rows = table.to_pylist()
    if path.suffix == ".jsonl":
        lines = [json.dumps(row, default=str) for row in rows]
    else:
        joined = [
            [SEPARATOR.join(one) if isinstance(one, list) else one for one in row.values()]
            for row in rows
        ]
        lines = [",".join(table.column_names)]
        lines += [",".join("" if one is None else f'"{one}"' for one in row) for row in joined]
    path.write_text("".join(f"{line}\n" for line in lines))


def write_parts(folder: Path, kind: str, table: pa.Table, draw: random.Random) -> Path:
    """Writes a table as the parts of a folder, some of them without rows."""
    cuts = sorted(draw.randrange(len(table) + 1) for _ in range(draw.choice([0, 1, 4])))
    names = part_names(draw, len(cuts) + 1, kind)
    for name, first, end in zip(names, [0, *cuts], [*cuts, len(table)], strict=True):
        write_table(folder / name, table.slice(first, end - first))
    (folder / "_SUCCESS").touch()
    return folder
