"""Compares this code with an older checkout and with other programs, on one instruction set.

    git worktree add ../before COMMIT
    python -m benchmarks.tiers --before ../before --json F.json
    RECSERVE_ISA=x86-64-v3 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \\
        python -m benchmarks.tiers --before ../before   # as on a machine with AVX2 only

Runs the benchmarks of beam search and of text of both checkouts as processes of their own, in
turns, `--rounds` times. Each method's figure is the median of all its runs. Prints the machine and
two tables: slates in ms, and texts in tokens/s. Takes about ten minutes on two free cores.
llama.cpp is compared if its packages are installed (docs/results/text.md).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parents[1]
BEAMS = ("50", "200")
DTYPES = ("bfloat16", "float32")
# Where the benchmarks are, in this checkout and in older ones.
SLATES = ("benchmarks/recommend/beam.py", "benchmarks/recommend.py")
TEXTS = ("benchmarks/text/throughput.py", "benchmarks/text.py")


@dataclass(frozen=True)
class Job:
    """One run of a benchmark.

    Attributes:
        name: Column of the tables: whose code, and in which setting.
        code: Prefix of the checkout.
        places: Files of which the first that exists is the benchmark.
        options: Its arguments.
        kernels: RECSERVE_KERNELS of the run.
    """

    name: str
    code: Path
    places: tuple[str, ...]
    options: tuple[str, ...]
    kernels: str = "auto"

    def run(self, folder: Path) -> list[dict[str, Any]]:
        """Runs it and returns the cells that it measured.

        Raises:
            RuntimeError: If it wrote no result.
        """
        out = folder / "out.json"
        out.unlink(missing_ok=True)
        place = next(p for p in self.places if (self.code / p).is_file())
        packaged = (self.code / "benchmarks" / "__init__.py").is_file()
        run = ["-m", place.removesuffix(".py").replace("/", ".")] if packaged else [place]
        # Entries behind the first may hold optional packages such as llama-cpp-python.
        paths = [str(self.code), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        paths = [path for path in paths if Path(path).resolve() != HERE or self.code == HERE]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "RECSERVE_KERNELS": self.kernels,
        }
        done = subprocess.run(
            [sys.executable, *run, *self.options, "--json", str(out)],
            cwd=self.code,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if not out.exists():
            raise RuntimeError(f"{self.name}: {place} wrote no result: {done.stderr[-2000:]}")
        content = json.loads(out.read_text())
        cells: list[dict[str, Any]] = content["cells"]
        return [cell | {"machine": content["machine"]} for cell in cells]


def jobs(options: argparse.Namespace) -> list[Job]:
    """Returns the runs of one round: those that are compared follow each other.

    What is compared with the older checkout runs in a process with the same options, since other
    programs in the process cost time: ours beside them is a column of its own then.
    """
    codes = {"now": HERE, "before": options.before} if options.before else {}
    beside = "beside others" if codes else "now"
    common = ("--threads", str(options.threads), "--clock", options.clock)
    slates = (*common, "--beams", *BEAMS, "--budget-s", str(options.budget_s))
    engine = (*slates, "--methods", "cold", "warm")
    peers = (*slates, "--methods", "kv-copy", "bare-tree", "cold", "warm")
    found = [Job(beside, HERE, SLATES, peers)]
    for name, code in codes.items():
        found += [Job(name, code, SLATES, engine)]
    for name, code in (codes or {"now": HERE}).items():
        found += [Job(f"{name}, torch", code, SLATES, engine, "torch")]
    for dtype in DTYPES if options.tokens else ():
        texts = (*common, "--dtypes", dtype, "--repeats", "1", "--tokens", str(options.tokens))
        texts += ("--model", options.model)
        ours = (*texts, "--only", "ours")
        found += [Job(beside, HERE, TEXTS, (*texts, "--int8"))]
        if dtype == "float32":
            found += [Job("now, torch", HERE, TEXTS, ours, "torch")]
        found += [Job(name, code, TEXTS, ours) for name, code in codes.items()]
    return found


Figures = dict[str, dict[str, list[float]]]  # row: column: one value per run


def note(figures: Figures, row: str, column: str, *values: float) -> None:
    """Adds values of a row and a column."""
    figures.setdefault(row, {}).setdefault(column, []).extend(values)


def note_slates(figures: Figures, job: str, cell: dict[str, Any]) -> None:
    """Adds the times of a cell of beam search, and the rate of its prefill."""
    for method, runs in cell["runs"].items():
        if method in ("cold", "warm"):
            note(figures, f"beam {cell['beams']} {method}, ms", job, *runs["times_ms"])
            continue
        for state in ("cold", "warm"):  # these methods keep nothing between requests
            note(figures, f"beam {cell['beams']} {state}, ms", method, *runs["times_ms"])
    prefill_ms = cell["stages"].get("cold", {}).get("prefill_ms")
    if prefill_ms:
        rate = cell["work"]["prefill_gflop"] / prefill_ms * 1e3
        note(figures, "prefill, GFLOP/s", job, rate)
    note(figures, "prefill, GFLOP/s", "plain matmul", cell["matmul_gflops"])


def note_texts(figures: Figures, job: str, cell: dict[str, Any]) -> None:
    """Adds the figures of text: of this code and an older one by job, of others by method."""
    rows = {"plain": "plain", "oracle-70": "drafts, 70 % right", "together": "eight texts"}
    rows |= {"int8": "8 bits", "int8 together": "8 bits, eight texts"}
    others = {"transformers": "plain", "assisted-70": "drafts, 70 % right"}
    others |= {"llama.cpp": "plain", "llama.cpp F16": "plain", "llama.cpp Q8_0": "8 bits"}
    for method, f in cell["figures"].items():
        kind = rows.get(method) or others.get(method)
        if kind is None:
            continue
        column = job if method in rows else method
        column = column.removesuffix(" Q8_0")
        column = "transformers" if column == "assisted-70" else column
        row = f"{cell['dtype']}, {kind}"
        note(figures, f"{row}: tokens/s", column, f["tokens_per_s"])
        note(figures, f"{row}: decode tokens/s", column, f["decode_tokens_per_s"])
        note(figures, f"{row}: prefill ms", column, f["prefill_ms"])


def medians(figures: Figures) -> dict[str, dict[str, float]]:
    """Returns the median of each row and column."""
    return {
        row: {column: statistics.median(values) for column, values in cells.items()}
        for row, cells in figures.items()
    }


def print_table(console: Console, title: str, found: dict[str, dict[str, float]]) -> None:
    """Prints rows and columns in the order in which they were measured."""
    columns = list(dict.fromkeys(column for cells in found.values() for column in cells))
    table = Table(title=title, title_justify="left")
    for column in ("", *columns):
        table.add_column(column, justify="right" if column else "left")
    for row, cells in found.items():
        table.add_row(row, *(f"{cells[c]:,.1f}" if c in cells else "" for c in columns))
    console.print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, help="older checkout to compare with")
    parser.add_argument("--rounds", type=int, default=2, help="how often every run is repeated")
    parser.add_argument("--budget-s", type=float, default=2.5, help="seconds of a method of slates")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of a text; 0: no texts")
    parser.add_argument("--model", default="1024x16", help="hidden size x layers of the texts")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: one thread")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    options.before = options.before and options.before.resolve()
    return options


def main() -> int:
    options, console = arguments(), Console(width=None if sys.stdout.isatty() else 160)
    began, slates, texts = time.perf_counter(), Figures(), Figures()
    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for job in jobs(options):
                for cell in job.run(Path(folder)):
                    facts = cell["machine"] if job.code == HERE else facts
                    if "beams" in cell:
                        note_slates(slates, job.name, cell)
                    else:
                        note_texts(texts, job.name, cell)
                took = time.perf_counter() - began
                words = f"{job.name}: {' '.join(job.options)}"
                console.print(f"{took:4.0f} s, round {number + 1}, {words}", soft_wrap=True)
    found = {"slates": medians(slates), "texts": medians(texts)}
    console.print(facts)
    print_table(console, "Slates: 256 x 4, 12,101 items, 200 tokens, fp32", found["slates"])
    if texts:
        print_table(console, f"Texts: {options.model}, prompt 96", found["texts"])
    if options.json:
        options.json.write_text(json.dumps({"machine": facts} | found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
