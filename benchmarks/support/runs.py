"""Clocks, machine facts, and the rate of a plain matrix product as the reference for all others."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from recserve.kernels.native.processor import instructions, processor

TAIL_RUNS = 100


@dataclass(frozen=True)
class Runs:
    """Times of one cell in milliseconds; empty if it was skipped, with the reason in `note`."""

    times_ms: tuple[float, ...] = ()
    note: str = ""

    @property
    def median_ms(self) -> float:
        """Median; nan if skipped."""
        return float(np.median(self.times_ms)) if self.times_ms else float("nan")

    @property
    def p99_ms(self) -> float:
        """99th percentile; nan for fewer than TAIL_RUNS runs, which are too few for a tail."""
        enough = len(self.times_ms) >= TAIL_RUNS
        return float(np.percentile(self.times_ms, 99)) if enough else float("nan")

    def words(self) -> str:
        """Returns a text for a table: median, p99 if there is one, or the reason."""
        if not self.times_ms:
            return self.note
        tail = f" (p99 {self.p99_ms:,.1f})" if len(self.times_ms) >= TAIL_RUNS else ""
        digits = 1 if self.median_ms < 100 else 0
        note = f" {self.note}" if self.note else ""
        return f"{self.median_ms:,.{digits}f}{tail}{note}"


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def measure(call: Callable[[int], Any], repeats: int, budget_s: float, clock: str = "wall") -> Runs:
    """Times call(0), call(1) and so on: one to warm up, then up to `repeats` within the budget.

    A call that alone fills the budget is the only run, and the note says so. Clock `cpu` counts the
    CPU time of this process over all its threads. With one thread on a busy machine, this is closer
    to the time on an idle machine than the wall clock.
    """
    first_s = _seconds(call, 0, clock)
    if first_s > budget_s / 2:
        return Runs((first_s * 1e3,), "first run")
    times: list[float] = []
    left = budget_s - first_s
    while len(times) < repeats and left > 0:
        times.append(_seconds(call, len(times) + 1, clock))
        left -= times[-1]
    return Runs(tuple(t * 1e3 for t in times))


def _seconds(call: Callable[[int], Any], number: int, clock: str) -> float:
    now = CLOCKS[clock]
    began = now()
    call(number)
    return now() - began


def matmul_gflops(
    rows: int, inner: int, columns: int, dtype: torch.dtype, clock: str = "wall"
) -> float:
    """Returns the best rate of [rows, inner] @ [inner, columns], counted as 2mnk operations."""
    left, right = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)

    def product(_: int) -> None:
        torch.nn.functional.linear(left, right)

    best = min(_seconds(product, i, clock) for i in range(8))
    return 2e-9 * rows * inner * columns / best


def machine() -> dict[str, Any]:
    """Returns machine and versions, on which the figures depend."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return {
        "processor": processor().name,
        "instructions": instructions(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": round(load, 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": "cpu",
    }


def silence_transformers() -> None:
    """Turns off transformers' warnings about generation flags."""
    verbosity: Any = transformers.utils.logging
    verbosity.set_verbosity_error()


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes indented JSON, with nan as null."""
    text = json.dumps(content, indent=1, default=float)
    path.write_text(text.replace("NaN", "null") + "\n", encoding="utf-8")
