"""SpecFormer drafters with drawn weights."""

import torch

from recserve.drafters.specformer.drafter import SpecformerDrafter
from recserve.drafters.specformer.files import one_layer
from recserve.drafters.specformer.network import Specformer, SpecformerConfig
from recserve.models.decoder import FINAL_LAYER, RMSNorm


def specformer(model, seed: int = 0, slots: int = 5, causal: bool = False, **sizes):
    """Returns a SpecFormer drafter with drawn weights, on the model's device."""
    torch.manual_seed(seed)
    layers = (0, 1, model.config.decoder.num_layers - 1, FINAL_LAYER)
    config = SpecformerConfig(one_layer(model), layers, slots, causal)
    network = Specformer(config).requires_grad_(False).eval()
    for norm in (m for m in network.modules() if isinstance(m, RMSNorm)):
        norm.weight.add_(0.3 * torch.randn(norm.weight.shape))
    network = network.to(model.tokens.weight.device)
    return SpecformerDrafter(network, model, **{"width": 12, "num_nodes": 12} | sizes)
