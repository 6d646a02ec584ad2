"""Time of every kernel, beside what moves and computes as much.

    python benchmarks/kernels.py                 # on CUDA: all kernels, all shapes
    python benchmarks/kernels.py --cpu           # the CPU path of tree attention against SDPA

Rivals of tree attention: torch SDPA under a dense mask, FlexAttention (compiled), flash-attn where
it imports (another mask, the same bytes). `share` is of the ceiling that is nearer: a large copy's
GB/s or a large matrix product's TFLOP/s, both measured first.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from attention_rows import CPU_SHAPES, attention_rows, cuda_shapes, line, with_share
from small_kernels import small_kernels
from timing import ceilings, machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="measure the CPU path")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU path")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not arguments.cpu and not torch.cuda.is_available():
        parser.error("no CUDA device here; --cpu measures the CPU path")
    device = "cpu" if arguments.cpu else "cuda"
    if arguments.cpu:
        torch.set_num_threads(arguments.threads)
    shapes = CPU_SHAPES if arguments.cpu else cuda_shapes()
    dtype = torch.float32 if arguments.cpu else torch.bfloat16
    facts, ceiling = machine(device), ceilings(device)
    print(json.dumps(facts), json.dumps(ceiling), sep="\n")
    rows = []
    for row in attention_rows(shapes, dtype, device):
        rows.append(with_share(row, ceiling))
        print(line(rows[-1]), flush=True)
    if not arguments.cpu:
        for row in small_kernels(device):
            rows.append(with_share(row, ceiling))
            print(line(rows[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": facts, "ceilings": ceiling, "rows": rows}))


if __name__ == "__main__":
    main()
