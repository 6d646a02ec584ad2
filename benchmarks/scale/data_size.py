"""Peak memory and processor time of build, training and evaluation by the number of events.

    python -m benchmarks.scale.data_size --events 1_000_000 --json 1m.json

Writes synthetic events in Parquet parts, one part after another: items by Zipf's law, users
unequally active, times ascending as in a log. Then each command runs in a process of its own. A
command whose memory passes `--limit-gib` is stopped, and the table says so. Training takes a fixed
number of steps, and an epoch is as many steps as the table says. Stage `resume` trains the
recommender, kills the process (SIGKILL) in the middle of an epoch and resumes in another one. The
two peaks are that of the process (`ru_maxrss`), which counts mapped files too, and that of its own
memory without files (`RssAnon`, sampled).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.support.runs import machine, write_json

PART_ROWS = 1 << 20
EXPONENT = 1.0  # of Zipf's law for items
USER_EXPONENT = 0.5
START_US = 1_700_000_000_000_000
GIB = 1 << 30
POLL_S = 0.05
STEP = "step"
STAGES = ("build", "recommender", "resume", "ranker", "evaluate")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the synthetic data."""

    events: int
    users: int
    items: int


@dataclass(frozen=True)
class Cost:
    """What a command took.

    Attributes:
        stage: Name of the command.
        peak_bytes: Largest resident set, mapped files included.
        own_bytes: Largest sampled resident set without files.
        cpu_s: Seconds of the processor, in user and system mode.
        end: `done`, `killed` at a step, `stopped` at the limit of memory, or `failed`.
        note: What the command says of its work.
    """

    stage: str
    peak_bytes: int
    own_bytes: int
    cpu_s: float
    end: str
    note: str = ""


def write_items(path: Path, num_items: int, rng: np.random.Generator) -> None:
    """Writes items with titles of a few words."""
    words = np.array([f"word{n}" for n in range(2000)])
    drawn = words[(2000 * rng.random((num_items, 4)) ** 2).astype(np.int64)]
    titles = [" ".join(row) for row in drawn.tolist()]
    ids = [f"i{n}" for n in range(num_items)]
    pq.write_table(pa.table({"item_id": ids, "title": titles}), path)


def write_parts(folder: Path, sizes: Sizes, rng: np.random.Generator) -> list[Path]:
    """Writes the events, one part after another, and returns the parts."""
    folder.mkdir(parents=True)
    items = np.cumsum(1.0 / np.arange(1, sizes.items + 1) ** EXPONENT)
    users = np.cumsum(1.0 / np.arange(1, sizes.users + 1) ** USER_EXPONENT)
    kinds = pa.array(["click", "purchase"])
    paths = []
    for first in range(0, sizes.events, PART_ROWS):
        rows = min(PART_ROWS, sizes.events - first)
        user = np.searchsorted(users, rng.random(rows) * users[-1]).clip(max=sizes.users - 1)
        # A user's items are near each other in half of the events, so that there is something
        # to learn.
        item = np.searchsorted(items, rng.random(rows) * items[-1]).clip(max=sizes.items - 1)
        near = (user * 7919 + rng.integers(0, 50, rows)) % sizes.items
        item = np.where(rng.random(rows) < 0.5, near, item)
        table = pa.table(
            {
                "user_id": pa.array(np.char.add("u", user.astype(str))),
                "item_id": pa.array(np.char.add("i", item.astype(str))),
                "timestamp": pa.array(
                    START_US + 250_000 * np.arange(first, first + rows), pa.timestamp("us")
                ),
                "type": kinds.take(pa.array((rng.random(rows) < 0.1).astype(np.int8))),
            }
        )
        paths.append(folder / f"part-{first // PART_ROWS:05}.parquet")
        pq.write_table(table, paths[-1], compression="zstd")
    return paths


def run_stage(stage: str, folder: Path, steps: int, users: int) -> None:
    """Runs one command in this process. `resume` resumes a training, if there is one."""
    # Imported here: the process that watches needs none of it.
    from recserve.bundle.building import BuildOptions, build_bundle
    from recserve.bundle.bundle import Bundle
    from recserve.evaluation.evaluation import EvaluationOptions, evaluate_bundle
    from recserve.training import loop
    from recserve.training.options import TrainOptions
    from recserve.training.ranker import ranker
    from recserve.training.recommender import recommender

    out = folder / "bundle"
    if stage == "build":
        parts = tuple(sorted((folder / "events").iterdir()))
        events = parts[0] if len(parts) == 1 else parts
        build_bundle(BuildOptions(folder / "items.parquet", events, out), log=lambda _: None)
        return
    if stage == "evaluate":
        options = EvaluationOptions(strategy="dense_head", users=users)
        print(f"{evaluate_bundle(Bundle.open(out), options).users} users")
        return
    module: Any = ranker if stage == "ranker" else recommender
    recipe: Any = (
        replace(ranker.RankerRecipe(), validation_users=users)
        if stage == "ranker"
        else replace(recommender.ITEMS, validation_users=users, choice_users=users)
    )
    name = "RankerTrainee" if stage == "ranker" else "RecommenderTrainee"
    whole = getattr(module, name)

    def plan(self: Any, epoch: int) -> Any:
        batches = whole.plan(self, epoch)
        print(f"{min(steps, len(batches))} of {len(batches)} steps of an epoch", flush=True)
        return list(enumerate(batches[:steps], 1))

    def loss(self: Any, batch: Any) -> Any:
        if stage == "resume":
            print(f"{STEP} {batch[0]}", flush=True)
        return whole.loss(self, batch[1])

    setattr(module, name, type(name, (whole,), {"plan": plan, "loss": loss}))
    if stage == "resume":
        loop.SAVE_EVERY_S = 0.0
    train: Any = ranker.train_ranker if stage == "ranker" else recommender.train_recommender
    train(Bundle.open(out), TrainOptions(epochs=1, device="cpu", resume=stage == "resume"), recipe)


def watch(command: list[str], stage: str, limit_bytes: int, last_step: int = 0) -> Cost:
    """Runs a command, ends it beyond the limit of memory, and returns what it took.

    Args:
        command: The command.
        stage: Its name.
        limit_bytes: The limit.
        last_step: Step of training at whose begin the command is killed; 0 for none.
    """
    own, end = 0, "done"
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.DEVNULL)
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            for line in _status(process.pid):
                name, _, value = line.partition(":")
                if name == "RssAnon":
                    own = max(own, int(value.split()[0]) << 10)
                    if own > limit_bytes and end == "done":
                        end = "stopped"
                        process.kill()
            # The command writes at the file's offset, which a seek would move.
            reached = f"{STEP} {last_step}\n".encode() in os.pread(said.fileno(), 1 << 20, 0)
            if reached and end == "done":
                end = "killed"
                process.kill()
            time.sleep(POLL_S)
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        lines = said.read().decode().splitlines()
    if end == "done" and process.returncode:
        end = "failed"
    cpu_s = usage.ru_utime + usage.ru_stime
    steps = [line for line in lines if line.startswith(STEP)]
    if steps:
        lines = [*(line for line in lines if line not in steps), f"{steps[0]} to {steps[-1]}"]
    note = "; ".join(dict.fromkeys(lines))
    return Cost(stage, usage.ru_maxrss << 10, own, cpu_s, end, note)


def _status(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return []


def measure(args: argparse.Namespace) -> Iterator[Cost]:
    """Yields the cost of each command."""
    sizes = Sizes(args.events, args.users or max(args.events // 50, 1000), args.items)
    folder = Path(tempfile.mkdtemp(prefix="data-size-", dir=args.folder))
    try:
        rng = np.random.default_rng(0)
        write_items(folder / "items.parquet", sizes.items, rng)
        parts = write_parts(folder / "events", sizes, rng)
        size = sum(part.stat().st_size for part in parts)
        print(f"{sizes}: {len(parts)} parts, {size / sizes.events:.1f} bytes per event", flush=True)
        for stage in args.stages:
            command = [
                *(sys.executable, "-m", "benchmarks.scale.data_size"),
                *("--stage", stage, "--folder", str(folder)),
                *("--steps", str(args.steps), "--evaluated", str(args.evaluated)),
            ]
            if stage == "resume":
                shutil.rmtree(folder / "bundle" / "recommender", ignore_errors=True)
            for last_step in (args.steps // 2, 0) if stage == "resume" else (0,):
                cost = watch(command, stage, int(args.limit_gib * GIB), last_step)
                print(
                    f"{cost.stage:12} {cost.end:8} peak {cost.peak_bytes / GIB:6.2f} GiB, own "
                    f"{cost.own_bytes / GIB:6.2f} GiB, {cost.cpu_s:7.0f} processor s  {cost.note}",
                    flush=True,
                )
                yield cost
            if stage == "build" and cost.end != "done":
                break
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """Reads the arguments, then measures, or runs one command for a measuring process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--users", type=int, default=0, help="default: a user for 50 events")
    parser.add_argument("--items", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=20, help="steps of training")
    parser.add_argument(
        "--evaluated", type=int, default=200, help="users of validation and evaluate"
    )
    parser.add_argument("--limit-gib", type=float, default=20.0)
    parser.add_argument("--folder", type=Path, help="where data is written; default: temporary")
    parser.add_argument("--stages", nargs="*", choices=STAGES, default=STAGES)
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.stage:
        run_stage(args.stage, args.folder, args.steps, args.evaluated)
        return
    costs = list(measure(args))
    if args.json:
        write_json(args.json, {"machine": machine(), "costs": [asdict(cost) for cost in costs]})


if __name__ == "__main__":
    main()
