"""What a text step costs by its nodes, measured on this machine with these weights.

Small sizes are what is decided between, so they are measured whatever they take, and larger ones
while time is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from recserve.core.cost import Cost
from recserve.engine.runtime.costs import ROOT, scratch_runner
from recserve.engine.runtime.runner import Piece
from recserve.kernels.tree import root_branch
from recserve.models.inputs import NodeInputs
from recserve.models.language_model import LanguageModel

SMALL, LARGE = (1, 4, 16), (64, 256, 1024)
RUNS = 3
BUDGET_S = 0.5


def step_clock(device: torch.device) -> Callable[[], float]:
    """Seconds. On a CPU the thread's own: what other processes take is no cost of a step."""
    return time.thread_time if device.type == "cpu" else time.perf_counter


def text_cost(model: LanguageModel) -> Cost:
    """Forward and logits of n nodes under a short root: the fastest of RUNS after one to warm up.

    At least the sizes of SMALL; a larger one if BUDGET_S is not spent once it is done, as the last
    size lets expect.
    """
    runner = scratch_runner(model, LARGE[-1])
    device = runner.pool.keys.device
    slots = torch.arange(ROOT + LARGE[-1], device=device)
    now = step_clock(device)

    @torch.inference_mode()
    def forward_ms(size: int) -> float:
        tokens = torch.zeros(size, dtype=torch.int64, device=device)
        tree = root_branch(tokens, torch.arange(size + 1, device=device))
        piece = Piece(tree, NodeInputs(tokens), None, slots[ROOT : ROOT + size], (slots[:ROOT],))
        began = now()
        model.logits(runner.forward([piece])[0])
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (now() - began) * 1e3

    began = now()
    sizes: list[int] = []
    found: list[float] = []
    for size in (*SMALL, *LARGE):
        if size in LARGE:
            ahead_s = 1e-3 * (RUNS + 1) * found[-1] * size / sizes[-1]
            if now() - began + ahead_s > BUDGET_S:
                break
        forward_ms(size)
        sizes.append(size)
        found.append(min(forward_ms(size) for _ in range(RUNS)))
    return Cost(tuple(sizes), tuple(found))
