"""A recommender whose trunk is a Llama, and histories for it."""

import numpy as np
import torch

from recserve.core.request import Prefix
from recserve.kernels.trie.trie import build_trie
from recserve.models.config import DecoderConfig, RecommenderConfig
from recserve.models.recommender import Recommender
from tests.support.recommenders import prefix_of


def drawn(module: torch.nn.Module, seed: int) -> None:
    """Sets random weights far from their initial values, including norms and biases."""
    g = torch.Generator().manual_seed(seed)
    for weight in module.parameters():
        spread = torch.randn(weight.shape, generator=g)
        if weight.ndim > 1:
            weight.data.copy_(spread * weight.shape[1] ** -0.5)
        else:
            weight.data.add_(0.3 * spread)


def recommender(seed: int, normalization: str):
    """Returns a model of 300 items with 3 levels of 24 codes; logits spread by about 2."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.unique(torch.randint(0, 24, (300, 3), generator=g), dim=0)
    config = DecoderConfig(32, 2, 4, 2, 8, 48, qk_norm=seed == 2)
    model = Recommender(RecommenderConfig(config, (24, 24, 24), "codes", normalization))
    drawn(model, seed)
    model.head.weight.data.mul_(2)
    model.bind_items(codes)
    return model.eval(), build_trie(codes, model.config.codebook_sizes)


def history(model: Recommender, events: int, seed: int) -> Prefix:
    """Returns a random history of `events` items."""
    rows = np.random.default_rng(seed).integers(0, model.num_bound_items, events)
    return prefix_of(model, rows.tolist())
