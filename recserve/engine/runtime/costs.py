"""A runner over pages of its own, to measure what forwards of a model cost."""

from __future__ import annotations

from recserve.engine.runtime.networks import DecoderTrunk
from recserve.engine.runtime.runner import Runner
from recserve.kernels.paged_kv import KVPool
from recserve.models.language_model import LanguageModel
from recserve.models.recommender import Recommender

ROOT = 64


def scratch_runner(model: Recommender | LanguageModel, nodes: int) -> Runner:
    """The model over a pool of its own: ROOT slots for a root, then one for each node."""
    trunk = DecoderTrunk(model)
    return Runner(trunk, KVPool(trunk.kv_shape, ROOT + nodes, 1, trunk.dtype, trunk.device))
