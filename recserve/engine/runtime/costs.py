"""What a forward of a model costs on this machine."""

from __future__ import annotations

import torch

from recserve.core.cost import Cost, measured
from recserve.engine.runtime.networks import DecoderTrunk
from recserve.engine.runtime.runner import Piece, Runner
from recserve.kernels.paged_kv import KVPool
from recserve.kernels.tree import root_branch
from recserve.models.inputs import NodeInputs
from recserve.models.language_model import LanguageModel
from recserve.models.recommender import Recommender

SIZES = (1, 16, 64, 256, 1024)
ROOT = 64


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
