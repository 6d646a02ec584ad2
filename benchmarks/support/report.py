"""What the benchmarks of recommending and ranking begin with and end in: common options, the
machine, and cells that go to the console and into a file.
"""

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
    """With the options that all have. every_cell: whether `--all` asks for more cells."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    if every_cell:
        parser.add_argument("--all", action="store_true", help="every cell of the issue")
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--budget-s", type=float, default=budget_s, help="of a method in a cell")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: with --threads 1")
    parser.add_argument("--json", type=Path)
    return parser


class Report:
    """Cells as they come; the file is written again with each."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Says which machine it is, and sets its threads."""
        silence_transformers()
        torch.set_num_threads(options.threads)
        self.clock: str = options.clock
        self.path: Path | None = options.json
        self.console = Console(width=None if sys.stdout.isatty() else 160)
        facts = machine() | {"clock": options.clock}
        self.content: dict[str, Any] = {"machine": facts, "cells": []}
        self.console.print(facts)

    def matmul(self, rows: int, inner: int, columns: int, dtype: torch.dtype) -> float:
        """GFLOP/s of a plain product, for the head of the tables."""
        rate = matmul_gflops(rows, inner, columns, dtype, self.clock)
        self.content["matmul_gflops"] = rate
        self.console.print(f"plain matmul: {rate:.0f} GFLOP/s")
        return rate

    def add(self, cells: list[dict[str, Any]]) -> None:
        """Cells as tables.py reads them."""
        self.content["cells"] += cells
        if self.path:
            write_json(self.path, self.content)
