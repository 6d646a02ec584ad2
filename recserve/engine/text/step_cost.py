"""The cost of a text step on this machine, measured at some sizes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from recserve.core.draft_policy import Cost
from recserve.engine.runtime.runner import DecoderAdapter, Runner
from recserve.kernels.cache.kv_pool import KVPool
from recserve.kernels.tree import root_branch
from recserve.kernels.tree_batch import Prefixes, TreeBatch
from recserve.models.inputs import NodeInputs
from recserve.models.language_model import LanguageModel

SIZES = (1, 4, 16, 64)
PREFIX = 64
RUNS = 3


def step_clock(device: torch.device) -> Callable[[], float]:
    """Returns a clock in seconds. On a CPU it is the thread's clock, which excludes other
    processes.
    """
    return time.thread_time if device.type == "cpu" else time.perf_counter


@torch.inference_mode()
def text_step_cost(model: LanguageModel) -> Cost:
    """Measures the forward pass and logits of n tree nodes under a short prefix.

    The cost of a size is the fastest of RUNS runs after a warm-up run.
    """
    adapter, last = DecoderAdapter(model), SIZES[-1]
    runner = Runner(
        adapter, KVPool(adapter.kv_shape, PREFIX + last, 1, adapter.dtype, adapter.device)
    )
    device = runner.pool.keys.device
    slots, now = torch.arange(PREFIX + last, device=device), step_clock(device)

    def forward_ms(size: int) -> float:
        tokens = torch.zeros(size, dtype=torch.int64, device=device)
        tree = root_branch(tokens, torch.arange(size + 1, device=device))
        prefixes = Prefixes.of([slots[:PREFIX]])
        own = slots[PREFIX : PREFIX + size]
        batch = TreeBatch(tree, None, own, prefixes, inputs=NodeInputs(tokens))
        began = now()
        model.logits(runner.forward([batch])[0])
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (now() - began) * 1e3

    times = [min([forward_ms(size) for _ in range(RUNS + 1)][1:]) for size in SIZES]
    return Cost(SIZES, tuple(times))
