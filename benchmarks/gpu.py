"""One command for a GPU: is every kernel and strategy right, and how fast is all of it.

    python benchmarks/gpu.py --json gpu.json                        # within 9 minutes
    python benchmarks/gpu.py --device cpu --smoke --json smoke.json # its logic, tiny, anywhere

Needs torch, numpy, safetensors and triton, nothing else. Exits 2 without a CUDA device, 1 if a
check failed. The JSON is written after every stage, so that a run cut short leaves what it had.
Outputs start as NaN (torch fills what it allocates) while the checks run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from attention_rows import attention_rows, cuda_shapes, line, with_share
from gpu_checks import kernel_checks
from gpu_engine import engine_checks, engine_rows
from gpu_text import text_checks, text_rows
from small_kernels import small_kernels
from timing import ceilings, machine
from tuning import tuning_rows

# Seconds from the start at which a stage begins no new measurement.
STAGES = {"attention": 300.0, "kernels": 340.0, "tuning": 410.0, "text": 460.0, "engine": 510.0}


@contextmanager
def poisoned() -> Iterator[None]:
    """Everything that torch.empty returns is NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Report:
    """What has been found so far, on disk after every stage."""

    def __init__(self, path: Path | None, facts: dict[str, Any]) -> None:
        self.path = path
        self.content: dict[str, Any] = dict(facts)

    def add(self, stage: str, row: dict[str, Any], shown: str) -> None:
        """One line on the terminal, one entry in the file."""
        self.content.setdefault(stage, []).append(row)
        print(shown, flush=True)

    def save(self) -> None:
        """Infinite and missing numbers as null."""
        if self.path is not None:
            text = json.dumps(self.content, indent=1)
            for word in ("-Infinity", "Infinity", "NaN"):
                text = text.replace(word, "null")
            self.path.write_text(text + "\n", encoding="utf-8")


def run(device: str, smoke: bool, path: Path | None) -> bool:
    """All stages; true if every check passed."""
    start = time.monotonic()
    ceiling = ceilings(device, smoke)
    report = Report(path, {"machine": machine(device), "ceilings": ceiling})
    print(json.dumps(report.content))
    with poisoned():
        for stage in (kernel_checks(device, smoke), engine_checks(device), text_checks(device)):
            for check in stage:
                word = "ok    " if check.ok else "FAILED"
                shown = (
                    f"{word} {check.name}: {check.error:.2g} ({check.seconds:.1f} s) {check.note}"
                )
                report.add("checks", asdict(check), shown)
    report.save()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    until = {stage: start + seconds for stage, seconds in STAGES.items()}
    measured = {
        "attention": attention_rows(cuda_shapes(smoke), dtype, device, until["attention"]),
        "kernels": small_kernels(device, smoke),
        "tuning": tuning_rows(device, smoke, until["tuning"]),
        "text": text_rows(device, smoke, until["text"]),
        "engine": engine_rows(device, smoke, until["engine"]),
    }
    for stage, rows in measured.items():
        try:
            for row in rows:
                if stage in ("attention", "kernels"):
                    row = with_share(row, ceiling)
                report.add(stage, row, line(row) if "share" in row else json.dumps(row))
                if stage == "kernels" and time.monotonic() > until[stage]:
                    break
        except Exception as error:  # the other stages are worth having
            row = {"name": stage, "ok": False, "note": f"{type(error).__name__}: {error}"[:500]}
            report.add("checks", row, f"FAILED stage {stage}: {row['note']}")
        report.save()
    failed = [check["name"] for check in report.content["checks"] if not check["ok"]]
    report.content["seconds"] = time.monotonic() - start
    report.save()
    total = len(report.content["checks"])
    print(f"{total - len(failed)} of {total} checks passed in {report.content['seconds']:.0f} s")
    for name in failed:
        print(f"FAILED {name}")
    return not failed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --device cpu --smoke tries the logic", file=sys.stderr)
        return 2
    return 0 if run(chosen.device, chosen.smoke, chosen.json) else 1


if __name__ == "__main__":
    sys.exit(main())
