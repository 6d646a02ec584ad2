"""Kills a batch job at random points, resumes it each time, and compares the bytes at the end.

    python -m benchmarks.batch.kills [--points 50] [--seed 0]

The job recommends items with the tests' smallest models, one part per few users. Each run is a
process of its own. It gets SIGKILL a random time after a random number of parts, so that kills hit
computing, writing, renaming and the manifest. The last run is left alone. Its output must equal
that of a job that was never disturbed: every file, every byte.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from recserve.batch.generate import Defaults
from recserve.batch.job import Job, run
from recserve.batch.manifest import MANIFEST, SUCCESS
from recserve.batch.recipe import SlateRecipe
from tests.support.in_process import InProcess
from tests.support.tiny_bundle import tiny_bundle

USERS, ROWS_PER_PART, PARTS_PER_RUN, LATEST_S = 1200, 4, 2, 0.06
OPENED = 60.0


def start(job: Job, recipe: SlateRecipe) -> int:
    """Starts a process that runs the job, and returns its id."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        with recipe.open() as task:
            run(job, InProcess(task))
        status = 0
    finally:
        os._exit(status)


def finished(process: int) -> bool:
    """Waits for a process and returns whether it ended by itself and well."""
    return os.waitpid(process, 0)[1] == 0


def parts(output: Path) -> int:
    """Returns the number of complete lines of the manifest."""
    path = output / MANIFEST
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def files(folder: Path) -> dict[str, bytes]:
    """Returns the content of every file of a folder by name."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def kill_once(job: Job, recipe: SlateRecipe, draw: random.Random) -> bool:
    """Runs the job until a random point, and kills it there; False if it was faster."""
    target = parts(job.output) + draw.randrange(PARTS_PER_RUN + 1)
    process = start(job, recipe)
    deadline = time.monotonic() + OPENED
    while parts(job.output) < target and time.monotonic() < deadline:
        if (job.output / SUCCESS).exists():
            break
        time.sleep(0.0005)
    # With no part to wait for, the point lies anywhere in opening the models or in the first part.
    time.sleep(draw.uniform(0, LATEST_S if target else 1.0))
    os.kill(process, signal.SIGKILL)
    return not finished(process)


def main() -> None:
    """Runs the job undisturbed and disturbed, and compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="recserve-kills-") as name:
        folder = Path(name)
        histories = [
            [f"item{(7 * i + j) % 500:06d}" for j in range(1 + i % 9)] for i in range(USERS)
        ]
        bad = [None if i % 50 == 7 else f"user{i}" for i in range(USERS)]
        source = folder / "users.parquet"
        pq.write_table(pa.table({"user_id": bad, "history": histories}), source, row_group_size=64)
        bundle = tiny_bundle(folder / "tiny", ranker=False)
        store = f"lmdb:{folder / 'store'}"
        recipe = SlateRecipe(str(bundle), Defaults(k=3, beam_width=4), store, "cpu", in_flight=3)
        calm, shaken = (Job(source, folder / one, ROWS_PER_PART) for one in ("calm", "shaken"))
        if not finished(start(calm, recipe)):
            sys.exit("the undisturbed job failed")
        kills, left = 0, []
        while kills < options.points and kill_once(shaken, recipe, draw):
            kills += 1
            left.append(parts(shaken.output))
        if not finished(start(shaken, recipe)):
            sys.exit("the last run failed")
        expected, got = files(calm.output), files(shaken.output)
        wrong = sorted(n for n in expected.keys() | got.keys() if expected.get(n) != got.get(n))
        print(f"{kills} kills; parts after each: {left}; {len(got)} files, {len(wrong)} differ")
        if wrong or kills < options.points:
            sys.exit(f"FAILED: {wrong[:5] or 'the job ended before the last kill'}")


if __name__ == "__main__":
    main()
