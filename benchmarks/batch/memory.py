"""Does the memory of a batch job depend on the number of its rows?

    python -m benchmarks.batch.memory [--rows 100000,1000000] [--workers 1] [--json F]

Each size is one run of `recserve batch` over a drawn Parquet file of users with histories of 1 to
12 items. The model is the tests' smallest, beam 2, k 2. Memory is the sum of the resident sizes of
the command and its workers, looked at every 50 ms; pages that processes share count once for each.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.support.runs import machine, write_json
from recserve.batch.manifest import MANIFEST
from tests.support.tiny_bundle import NUM_ITEMS, tiny_bundle

CHUNK = 50_000
LONGEST = 12


@dataclass(frozen=True)
class Figures:
    """One run.

    Attributes:
        rows: Input rows.
        workers: Worker processes.
        seconds: Time of the whole command.
        rows_per_s: Rate after the models were loaded.
        peak_mib: Largest sum of resident sizes.
        peak_command_mib: Largest resident size of the command itself.
        parts: Output files.
    """

    rows: int
    workers: int
    seconds: float
    rows_per_s: float
    peak_mib: float
    peak_command_mib: float
    parts: int


def write_users(path: Path, rows: int) -> None:
    """Writes users with drawn histories, in row groups of CHUNK rows."""
    draw = np.random.default_rng(rows)
    names = np.array([f"item{item:06d}" for item in range(NUM_ITEMS)], dtype=object)
    schema = pa.schema([("user_id", pa.string()), ("history", pa.list_(pa.string()))])
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, rows, CHUNK):
            count = min(CHUNK, rows - first)
            offsets = np.concatenate([[0], draw.integers(1, LONGEST + 1, count).cumsum()])
            items = pa.array(names[draw.integers(0, NUM_ITEMS, offsets[-1])], pa.string())
            lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), items)
            users = pa.array([f"user{first + n}" for n in range(count)])
            writer.write_table(pa.table([users, lists], schema=schema))


def resident_mib(process: int) -> list[float]:
    """Returns the resident sizes of a process and of those that it started, itself first."""
    found = []
    try:
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                found.append(int(line.split()[1]) / 1024)
        for task in Path(f"/proc/{process}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += resident_mib(int(child))
    except (FileNotFoundError, ProcessLookupError):
        pass  # it has just ended
    return found


def run(bundle: Path, rows: int, workers: int, folder: Path) -> Figures:
    """Runs one job and watches its memory."""
    source, output = folder / f"{rows}.parquet", folder / f"out-{rows}"
    write_users(source, rows)
    command = [sys.executable, "-m", "recserve", "batch", "--bundle", bundle, "--input", source]
    command += ["--output", output, "-k", "2", "--beam-width", "2", "--workers", str(workers)]
    command += ["--in-flight", "256", "--progress", "json", "--store", f"lmdb:{folder / 'store'}"]
    log = folder / f"{rows}.log"
    began, peak, own = time.monotonic(), 0.0, 0.0
    with log.open("w") as lines:
        job = subprocess.Popen([str(word) for word in command], stderr=lines)
        while job.poll() is None:
            sizes = resident_mib(job.pid)
            if sizes:
                peak, own = max(peak, sum(sizes)), max(own, sizes[0])
            time.sleep(0.05)
    seconds = time.monotonic() - began
    if job.returncode:
        raise SystemExit(log.read_text())
    last = json.loads(log.read_text().splitlines()[-1])
    parts = len((output / MANIFEST).read_text().splitlines())
    return Figures(rows, workers, seconds, last["rows_per_s"], peak, own, parts)


def main() -> None:
    """Runs every size and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="100000,1000000", help="sizes, separated by commas")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    facts = machine()
    print(facts)
    print("      rows  workers  seconds   rows/s  peak MiB  command")
    found = []
    with tempfile.TemporaryDirectory(prefix="recserve-memory-") as name:
        bundle = tiny_bundle(Path(name) / "tiny", ranker=False)
        for rows in map(int, options.rows.split(",")):
            f = run(bundle, rows, options.workers, Path(name))
            found.append(asdict(f))
            print(
                f"{f.rows:>10,} {f.workers:>8} {f.seconds:>8.1f} {f.rows_per_s:>8,.0f} "
                f"{f.peak_mib:>9.0f} {f.peak_command_mib:>8.0f}",
                flush=True,
            )
    if options.json:
        write_json(options.json, {"machine": facts, "runs": found})


if __name__ == "__main__":
    main()
