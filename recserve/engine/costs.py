"""What work costs on this machine: forwards by their nodes, draft heads by their states."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from recserve.engine.networks import DecoderTrunk
from recserve.engine.runner import Piece, Runner
from recserve.kernels.paged_kv import KVPool
from recserve.kernels.tree import root_branch
from recserve.models.drafters.nezha import SelfDraftHead
from recserve.models.inputs import NodeInputs
from recserve.models.language_model import LanguageModel
from recserve.models.recommender import Recommender

SIZES = (1, 16, 64, 256, 1024)
ROOT = 64
RUNS = 4
BUDGET_S = 0.3


@dataclass(frozen=True)
class Cost:
    """Milliseconds at ascending sizes; between them and after the last it is taken as linear."""

    sizes: tuple[int, ...]
    milliseconds: tuple[float, ...]

    def __call__(self, size: float) -> float:
        """Milliseconds, 0 for nothing."""
        if size <= 0:
            return 0.0
        last = max(sum(known <= size for known in self.sizes[:-1]), 1)
        if len(self.sizes) == 1:
            return self.milliseconds[0] * max(size / self.sizes[0], 1.0)
        (low, high), (before, after) = (
            self.sizes[last - 1 : last + 1],
            self.milliseconds[last - 1 : last + 1],
        )
        slope = max(after - before, 0.0) / (high - low)
        return max(before + (size - low) * slope, 0.0)


def forward_cost(model: Recommender) -> Cost:
    """A forward of n tree nodes under a short root, as the engine makes it."""
    runner = scratch_runner(model, SIZES[-1])
    device = runner.pool.keys.device
    slots = torch.arange(ROOT + SIZES[-1], device=device)

    @torch.inference_mode()
    def forward(size: int) -> None:
        tokens = torch.zeros(size, dtype=torch.int64, device=device)
        starts = torch.arange(size + 1, device=device)
        tree = root_branch(tokens, starts)
        piece = Piece(tree, NodeInputs(tokens), None, slots[ROOT : ROOT + size], (slots[:ROOT],))
        runner.forward([piece])

    return measured(forward, SIZES, device)


def scratch_runner(model: Recommender | LanguageModel, nodes: int) -> Runner:
    """The model over a pool of its own: ROOT slots for a root, then one for each node."""
    trunk = DecoderTrunk(model)
    return Runner(trunk, KVPool(trunk.kv_shape, ROOT + nodes, 1, trunk.dtype, trunk.device))


def head_cost(head: SelfDraftHead) -> Cost:
    """A level of the self-draft head over n states."""
    device = head.tokens.weight.device

    def level(size: int) -> None:
        state = head.tokens.weight[:1].expand(size, -1)
        codes = torch.zeros(size, dtype=torch.int64, device=device)
        head.level_logits(state, head.step(0, state, codes), 1).float().log_softmax(-1)

    return measured(level, SIZES, device)


def measured(work: Callable[[int], None], sizes: tuple[int, ...], device: torch.device) -> Cost:
    """The fastest of some runs at each size after one to warm up, sizes ascending; none that would
    spend more than BUDGET_S.
    """
    began = time.perf_counter()
    work(sizes[0])
    found: list[float] = []
    for number, size in enumerate(sizes):
        if found:
            ahead_s = 1e-3 * RUNS * found[-1] * size / sizes[number - 1]
            if time.perf_counter() - began + ahead_s > BUDGET_S:
                break
        found.append(min(_run_ms(work, size, device) for _ in range(RUNS)))
    return Cost(sizes[: len(found)], tuple(found))


def _run_ms(work: Callable[[int], None], size: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work(size)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) * 1e3
