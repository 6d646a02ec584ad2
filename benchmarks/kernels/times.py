"""Measures every kernel against alternatives that move and compute as much.

    python -m benchmarks.kernels.times                 # on CUDA: all kernels, all shapes
    python -m benchmarks.kernels.times --cpu           # the CPU path of tree attention against SDPA
    python -m benchmarks.kernels.times --cpu --grid    # the same over 288 shapes, five minutes

The alternatives to tree attention are torch SDPA under a dense mask, compiled FlexAttention and, on
a GPU, torch's flash kernels (another mask, the same bytes). Prints the machine, its peak rates and
one line per shape. `share` is the share of the nearer ceiling: the GB/s of a large copy or the
TFLOP/s of a large matrix product. Both are measured first.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import chain
from pathlib import Path

import torch

from benchmarks.kernels.attention_rows import (
    CPU_SHAPES,
    attention_rows,
    cpu_grid,
    cuda_shapes,
    flex_rows,
    line,
    with_share,
)
from benchmarks.kernels.small_kernels import small_kernels
from benchmarks.support.timing import Deadline, ceilings, machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="measure the CPU path")
    parser.add_argument("--threads", type=int, default=1, help="threads of the CPU path")
    parser.add_argument("--grid", action="store_true", help="with --cpu: measure all shapes")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="dtype of the CPU path")
    parser.add_argument(
        "--budget-s", type=float, default=480.0, help="time after which no further shape starts"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    if not arguments.cpu and not torch.cuda.is_available():
        parser.error("no CUDA device here; --cpu measures the CPU path")
    if not arguments.cpu and (arguments.grid or arguments.dtype):
        parser.error("--grid and --dtype are of the CPU path; add --cpu")
    deadline = Deadline(arguments.budget_s)
    device, dtype, shapes = "cuda", torch.bfloat16, cuda_shapes()
    if arguments.cpu:
        torch.set_num_threads(arguments.threads)
        device, dtype = "cpu", getattr(torch, arguments.dtype or "float32")
        shapes = cpu_grid() if arguments.grid else CPU_SHAPES
    facts, ceiling = machine(device), ceilings(device)
    print(json.dumps(facts), json.dumps(ceiling), sep="\n")
    seconds = 0.4 if arguments.grid else 4.0
    numbered = list(enumerate(shapes))
    found = attention_rows(numbered, dtype, device, deadline, seconds)
    if device == "cuda":
        flexed = flex_rows(numbered, dtype, deadline)
        found = chain(found, flexed, small_kernels(device))
    rows = []
    for row in found:
        rows.append(with_share(row, ceiling))
        print(line(rows[-1]), flush=True)
        if arguments.json:
            content = {"machine": facts, "ceilings": ceiling, "rows": rows}
            arguments.json.write_text(json.dumps(content))
    ratios = [row["sdpa_to_ours"] for row in rows if "sdpa_to_ours" in row]
    if ratios:
        told = f"median {statistics.median(ratios):.2f}, least {min(ratios):.2f}"
        below = sum(ratio < 1 for ratio in ratios)
        print(
            f"SDPA / ours: {told}, below 1 in {below} of {len(ratios)}; {len(shapes)} shapes asked"
        )
    if any("ok" in row for row in rows):
        parser.exit(1, "what failed is told above\n")


if __name__ == "__main__":
    main()
