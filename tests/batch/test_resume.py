"""Jobs that are interrupted: what stays, what the next run computes, and that all bytes agree."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recserve.batch.job import Job, TooManyErrors, run
from recserve.batch.manifest import JOB, MANIFEST, SUCCESS, OutputExists, OutputFolder
from tests.support.paths import ROOT
from tests.support.stand_in_slates import runner


def users(path, count, bad_every=0):
    names = [f"{'bad' if bad_every and i % bad_every == 1 else 'u'}{i}" for i in range(count)]
    pq.write_table(pa.table({"user_id": names}), path)
    return path


def files(folder):
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def undisturbed(source, folder, rows_per_part):
    run(Job(source, folder, rows_per_part), runner())
    return files(folder)


@pytest.mark.parametrize("stop_after", [0, 1, 3, 7, 10, 19])
def test_the_next_run_computes_only_what_is_missing(tmp_path, stop_after):
    source = users(tmp_path / "in.parquet", 20, bad_every=6)
    expected = undisturbed(source, tmp_path / "calm", 3)
    job = Job(source, tmp_path / "out", 3)
    with pytest.raises(RuntimeError, match="device lost"):
        run(job, runner(stop_after))
    assert not (job.output / SUCCESS).exists()
    done = (job.output / MANIFEST).read_text().count("\n") if stop_after >= 3 else 0
    seen = []
    report = run(job, runner(), seen.append)
    assert report.resumed == done and report.users == 20
    assert seen[-1].done == 20 and seen[-1].errors == report.errors == 4
    assert files(job.output) == expected


@pytest.mark.parametrize("most", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_every_moment_of_a_kill_leaves_a_folder_that_resumes(tmp_path, most):
    """SIGKILL in a process of its own, at drawn moments; the models are a stand-in."""
    source = users(tmp_path / "in.parquet", 120, bad_every=10)
    expected = undisturbed(source, tmp_path / "calm", 2)
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from recserve.batch.job import Job, run\n"
        "from tests.support.stand_in_slates import runner\n"
        "run(Job(Path(sys.argv[1]), Path(sys.argv[2]), 2), runner(pause_s=0.002))\n"
    )
    output, draw, kills = tmp_path / "out", random.Random(5), 0
    command = [sys.executable, "-c", code, str(source), str(output)]
    while kills < most:
        manifest = output / MANIFEST
        before = manifest.read_bytes().count(b"\n") if manifest.exists() else 0
        process = subprocess.Popen(command, cwd=ROOT)
        while not manifest.exists() or manifest.read_bytes().count(b"\n") == before:
            assert process.poll() is None, "the job ended before the last kill"
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.01))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        kills += 1
    subprocess.run(command, cwd=ROOT, check=True)
    assert files(output) == expected


def test_a_manifest_that_was_cut_short_is_repaired(tmp_path):
    source = users(tmp_path / "in.parquet", 9)
    expected = undisturbed(source, tmp_path / "calm", 2)
    job = Job(source, tmp_path / "out", 2)
    with pytest.raises(RuntimeError):
        run(job, runner(5))
    with (job.output / MANIFEST).open("a") as file:
        file.write('{"part": "part-0000')
    (job.output / ".tmp-left-behind").write_text("x")
    assert run(job, runner()).resumed == 2
    assert files(job.output) == expected


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda whole: None, "there is no such file"),
        (lambda whole: whole[:-1], "bytes; the manifest says"),
        (lambda whole: whole[:100] + bytes([whole[100] ^ 1]) + whole[101:], "its sha256 is"),
    ],
    ids=["missing", "shorter", "one bit"],
)
@pytest.mark.parametrize("whole", [True, False])
def test_a_part_that_is_damaged_is_computed_again(tmp_path, caplog, damage, words, whole):
    source = users(tmp_path / "in.parquet", 9)
    expected = undisturbed(source, tmp_path / "out", 2)
    path = tmp_path / "out" / "part-00002.parquet"
    content = damage(path.read_bytes())
    path.unlink() if content is None else path.write_bytes(content)
    if not whole:
        (tmp_path / "out" / SUCCESS).unlink()
    seen = []
    assert run(Job(source, tmp_path / "out", 2), runner(), seen.append).resumed == 4
    assert files(tmp_path / "out") == expected
    assert f"part-00002.parquet is computed again: {words}" in caplog.text.replace(
        f"it has {path.stat().st_size - 1} ", ""
    )
    # The four whole parts are compared first, which the progress shows.
    assert [progress.done for progress in seen] == [2, 4, 6, 7, 9]


PART = {"part": "part-00000.parquet", "input": "in.parquet", "first_row": 0, "users": 2}
PART |= {"rows": 4, "errors": 0, "bytes": 9, "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "Input data was truncated"),
        ("7", "Expected `object`, got `int`"),
        ('{"of": ' + "[" * 100_000, "recursion depth"),
        ('{"part": "\udcff"}', "'utf-8' codec can't decode byte 0xff"),
        (json.dumps({"part": "part-00000.parquet"}), "missing required field `input`"),
        (json.dumps(PART | {"part": "../in.parquet"}), r"matching regex .* `\$.part`"),
        (json.dumps(PART | {"part": "part-00000.parquet\n"}), r"matching regex .* `\$.part`"),
        (json.dumps(PART | {"bytes": -1}), r"Expected `int` >= 0 .* `\$.bytes`"),
        (json.dumps(PART | {"users": 10**400}), r"Expected `int` <= .* `\$.users`"),
        (json.dumps(PART | {"sha256": "no"}), r"matching regex .* `\$.sha256`"),
    ],
)
def test_a_hostile_manifest_is_refused_with_file_and_line(tmp_path, line, words):
    source = users(tmp_path / "in.parquet", 9)
    expected = undisturbed(source, tmp_path / "out", 2)
    manifest = tmp_path / "out" / MANIFEST
    first, *rest = manifest.read_bytes().splitlines(keepends=True)
    manifest.write_bytes(first + line.encode("utf-8", "surrogateescape") + b"\n" + b"".join(rest))
    before = files(tmp_path / "out")
    with pytest.raises(OutputExists, match=rf"{MANIFEST}, line 2: .*({words})"):
        run(Job(source, tmp_path / "out", 2), runner())
    assert files(tmp_path / "out") == before
    run(Job(source, tmp_path / "out", 2, overwrite=True), runner())
    assert files(tmp_path / "out") == expected


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "\x00"])
def test_a_hostile_description_of_the_job_is_refused_with_its_file(tmp_path, text):
    source = users(tmp_path / "in.parquet", 9)
    expected = undisturbed(source, tmp_path / "out", 2)
    (tmp_path / "out" / JOB).write_text(text)
    with pytest.raises(OutputExists, match=rf"{JOB}: "):
        run(Job(source, tmp_path / "out", 2), runner())
    run(Job(source, tmp_path / "out", 2, overwrite=True), runner())
    assert files(tmp_path / "out") == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": 3}, "k was 2 and is 3"),
        ({"in_flight": 4}, "in_flight was 2 and is 4"),
        ({"rows_per_part": 5}, "rows_per_part was 2 and is 5"),
        ({"users": 8}, "input_sha256"),
    ],
)
def test_another_job_in_the_folder_is_refused(tmp_path, change, words):
    source = users(tmp_path / "in.parquet", 9)
    with pytest.raises(RuntimeError):
        run(Job(source, tmp_path / "out", 2), runner(5))
    before = files(tmp_path / "out")
    users(source, change.get("users", 9))
    job = Job(source, tmp_path / "out", change.get("rows_per_part", 2))
    other = runner(k=change.get("k", 2), in_flight=change.get("in_flight", 2))
    with pytest.raises(OutputExists, match=words):
        run(job, other)
    assert files(tmp_path / "out") == before
    run(Job(source, tmp_path / "out", job.rows_per_part, overwrite=True), other)
    assert (tmp_path / "out" / SUCCESS).exists()


FOREIGN = ["notes.txt", "part-00000.csv", "part-1.parquet", "part-00001.parquet.old"]
FOREIGN += ["_errors/notes.txt", "part-00009.parquet/of-a-table.parquet", ".hidden"]


def test_overwriting_leaves_files_that_no_job_wrote(tmp_path, caplog):
    """An older output of 21 parts with errors is replaced by one of 5 without."""
    source = users(tmp_path / "in.parquet", 9)
    expected = undisturbed(source, tmp_path / "calm", 2)
    users(source, 42, bad_every=6)
    out, away = tmp_path / "out", tmp_path / "away"
    undisturbed(source, out, 2)
    (out / ".tmp-part-00003.parquet").write_text("left by a killed job")
    (out / "part-00009.parquet").unlink()
    for name in FOREIGN:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(name)
    away.mkdir()
    (away / "part-00000.parquet").write_text("of somebody else")
    (out / "linked").symlink_to(away)
    users(source, 9)
    run(Job(source, out, 2, overwrite=True), runner())
    found = files(out)
    assert {name: found.pop(name).decode() for name in FOREIGN} == {n: n for n in FOREIGN}
    assert found == expected
    assert (out / "linked").is_symlink()
    assert (away / "part-00000.parquet").read_text() == "of somebody else"
    assert "keeps files that no job wrote: .hidden, _errors, linked, notes.txt" in caplog.text


def test_overwriting_does_not_follow_a_link_to_other_errors(tmp_path):
    source = users(tmp_path / "in.parquet", 9)
    undisturbed(source, tmp_path / "out", 2)
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "part-00000.parquet").write_text("of somebody else")
    (tmp_path / "out" / "_errors").symlink_to(tmp_path / "away")
    run(Job(source, tmp_path / "out", 2, overwrite=True), runner())
    assert (tmp_path / "away" / "part-00000.parquet").read_text() == "of somebody else"


@pytest.mark.parametrize("stop", range(8))
def test_a_kill_while_old_output_is_removed_leaves_a_folder_that_resumes(
    tmp_path, monkeypatch, stop
):
    """The removal of 5 parts, errors and description ends after each of its steps."""
    source = users(tmp_path / "in.parquet", 9, bad_every=6)
    out, steps = tmp_path / "out", []
    undisturbed(source, out, 2)
    (out / "notes.txt").write_text("mine")
    users(source, 8, bad_every=6)
    expected = {**undisturbed(source, tmp_path / "calm", 2), "notes.txt": b"mine"}

    def killed_at(function):
        def step(*given, **options):
            steps.append(function)
            if len(steps) > stop:
                raise KeyboardInterrupt
            return function(*given, **options)

        return step

    job = Job(source, out, 2, overwrite=True)
    with monkeypatch.context() as patch:
        for name in ("unlink", "rmdir", "write_text"):
            patch.setattr(type(out), name, killed_at(getattr(type(out), name)))
        with pytest.raises(KeyboardInterrupt):
            run(job, runner())
    run(job, runner())
    assert files(out) == expected


def test_two_jobs_cannot_write_into_one_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("recserve.batch.manifest.LOCK_WAIT_S", 0.0)
    with (
        OutputFolder(tmp_path / "out"),
        pytest.raises(OutputExists, match="another job is writing"),
    ):
        OutputFolder(tmp_path / "out")
    with OutputFolder(tmp_path / "out") as folder:
        assert not folder.whole


def test_too_many_rejected_rows_end_the_job_and_a_higher_limit_continues(tmp_path):
    """1,200 rows, every third bad: stopped at the first group after 1,000 rows."""
    source = users(tmp_path / "in.parquet", 1200, bad_every=3)
    expected = undisturbed_with(source, tmp_path / "calm")
    seen = []
    job = Job(source, tmp_path / "out", 500, max_error_rate=0.2)
    with pytest.raises(
        TooManyErrors, match=r"of 1000 rows were rejected.*row 1: strategy"
    ) as error:
        run(job, runner(in_flight=50), seen.append)
    assert "--max-error-rate" in str(error.value)
    assert seen[-1].done == 1000
    assert (tmp_path / "out" / MANIFEST).read_text().count("\n") == 1
    with pytest.raises(TooManyErrors):
        run(job, runner(in_flight=50))
    report = run(Job(source, tmp_path / "out", 500, max_error_rate=0.5), runner(in_flight=50))
    assert report.errors == 400
    assert files(tmp_path / "out") == expected


def undisturbed_with(source, folder):
    run(Job(source, folder, 500, max_error_rate=1.0), runner(in_flight=50))
    return files(folder)


def test_few_rejected_rows_do_not_end_a_small_job(tmp_path):
    source = users(tmp_path / "in.parquet", 6, bad_every=2)
    assert run(Job(source, tmp_path / "out", max_error_rate=0.0), runner()).errors == 3


def test_a_folder_is_one_job_whose_parts_stay_within_files(tmp_path):
    """Files in the order of their names; hidden ones and those that begin with _ are left out."""
    (tmp_path / "in" / "b").mkdir(parents=True)
    users(tmp_path / "in" / "b" / "x.parquet", 3)
    users(tmp_path / "in" / "a.parquet", 5, bad_every=2)
    users(tmp_path / "in" / "_old.parquet", 7)
    report = run(Job(tmp_path / "in", tmp_path / "out", 2), runner())
    assert [(part.part[5:10], part.input, part.first_row, part.users) for part in report.parts] == [
        ("00000", "a.parquet", 0, 2),
        ("00001", "a.parquet", 2, 2),
        ("00002", "a.parquet", 4, 1),
        ("00003", "b/x.parquet", 0, 2),
        ("00004", "b/x.parquet", 2, 1),
    ]
    lines = (tmp_path / "out" / MANIFEST).read_text().splitlines()
    assert [json.loads(line)["errors"] for line in lines] == [1, 1, 0, 0, 0]
    errors = pq.read_table(tmp_path / "out" / "_errors" / "part-00001.parquet").to_pylist()
    assert [(error["row"], error["user_id"]) for error in errors] == [(3, "bad3")]


def test_a_disk_that_refuses_writes_ends_the_job_and_leaves_it_resumable(tmp_path, monkeypatch):
    source = users(tmp_path / "in.parquet", 9)
    expected = undisturbed(source, tmp_path / "calm", 2)
    real, calls = os.fsync, []

    def full(handle):
        calls.append(handle)
        if len(calls) == 9:
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    job = Job(source, tmp_path / "out", 2)
    with pytest.raises(OSError, match="No space"):
        run(job, runner())
    monkeypatch.setattr(os, "fsync", real)
    run(job, runner())
    assert files(tmp_path / "out") == expected


@pytest.mark.parametrize("rate", [-0.1, 1.5])
def test_the_error_rate_is_a_share(tmp_path, rate):
    with pytest.raises(ValueError, match="expected 0 to 1"):
        Job(tmp_path, tmp_path, max_error_rate=rate)
