"""Hydra drafters with drawn weights."""

import torch

from recserve.models.decoder import FINAL_LAYER, RMSNorm
from recserve.models.drafters.hydra import Hydra, HydraConfig
from recserve.speculation.drafters.hydra import HydraDrafter


def hydra_network(model, seed: int = 0, **fields) -> Hydra:
    """Returns heads with drawn weights; `fields` replace those of their configuration."""
    torch.manual_seed(seed)
    config = HydraConfig(
        **{
            "decoder": model.config.decoder,
            "vocab_size": model.config.vocab_size,
            "num_heads": 3,
            "num_layers": 3,
            "layer": FINAL_LAYER,
        }
        | fields
    )
    network = Hydra(config).requires_grad_(False).eval()
    for norm in (m for m in network.modules() if isinstance(m, RMSNorm)):
        norm.weight.add_(0.3 * torch.randn(norm.weight.shape))
    return network


def hydra(model, seed: int = 0, **fields) -> HydraDrafter:
    """Returns a drafter with drawn heads and a small tree."""
    return HydraDrafter(hydra_network(model, seed, **fields), model, width=3, num_nodes=12)
