"""`recserve serve` with faults of the engine.

    python -m benchmarks.campaign.faulty_server CONFIG.json

Files in the folder of CONFIG.json choose the faults:

- `poisoned`: a step that includes a request for POISON items raises an error.
- `lost`: a CUDA error that stays. Every forward pass and every synchronisation raises it.
- `once`: a CUDA error that passes. The next forward pass raises it and removes the file.

A machine without a GPU raises the same exception, torch.AcceleratorError.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from recserve.config import ServerConfig
from recserve.engine.round_scheduler import RoundScheduler
from recserve.engine.runner import Runner
from recserve.kernels.tree_batch import TreeBatch
from recserve.models.decoder import AuxHiddenStates
from recserve.server.run import serve

POISON = 13  # items that a poisoned request asks for; no other one asks for so many
POISONED, LOST, ONCE = "poisoned", "lost", "once"
ON_CUDA = SimpleNamespace(pool=SimpleNamespace(keys=SimpleNamespace(is_cuda=True, device=0)))


def main() -> int:
    """Serves with faults."""
    config = Path(sys.argv[1])
    forward, check_device, schedule = (
        Runner.forward,
        Runner.check_device,
        RoundScheduler.schedule,
    )

    def fail_if_lost(device: object = None) -> None:
        if (config.parent / LOST).exists():
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def faulty(
        self: Runner,
        parts: Sequence[TreeBatch],
        aux_states: AuxHiddenStates | None = None,
    ) -> Sequence[Tensor]:
        fail_if_lost()
        if (config.parent / ONCE).exists():
            (config.parent / ONCE).unlink()
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")
        return forward(self, parts, aux_states)

    def poisoned_schedule(self: RoundScheduler) -> Any:
        poisoned = any(getattr(one.request, "k", 0) == POISON for one in self.admitted)
        if poisoned and (config.parent / POISONED).exists():
            raise RuntimeError("a poisoned request")
        return schedule(self)

    with (
        mock.patch.object(Runner, "forward", faulty),
        mock.patch.object(Runner, "check_device", lambda _: check_device(ON_CUDA)),
        mock.patch.object(torch.cuda, "synchronize", fail_if_lost),
        mock.patch.object(RoundScheduler, "schedule", poisoned_schedule),
    ):
        return serve(ServerConfig.load({}, config))


if __name__ == "__main__":
    sys.exit(main())
