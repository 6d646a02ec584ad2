"""Partitions of the input: their rows do not depend on how a file is stored."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recserve.batch import source as batch_source
from recserve.batch.source import partitions, read, scan
from recserve.features.tables.parquet import SchemaError


def rows_of(path, rows_per_part, group_rows, columns=("user_id",)):
    """The rows of each partition, as lists of groups."""
    found = []
    for partition in partitions(scan(path, rows_per_part), rows_per_part):
        groups = [table.column(0).to_pylist() for table in read(partition, group_rows, columns)]
        assert sum(map(len, groups)) == partition.rows
        assert all(len(group) == group_rows for group in groups[:-1])
        found.append(groups)
    return found


@pytest.mark.parametrize(
    ("row_group_size", "rows_per_part", "group_rows"),
    [(1, 5, 2), (3, 1, 1), (7, 100, 13), (7, 7, 64), (64, 5, 2), (1000, 7, 64), (1000, 1, 1)],
)
def test_partitions_have_the_same_rows_for_any_row_groups(
    tmp_path, row_group_size, rows_per_part, group_rows
):
    names = [f"u{i}" for i in range(63)]
    table = pa.table({"other": range(63), "user_id": names})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=row_group_size)
    found = rows_of(tmp_path / "in.parquet", rows_per_part, group_rows)
    whole = [sum(groups, []) for groups in found]
    starts = range(0, 63, rows_per_part)
    assert whole == [names[start : start + rows_per_part] for start in starts]


def test_only_the_row_groups_of_a_partition_are_read(tmp_path):
    table = pa.table({"user_id": [f"u{i}" for i in range(100)]})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=10)
    third = partitions(scan(tmp_path / "in.parquet", 25), 25)[2]
    with pq.ParquetFile(third.path) as file:
        assert batch_source._row_groups(file.metadata, third) == ([5, 6, 7], 0)
    second = partitions(scan(tmp_path / "in.parquet", 25), 25)[1]
    with pq.ParquetFile(second.path) as file:
        assert batch_source._row_groups(file.metadata, second) == ([2, 3, 4], 5)


@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("rows_per_part", [1, 2, 5, 9])
def test_lines_are_divided_by_their_bytes(tmp_path, rows_per_part, end):
    lines = [b"line %d" % n + b"x" * n for n in range(5)]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines) + end)
    found = rows_of(tmp_path / "in.jsonl", rows_per_part, 2)
    assert [line.rstrip(b"\n") for groups in found for group in groups for line in group] == lines


def test_a_line_that_is_too_long_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_source, "MAX_LINE_BYTES", 10)
    monkeypatch.setattr(batch_source, "READ_BYTES", 4)
    (tmp_path / "in.jsonl").write_bytes(b"a" * 99 + b"\nshort\n" + b"b" * 12 + b"\n\nend")
    (groups,) = rows_of(tmp_path / "in.jsonl", 10, 10)
    assert groups == [[b"a" * 11, b"short\n", b"b" * 11, b"\n", b"end"]]


def test_a_changed_file_has_another_hash(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"{}\n")
    (before,) = scan(path, 1)
    path.write_bytes(b"[]\n")
    (after,) = scan(path, 1)
    assert before.num_rows == after.num_rows == 1 and before.sha256 != after.sha256


@pytest.mark.parametrize(
    ("names", "words"),
    [([], "no .parquet or .jsonl"), (["a.parquet", "b.jsonl"], "expected one kind")],
)
def test_a_folder_has_files_of_one_kind(tmp_path, names, words):
    for name in names:
        (tmp_path / name).write_bytes(b"{}\n")
    with pytest.raises(SchemaError, match=words):
        scan(tmp_path, 10)


def test_a_repeated_column_is_refused(tmp_path):
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["user_id", "user_id"])
    pq.write_table(table, tmp_path / "in.parquet")
    with pytest.raises(SchemaError, match="user_id appears more than once"):
        scan(tmp_path / "in.parquet", 10)
