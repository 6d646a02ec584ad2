"""Measures the memory of SpecFormer's training by draft length.

    python -m benchmarks.text.specformer_memory --json F.json

Each case runs in a process of its own and computes one loss with its gradient: `accumulated` as
training does, `plain` with the logits of all slots at once. The figure is the peak resident memory
above that of the built model, or the peak of allocated memory on a CUDA device. It includes the
gradients of the weights, whose bytes are listed too: one matrix has d x d weights per slot.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.support.runs import machine, write_json
from recserve.models.config import DecoderConfig
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.training.text.drafters.specformer import SpecformerRecipe, SpecformerTrainee

METHODS = ("accumulated", "plain")
MIB = 2**20


def plain_loss(trainee: SpecformerTrainee, batch: np.ndarray) -> torch.Tensor:
    """Returns the same loss with the logits of all slots in memory."""
    context, logits = trainee.context(trainee.train[batch])
    states = trainee.model.slots(context).unflatten(0, (len(batch), -1))
    wanted = logits.unflatten(0, (len(batch), -1)).float().softmax(-1)
    total, slots = states.new_zeros(()), trainee.recipe.num_slots
    for slot in range(slots):
        said = trainee.slot_loss.logits(states[:, : -1 - slot, slot]).log_softmax(-1)
        total = total - (wanted[:, 1 + slot :] * said).sum(-1).mean() / slots
    return total


def peak_mib(cuda: bool) -> float:
    """Returns the most memory that this process has had; on a CPU it needs Linux."""
    if cuda:
        return torch.cuda.max_memory_allocated() / MIB
    # getrusage would not do: a child inherits the peak of the process that started it.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def case(options: argparse.Namespace) -> dict[str, Any]:
    """Computes one loss with its gradient and returns the memory that it took."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    heads = max(options.hidden // 64, 1)
    decoder = DecoderConfig(options.hidden, 4, heads, heads, 64, 3 * options.hidden)
    target = LanguageModel(LanguageModelConfig(decoder, options.vocabulary, tied=True))
    target = target.requires_grad_(False).eval().to(options.device)
    text = np.random.default_rng(0).integers(0, options.vocabulary, options.rows * 256)
    recipe = SpecformerRecipe(num_slots=options.slots, slot_rows=options.slot_rows)
    trainee = SpecformerTrainee(recipe, target, text, text, seed=0)
    batch, cuda = np.arange(options.rows), options.device == "cuda"
    before = peak_mib(cuda)
    loss = plain_loss(trainee, batch) if options.plain else trainee.loss(batch).total
    loss.backward()  # type: ignore[no-untyped-call]
    weights = sum(p.numel() * p.element_size() for p in trainee.model.parameters())
    return {"peak_mib": peak_mib(cuda) - before, "weights_mib": weights / MIB, "loss": float(loss)}


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4, 8, 16], help="draft lengths")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the target")
    parser.add_argument("--vocabulary", type=int, default=16_000, help="tokens of the target")
    parser.add_argument("--rows", type=int, default=4, help="windows of 256 tokens in the batch")
    parser.add_argument("--slot-rows", type=int, default=1024, help="slot states in memory")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--slots", type=int, help=argparse.SUPPRESS)  # one case, in this process
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    options = arguments(given)
    if options.slots is not None:
        print(json.dumps(case(options)))
        return 0
    console, rows = Console(), []
    table = Table(title="peak memory of one training step, MiB", title_justify="left")
    for column in ("draft length", *METHODS, "weights"):
        table.add_column(column, justify="right")
    sizes = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in SIZES]
    for slots in options.lengths:
        found = {}
        for method in METHODS:
            own = [f"--slots={slots}", *(["--plain"] if method == "plain" else [])]
            command = [sys.executable, "-m", "benchmarks.text.specformer_memory", *sizes, *own]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found[method] = json.loads(done.stdout)
        rows.append({"slots": slots, **found})
        peaks = [f"{found[method]['peak_mib']:.0f}" for method in METHODS]
        table.add_row(str(slots), *peaks, f"{found['plain']['weights_mib']:.1f}")
    console.print(table)
    if options.json:
        settings = {name: getattr(options, name) for name in SIZES}
        write_json(options.json, {"machine": machine(), "options": settings, "rows": rows})
    return 0


SIZES = ("hidden", "vocabulary", "rows", "slot_rows", "device")


if __name__ == "__main__":
    sys.exit(main())
