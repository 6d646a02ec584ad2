"""Compares C with torch on each level of instruction sets that this machine has.

    python -m benchmarks.kernels.rule [--threads 1]

A fixed rule lets C compute where it can (recserve/kernels/linear/products.py). This benchmark shows
whether the rule is right: for each level one process runs the comparison of `recserve doctor
--measure`, with C and torch lowered to that level. Prints a table with the times of torch divided
by those of C, and ends with status 1 if C is slower than torch by more than a tenth somewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.support.timing import machine
from recserve.doctor import kernel_comparison
from recserve.doctor.kernel_comparison import compare_kernels
from recserve.kernels.native.processor import LEVELS, missing_flags, settings

SLOWEST = 1 / 1.1


def ratios(threads: int) -> dict[str, float]:
    """Returns the times of torch divided by those of C, by type and work, in this process."""
    torch.set_num_threads(threads)
    kernel_comparison.BUDGET_S = 3.0
    return {
        f"{str(dtype).removeprefix('torch.')}: {work}": times.ratio
        for dtype in (torch.float32, torch.bfloat16)
        for work, times in compare_kernels(dtype).items()
    }


def main() -> int:
    """Runs each level in a process of its own and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(ratios(arguments.threads)))
        return 0
    found: dict[str, dict[str, float]] = {}
    for level in LEVELS:
        if not missing_flags(level):
            command = [sys.executable, "-m", "benchmarks.kernels.rule", "--here"]
            command += ["--threads", str(arguments.threads)]
            env = os.environ | settings(level)
            done = subprocess.run(command, env=env, capture_output=True, check=True, text=True)
            found[level] = json.loads(done.stdout)
    table = Table("level", *next(iter(found.values())), title=str(machine()))
    for level, row in found.items():
        table.add_row(level, *(f"{ratio:.2f}" for ratio in row.values()))
    Console(width=160).print(table)
    return int(any(ratio < SLOWEST for row in found.values() for ratio in row.values()))


if __name__ == "__main__":
    sys.exit(main())
