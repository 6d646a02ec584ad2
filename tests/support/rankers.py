"""A small random ranker, with prefixes and candidates for it."""

import numpy as np
import torch

from recserve.core.request import Prefix
from recserve.models.inputs import NodeInputs
from recserve.models.ranker import Ranker, RankerConfig


def make_ranker() -> Ranker:
    """Returns a random ranker with 60 bound items."""
    torch.manual_seed(0)
    ranker = Ranker(RankerConfig(50, 6, 3, num_types=2, hidden_size=16, head_dim=16))
    ranker.bind_items(torch.randn(60, 6))
    for weight in ranker.parameters():
        if weight.ndim > 1:
            weight.data.mul_(3)
    ranker.eval().freeze_items()
    return ranker


def draw_rows(n: int, group: int, seed: int) -> NodeInputs:
    """Returns n random rows of one token group."""
    g = torch.Generator().manual_seed(seed)
    return NodeInputs(
        torch.randint(0, 60, (n,), generator=g),
        torch.full((n,), group),
        torch.randint(0, 2, (n,), generator=g),
        torch.arange(n),
        torch.randn(n, 3, generator=g),
    )


def ranking_prefix(profile: int, long: int, recent: int, seed: int) -> Prefix:
    """Returns a random prefix with these numbers of rows."""
    parts = [draw_rows(n, group, seed + group) for group, n in enumerate((profile, long, recent))]
    inputs = NodeInputs.cat([p for p in parts if len(p)])
    keys = np.random.default_rng(seed).integers(0, 2**62, len(inputs))
    return Prefix(inputs, keys, shared=profile + long)
