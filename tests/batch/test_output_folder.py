"""The output folder of a job: what it may replace, and what a loss of power leaves of it."""

import hashlib
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recserve.batch.manifest import MANIFEST, SUCCESS, OutputExists, OutputFolder
from recserve.batch.part import ERRORS_FOLDER, TEMPORARY, Generated, JobPart, write_part
from recserve.batch.source import LINE, Partition


def partition(number: int) -> Partition:
    return Partition(number, "/in.parquet", "in.parquet", 2 * number, 2)


def finished(folder, number: int, content: bytes = b"four") -> JobPart:
    name = f"{partition(number).name}.parquet"
    (folder / name).write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    return JobPart(name, "in.parquet", 2 * number, 2, 2, 0, len(content), digest)


def test_a_folder_with_other_files_is_refused_and_left(tmp_path):
    (tmp_path / "letter.txt").write_text("x")
    for overwrite in (False, True):
        with pytest.raises(OutputExists, match="is not empty"):
            OutputFolder(tmp_path, overwrite)
    (tmp_path / f"{TEMPORARY}1").write_text("x")
    with pytest.raises(OutputExists, match="is not empty"):
        OutputFolder(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{TEMPORARY}1", "letter.txt"]


def test_a_folder_that_only_holds_unfinished_files_is_used(tmp_path):
    (tmp_path / f"{TEMPORARY}1").write_text("x")
    with OutputFolder(tmp_path):
        assert list(tmp_path.iterdir()) == []


def test_the_manifest_is_in_the_order_of_the_input(tmp_path):
    with OutputFolder(tmp_path) as output:
        output.claim({"format": 1, "k": 1})
        for number in (2, 0, 1):
            output.add(finished(tmp_path, number))
        parts = output.finish([partition(number) for number in range(3)], ".parquet")
    assert [part.first_row for part in parts] == [0, 2, 4]
    with OutputFolder(tmp_path) as output:
        assert list(output.check_parts()) == parts and output.whole


def test_every_line_of_the_manifest_is_synced_before_the_next_part(tmp_path, monkeypatch):
    synced: dict[int, bytes] = {}
    real = os.fsync

    def noting(handle: int) -> None:
        real(handle)
        number = os.fstat(handle).st_ino
        for path in tmp_path.iterdir():
            if path.stat().st_ino == number:
                synced[number] = path.read_bytes()

    with OutputFolder(tmp_path) as output:
        output.claim({"format": 1, "k": 1})
        monkeypatch.setattr(os, "fsync", noting)
        for number in range(3):
            output.add(finished(tmp_path, number))
            manifest = tmp_path / MANIFEST
            assert synced[manifest.stat().st_ino] == manifest.read_bytes()
            assert manifest.read_bytes().count(b"\n") == number + 1
        output.finish([partition(number) for number in range(3)], ".parquet")
        assert synced[(tmp_path / SUCCESS).stat().st_ino] == b""


class Shout:
    """A task whose output are lines, and that rejects users of one name."""

    columns, group_rows, suffix, facts = ("user_id",), 2, ".jsonl", {}

    def begin_part(self) -> None:
        pass

    def __call__(self, users: pa.Table, first_row: int) -> Generated:
        names = users.column("user_id").to_pylist()
        good = [f"{first_row} {name}".encode() for name in names if name != "bad"]
        bad = [b"bad"] * names.count("bad")
        tables = [pa.table({LINE: pa.array(lines, pa.binary())}) for lines in (good, bad)]
        return Generated(*tables)


def test_a_part_of_lines_is_complete_or_not_there(tmp_path):
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"user_id": ["a", "b", "bad", "c", "d"]}), source)
    task, out = Shout(), tmp_path / "out"
    out.mkdir()
    whole = Partition(0, str(source), "in.parquet", 0, 5)
    steps = write_part(task, whole, out)
    assert [next(steps).rows for _ in range(3)] == [2, 2, 1]
    name = f"{whole.name}.jsonl"
    assert not (out / name).exists(), "not before its last row"
    part = next(steps)
    content = b"0 a\n0 b\n2 c\n4 d\n"
    assert (out / name).read_bytes() == content
    assert (part.rows, part.errors, part.bytes) == (4, 1, len(content))
    assert part.sha256 == hashlib.sha256(content).hexdigest()
    assert (out / ERRORS_FOLDER / name).read_bytes() == b"bad\n"
    assert next(steps, None) is None
    assert not list(out.rglob(f"{TEMPORARY}*"))


def test_a_part_that_is_not_finished_leaves_nothing(tmp_path):
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"user_id": ["a", "b", "c"]}), source)
    out = tmp_path / "out"
    out.mkdir()
    steps = write_part(Shout(), Partition(0, str(source), "in.parquet", 0, 3), out)
    next(steps)
    steps.close()
    assert [path for path in out.rglob("*") if path.is_file()] == []


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "out").write_text("x")
    with pytest.raises(OutputExists, match="is not empty"):
        OutputFolder(tmp_path / "out")
