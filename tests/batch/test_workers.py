"""Real models in worker processes: any number of them, and kills, give the same bytes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recserve.batch import processes
from recserve.batch.arrow import RowsRejected, slates
from recserve.batch.generate import ANSWERS, Defaults
from recserve.batch.job import Job, run
from recserve.batch.manifest import MANIFEST, SUCCESS
from recserve.batch.processes import LocalWorkers, WorkerFailed
from recserve.batch.recipe import SlateRecipe, from_json, to_json
from tests.support.paths import ROOT
from tests.support.recipe_here import here
from tests.support.tiny_bundle import NUM_ITEMS, shared_bundle

ITEMS = [f"item{n:06d}" for n in range(NUM_ITEMS)]


def files(folder):
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def write_users(path, count=90):
    """Users with all kinds of rows: equal and growing histories, filters, strategies, bad ones."""
    rows = {
        "user_id": [f"user{n}" for n in range(count)],
        "history": [ITEMS[n % 7 : n % 7 + 1 + n % 23] for n in range(count)],
        "strategy": [("beam", "speculative", "nezha", None)[n % 4] for n in range(count)],
        "k": pa.array([None if n % 3 else 1 + n % 9 for n in range(count)], pa.int32()),
        "exclude_seen": [None if n % 5 else False for n in range(count)],
        "filter": [
            None if n % 6 else json.dumps({"in": ["item_id", ITEMS[:50]]}) for n in range(count)
        ],
    }
    rows["strategy"][17] = "no such thing"
    pq.write_table(pa.table(rows), path, row_group_size=20)
    return path


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    store = f"lmdb:{tmp_path_factory.mktemp('store') / 'history'}"
    return SlateRecipe(
        str(shared_bundle()), Defaults(k=5, beam_width=10), store, "cpu", in_flight=8
    )


@pytest.fixture(scope="module")
def calm(recipe, tmp_path_factory):
    """Input and undisturbed output of a job in this process."""
    folder = tmp_path_factory.mktemp("calm")
    source = write_users(folder / "users.parquet")
    with here(recipe) as alone:
        report = run(Job(source, folder / "out", 12), alone)
    assert len(report.parts) == 8 and report.rows
    return source, folder / "out"


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_workers_write_the_bytes_of_this_process(count, recipe, calm, tmp_path):
    source, output = calm
    run(Job(source, tmp_path / "out", 12), LocalWorkers(recipe, count))
    assert files(tmp_path / "out") == files(output)


@pytest.mark.slow
def test_batches_of_arrow_have_the_rows_of_the_job(recipe, calm):
    """The function that Spark's mapInArrow calls, in a process of its own as Spark has it."""
    source, output = calm
    code = (
        "import sys\nimport pyarrow as pa\nimport pyarrow.parquet as pq\n"
        "from recserve.batch.arrow import slates\nfrom recserve.batch.recipe import from_json\n"
        "table = pq.read_table(sys.argv[1])\n"
        "function = slates(from_json(sys.argv[2]), on_error='drop')\n"
        "batches = function(iter(table.to_batches(max_chunksize=12)))\n"
        "pq.write_table(pa.Table.from_batches(batches), sys.argv[3])\n"
    )
    # Batches of 12 rows begin where the parts do only within one row group.
    whole = output.parent / "whole.parquet"
    pq.write_table(pq.read_table(source), whole)
    got = output.parent / "got.parquet"
    command = [sys.executable, "-c", code, str(whole), to_json(recipe), str(got)]
    subprocess.run(command, check=True, cwd=ROOT)
    parts = [pq.ParquetFile(path).read() for path in sorted(output.glob("part-*.parquet"))]
    table = pq.ParquetFile(got).read()
    assert table.schema.equals(ANSWERS) and table.num_rows > 300
    assert table.equals(pa.concat_tables(parts))


def test_a_bad_row_fails_a_batch_of_arrow_unless_dropped(recipe, tmp_path):
    # `slates` keeps its models and store open as long as this process lives.
    recipe = replace(recipe, store=f"lmdb:{tmp_path / 'history'}")
    batch = pa.RecordBatch.from_pydict({"user_id": ["a", None], "history": [ITEMS[:2], ITEMS[:2]]})
    with pytest.raises(RowsRejected, match="row 1: user_id: is null"):
        list(slates(recipe)(iter([batch])))
    (dropped,) = slates(recipe, on_error="drop")(iter([batch, batch.slice(0, 0)]))
    assert set(dropped.column(0).to_pylist()) == {"a"}
    with pytest.raises(ValueError, match="on_error"):
        slates(recipe, on_error="ignore")


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_the_job_and_says_how_to_continue(recipe, calm, tmp_path):
    """Later parts are computed by a process that has not computed the earlier ones."""
    source, output = calm
    job, workers = Job(source, tmp_path / "out", 12), LocalWorkers(recipe)

    def kill(progress):
        if progress.parts == 2:
            workers._workers[0].process.kill()

    with pytest.raises(WorkerFailed, match="signal 9; run the same command again"):
        run(job, workers, kill)
    assert not (job.output / SUCCESS).exists()
    with here(recipe) as alone:
        assert 2 <= run(job, alone).resumed < 8
    assert files(job.output) == files(output)


def test_a_worker_that_says_nothing_and_lives_fails_the_job(recipe, monkeypatch):
    mute = [sys.executable, "-c", "import os, time; os.dup2(2, 1); time.sleep(60)"]
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: popen(mute, **options))
    # On a busy machine no limit is long enough, even after a kill.
    monkeypatch.setattr(processes, "END_WAIT_S", 0.0)
    workers = LocalWorkers(recipe)
    with pytest.raises(WorkerFailed, match="says nothing any more.*run the same command again"):
        workers.open(lock=1)
    workers.close()


def test_a_worker_that_no_kill_ends_does_not_hold_up_the_end(recipe, monkeypatch):
    workers, mute = LocalWorkers(recipe), [sys.executable, "-c", "input()"]
    with subprocess.Popen(mute, stdin=subprocess.PIPE) as process:
        monkeypatch.setattr(process, "kill", lambda: None)  # as if the kernel held it
        monkeypatch.setattr(processes, "KILL_WAIT_S", 0.01)
        workers._workers.append(processes._Worker(process))
        closing = threading.Thread(target=workers.close, daemon=True)
        closing.start()
        closing.join(30)
        assert not closing.is_alive() and process.poll() is None


def test_the_job_records_what_determines_its_bytes(recipe, calm):
    facts = json.loads((calm[1] / "_job.json").read_text())
    assert {"input_sha256", "bundle_sha256", "catalog_version", "kernels", "device"} <= set(facts)
    assert (facts["k"], facts["in_flight"], facts["threads"]) == (5, 8, 1)
    assert from_json(to_json(recipe)) == recipe


@pytest.mark.slow
def test_a_signal_ends_the_command_and_the_same_command_continues(recipe, calm, tmp_path):
    source, output = calm
    arguments = {
        "--bundle": recipe.bundle,
        "--store": recipe.store,
        "--device": "cpu",
        "--input": source,
        "--output": tmp_path / "out",
        "--k": 5,
        "--beam-width": 10,
        "--in-flight": 8,
        "--rows-per-part": 12,
        "--progress": "json",
    }
    command = [sys.executable, "-m", "recserve", "batch"]
    command += [str(word) for pair in arguments.items() for word in pair]
    manifest = tmp_path / "out" / MANIFEST
    for number in (signal.SIGINT, signal.SIGTERM):
        before = manifest.read_bytes() if manifest.exists() else b""
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE
        )
        while not manifest.exists() or manifest.read_bytes() == before:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        told = process.communicate()[1].decode()
        if (tmp_path / "out" / SUCCESS).exists():  # the signal came after the end
            break
        assert process.returncode == 128 + number
        assert f"stopped by {signal.Signals(number).name}" in told
        assert "Run the same command again to continue" in told
        assert not list((tmp_path / "out").glob(".tmp-*"))
    with here(recipe) as alone:
        assert run(Job(source, tmp_path / "out", 12), alone).resumed >= 2
    assert files(tmp_path / "out") == files(output)


@pytest.mark.slow
def test_two_ray_actors_write_the_bytes_of_one_process(recipe, calm, tmp_path):
    pytest.importorskip("ray")
    from recserve.batch.ray_workers import RayWorkers

    source, output = calm
    seen = []
    run(Job(source, tmp_path / "out", 12), RayWorkers(recipe, 2), seen.append)
    assert seen[-1].done == 90
    assert files(tmp_path / "out") == files(output)
