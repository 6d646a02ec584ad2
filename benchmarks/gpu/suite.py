"""Checks every kernel and strategy on a GPU and measures them, with one command.

    python benchmarks/gpu.py --json gpu.json                        # within 5 minutes
    python benchmarks/gpu.py --all --json gpu.json                  # all figures, within 10 minutes
    python benchmarks/gpu.py --device cpu --smoke --json smoke.json # its logic, tiny, anywhere
    python benchmarks/gpu.py --checks                               # only the checks, 80 seconds
    python benchmarks/gpu.py --part "kernel checks"                 # one part, in this process

It runs the checks, then ten goal lines beside published figures (goals.py). `--all` measures the
kernels, searches and text steps too.

It needs only torch, numpy, safetensors and triton, and runs from a checkout that is not installed.
The lines of faiss need one of its packages too, and the line of HTTP needs those of a server.
Without them the lines are skipped, and a row says so.
It prints one line per row and a summary. It exits with 2 without a CUDA device, and with 1 if a
check failed. Every part runs in its own process and within its share of the time, so a crash of one
part does not lose the others. The summary and the JSON list what was cut; the JSON is written after
every row. While the checks run, torch fills new tensors with NaN.

A kernel takes seconds to compile, and there are about a hundred variants. So the checks run in
parallel. Then everything that will be measured runs once in parallel, to be compiled; these figures
are discarded. Afterwards the parts are measured one at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.checks import Task, kernel_checks
from benchmarks.gpu.defaults import default_rows
from benchmarks.gpu.engine import engine_checks, engine_rows
from benchmarks.gpu.goals import goal_rows
from benchmarks.gpu.parts import DEAD, GRACE_S, begun, found, rows_of, side_by_side
from benchmarks.gpu.profile import profile_rows
from benchmarks.gpu.searches import prefill_checks, search_checks, search_rows
from benchmarks.gpu.text import text_checks, text_rows
from benchmarks.gpu.vectors import vector_checks, vector_rows
from benchmarks.kernels.attention_rows import (
    FIRST_SHAPES,
    attention_rows,
    cuda_shapes,
    flex_rows,
    line,
    with_share,
)
from benchmarks.kernels.small_kernels import small_kernels
from benchmarks.kernels.tuning import tuning_rows
from benchmarks.support.timing import Deadline, ceilings, machine

Rows = Iterator[dict[str, Any]]
SCRIPT = Path(__file__).resolve().parents[1] / "gpu.py"
EVERYTHING = slice(0, None, 1)


@dataclass(frozen=True)
class Part:
    """Work of one process.

    Attributes:
        stage: Section of the report. Only a part of the checks continues after a crash.
        rows: Yields rows for (device, smoke, deadline, share).
        shares: Number of processes that split the part if several run concurrently.
    """

    stage: str
    rows: Callable[..., Rows]
    shares: int = 1

    @property
    def measures(self) -> bool:
        """True if the part runs alone, after its kernels have been compiled."""
        return self.stage not in ("machine", "checks")


def checked(
    tasks: Callable[[str, bool], Iterator[Task]],
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Callable[..., Rows]:
    """Returns a function that yields the rows of checks, within the context `around`."""

    def rows(device: str, smoke: bool, deadline: Deadline, share: slice = EVERYTHING) -> Rows:
        with around():
            for task in islice(tasks(device, smoke), share.start, None, share.step):
                if deadline.passed():
                    note = "not reached in the time of its part"
                    yield {"name": task.name, "ok": False, "note": note}
                    return
                yield {"task": task}

    return rows


def measured_attention(
    device: str, smoke: bool, deadline: Deadline, share: slice = EVERYTHING
) -> Rows:
    """Yields times of tree attention and its alternatives, the most informative shapes first."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = list(enumerate(cuda_shapes(smoke)))[share]
    first = [(number, shape) for number, shape in shapes if number < FIRST_SHAPES]
    for some in (first, shapes[len(first) :]):
        yield from attention_rows(some, dtype, device, deadline)
        if device == "cuda":
            yield from flex_rows(some, dtype, deadline)


def measured_kernels(device: str, smoke: bool, deadline: Deadline, _: slice = EVERYTHING) -> Rows:
    """Yields times of the other kernels."""
    rows = small_kernels(device, smoke)
    while not deadline.passed() and (row := next(rows, None)) is not None:
        yield row


@contextmanager
def poisoned() -> Iterator[None]:
    """Fills every new tensor of torch.empty with NaN, or with the largest integer.

    It is not used where graphs are captured, since deterministic operators differ and may
    synchronise.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# Seconds of each stage in running order, with the start and last row of its processes. Unused time
# goes to later stages. Everything up to the goals is done in 300 seconds, and with `--all` in 600.
# On a CPU, which only tests the logic, there is no limit.
SHARES_S = {
    "start": 10,  # start of this process, before its clock runs
    "machine": 20,
    "checks": 80,
    "compiling": 60,
    "goals": 130,
    "attention": 55,
    "text": 50,
    "searches": 45,
    "profile": 30,
    "defaults": 40,
    "engine": 30,
    "vectors": 15,
    "kernels": 20,
    "tuning": 15,
}
PARTS = {
    "machine": Part("machine", lambda device, smoke, *_: iter([facts(device, smoke)])),
    "kernel checks": Part("checks", checked(kernel_checks, poisoned), 4),
    "engine checks": Part("checks", checked(engine_checks, poisoned), 4),
    "text checks": Part("checks", checked(text_checks), 2),
    "search checks": Part("checks", checked(search_checks), 2),
    "prefill checks": Part("checks", checked(prefill_checks)),
    "vector checks": Part("checks", vector_checks),
    "goals": Part("goals", lambda *how: goal_rows(*how), 3),
    "attention": Part("attention", measured_attention, 4),
    "text": Part("text", lambda *how: text_rows(*how[:3])),
    "searches": Part("engine", lambda *how: search_rows(*how[:3])),
    "profile": Part("profile", lambda *how: profile_rows(*how[:3])),
    "defaults": Part("defaults", lambda *how: default_rows(*how[:3])),
    "engine": Part("engine", lambda *how: engine_rows(*how[:3])),
    "vectors": Part("vectors", lambda *how: vector_rows(*how[:3])),
    "kernels": Part("kernels", measured_kernels),
    "tuning": Part("tuning", lambda *how: tuning_rows(*how), 4),
}


def end_s(stage: str) -> float:
    """Returns the time, in seconds after the start of the run, at which a stage must end."""
    stages = list(SHARES_S)
    return float(sum(SHARES_S[name] for name in stages[1 : stages.index(stage) + 1]))


def facts(device: str, smoke: bool) -> dict[str, Any]:
    """Returns the machine, the versions and the measured peak rates of the device."""
    return {"machine": machine(device), "ceilings": ceilings(device, smoke)}


def run_part(
    name: str, device: str, smoke: bool, skip: int, seconds: float, share: slice = EVERYTHING
) -> int:
    """Prints the rows of a part, but for the first `skip`, as lines for the parent process.

    After `seconds`, a last row says that the part was cut. Returns the exit code, which is DEAD if
    the device no longer responds.
    """
    deadline = Deadline(seconds)
    rows = PARTS[name].rows(device, smoke, deadline, share)
    for number, row in enumerate(rows):
        task = row.get("task")
        if number < skip:
            continue
        if isinstance(task, Task):
            begun(task.name)
            row = asdict(task.checked())
        found(row)
        if device == "cuda" and not row.get("ok", True):
            try:
                torch.cuda.synchronize()
            except Exception as error:
                print(error, file=sys.stderr)
                return DEAD
    if deadline.cut:
        found({"cut": name, "note": "its time was used up"})
    return 0


class Report:
    """Rows of a run, written to disk after each row."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.content: dict[str, Any] = {"shares_s": SHARES_S, "checks": [], "cut": []}

    def add(self, stage: str, row: dict[str, Any]) -> None:
        """Prints one line and adds one entry to the file; a row with `ok` is a check."""
        if stage == "machine" and "ok" not in row:
            self.content |= row
            print(json.dumps(row), flush=True)
        else:
            stage = "cut" if "cut" in row else "checks" if "ok" in row else stage
            if stage in ("attention", "kernels") and "ceilings" in self.content:
                row = with_share(row, self.content["ceilings"])
            self.content.setdefault(stage, []).append(row)
            print(shown(row), flush=True)
        self.save()

    def save(self) -> None:
        """Writes the file, with infinite and missing numbers as null."""
        if self.path is not None:
            text = json.dumps(self.content, indent=1)
            for word in ("-Infinity", "Infinity", "NaN"):
                text = text.replace(word, "null")
            self.path.write_text(text + "\n", encoding="utf-8")


def shown(row: dict[str, Any]) -> str:
    """Returns a row as a line for the terminal."""
    if "cut" in row:
        return f"CUT    {row['cut']}: {row['note']}"
    if "goal" in row:
        ours = {name: value for name, value in row.items() if name not in ("goal", "beside")}
        beside = f"; published: {json.dumps(row['beside'])}" if "beside" in row else ""
        return f"GOAL   {row['goal']}: {json.dumps(ours)}{beside}"
    if "ok" not in row:
        return line(row) if "share" in row else json.dumps(row)
    word = "ok    " if row["ok"] else "FAILED"
    figures = f"{row['error']:.2g} ({row['seconds']:.1f} s) " if "error" in row else ""
    return f"{word} {row['name']}: {figures}{row.get('note', '')}"


@dataclass(frozen=True)
class Run:
    """All parts on one device.

    Attributes:
        device: `cuda` or `cpu`.
        smoke: True uses tiny shapes.
        workers: Maximum number of concurrent processes.
        began: Start of the run.
        measured: Parts that are measured.
    """

    device: str
    smoke: bool
    workers: int
    began: float
    measured: tuple[str, ...]

    def rows(self, name: str, stage: str, share: str = "0/1") -> Rows:
        """Yields the rows of a part that finish before its stage ends."""
        how = ["--part", name, "--share", share, "--device", self.device]
        command = [sys.executable, str(SCRIPT), *how, *(["--smoke"] if self.smoke else [])]
        left = self.began + end_s(stage) - GRACE_S - time.monotonic()
        seconds = left if self.device == "cuda" else float("inf")
        yield from rows_of(command, name, seconds, stage == "checks")

    def checks(self) -> Rows:
        """Yields the rows of all checks, whose parts run concurrently."""
        names = [name for name, part in PARTS.items() if part.stage == "checks"]
        yield from side_by_side(self.jobs(names, "checks"), self.workers)

    def compiled(self) -> Rows:
        """Runs everything that is measured once, to compile it; yields rows for what was cut.

        With one worker nothing runs, and kernels compile when they are measured. Failures are
        printed.
        """
        if self.workers > 1:
            jobs = self.jobs(list(self.measured), "compiling")
            for row in side_by_side(jobs, self.workers):
                if "cut" in row:
                    yield row | {"cut": f"compiling {row['cut']}"}
                if not row.get("ok", True):
                    print(f"while compiling: {shown(row)}", file=sys.stderr, flush=True)

    def jobs(self, names: list[str], stage: str) -> list[Callable[[], Rows]]:
        """Returns one job for each share of each part."""
        found = []
        for name in names:
            shares = PARTS[name].shares if self.workers > 1 else 1
            for number in range(shares):
                how = (name, stage, f"{number}/{shares}")
                found.append(lambda how=how: self.rows(*how))
        return found


def run(
    device: str, smoke: bool, path: Path | None, workers: int, measured: tuple[str, ...]
) -> bool:
    """Runs the checks, then the parts that are measured; returns True if every check passed."""
    start, report = time.monotonic(), Report(path)
    everything = Run(device, smoke, workers, start, measured)
    for row in everything.rows("machine", "machine"):
        report.add("machine", row)
    for row in everything.checks():
        report.add("checks", row)
    for row in everything.compiled():
        report.add("cut", row)
    for name in measured:
        for row in everything.rows(name, name):
            report.add(PARTS[name].stage, row)
    checks = report.content["checks"]
    failed = [check["name"] for check in checks if not check["ok"]]
    report.content["seconds"] = time.monotonic() - start
    report.save()
    passed, seconds = len(checks) - len(failed), report.content["seconds"]
    print(f"{passed} of {len(checks)} checks passed in {seconds:.0f} s")
    for name in failed:
        print(f"FAILED {name}")
    for name in dict.fromkeys(row["cut"] for row in report.content["cut"]):
        print(f"CUT {name}")
    return not failed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--smoke", action="store_true", help="use tiny shapes")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--checks", action="store_true", help="run the checks, measure nothing")
    parser.add_argument(
        "--all", action="store_true", help="measure everything, not the goal lines alone"
    )
    parser.add_argument("--part", choices=PARTS, help="run this part only, print JSON lines")
    cores = os.cpu_count() or 1
    parser.add_argument(
        "--workers", type=int, help="concurrent processes; default: the cores, or 1 on a CPU"
    )
    parser.add_argument("--share", default="0/1", help="i/n: every n-th row of a part from i on")
    parser.add_argument(
        "--skip", type=int, default=0, help="number of the part's first rows to leave out"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time limit")
    chosen = parser.parse_args(arguments)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --device cpu --smoke tries the logic", file=sys.stderr)
        return 2
    if chosen.part:
        first, step = map(int, chosen.share.split("/"))
        how = chosen.device, chosen.smoke, chosen.skip, chosen.seconds
        if step > 1:
            torch.set_num_threads(1)
        return run_part(chosen.part, *how, slice(first, None, step))
    workers = chosen.workers or (cores if chosen.device == "cuda" else 1)
    measured = tuple(name for name, part in PARTS.items() if part.measures)
    if chosen.checks or not chosen.all:
        measured = () if chosen.checks else ("goals",)
    how = chosen.device, chosen.smoke, chosen.json, workers
    return 0 if run(*how, measured) else 1
