"""Common options, machine facts and output of the recommendation and ranking benchmarks."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.support.runs import CLOCKS, machine, matmul_gflops, silence_transformers, write_json


def options_of(
    doc: str | None, budget_s: float, repeats: int, every_cell: bool = True
) -> argparse.ArgumentParser:
    """Returns a parser with the common options; `every_cell` adds `--all`."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    if every_cell:
        parser.add_argument("--all", action="store_true", help="measure every cell")
    parser.add_argument("--repeats", type=int, default=repeats, help="timed runs per method")
    parser.add_argument(
        "--budget-s", type=float, default=budget_s, help="seconds of a method in a cell"
    )
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: with --threads 1")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    return parser


class Report:
    """Collects cells and writes the file again after each."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Prints the machine and sets its threads."""
        silence_transformers()
        torch.set_num_threads(options.threads)
        self.clock: str = options.clock
        self.path: Path | None = options.json
        self.console = Console(width=None if sys.stdout.isatty() else 160)
        facts = machine() | {"clock": options.clock}
        self.content: dict[str, Any] = {"machine": facts, "cells": []}
        self.console.print(facts)

    def matmul(self, rows: int, inner: int, columns: int, dtype: torch.dtype) -> float:
        """Returns the GFLOP/s of a plain matrix product, for the head of the tables."""
        rate = matmul_gflops(rows, inner, columns, dtype, self.clock)
        self.content["matmul_gflops"] = rate
        self.console.print(f"plain matmul: {rate:.0f} GFLOP/s")
        return rate

    def add(self, cells: list[dict[str, Any]]) -> None:
        """Adds cells in the form that report files hold."""
        self.content["cells"] += cells
        if self.path:
            write_json(self.path, self.content)
