"""Mask tokens with drawn weights."""

from weakref import WeakKeyDictionary

import torch

from recserve.drafters.mask_tokens.drafter import LinearMaskTokensDrafter, MaskTokensDrafter
from recserve.drafters.mask_tokens.network import MaskTokens, MaskTokensConfig

_networks: WeakKeyDictionary = WeakKeyDictionary()


def mask_network(model, masks: int = 3, rank: int = 4, seed: int = 0) -> MaskTokens:
    """Returns mask tokens whose updates are as large as the products that they change."""
    torch.manual_seed(seed)
    network = MaskTokens(MaskTokensConfig(model.config.decoder, masks, rank, 2.0 * rank))
    network.start_from(model)
    for name, weight in network.named_parameters():
        if ".ups." in name:
            torch.nn.init.normal_(weight, std=0.5)
    return network.requires_grad_(False).eval()


def mask_tokens(model, quadratic: bool = True) -> MaskTokensDrafter:
    """Returns a drafter. Both layouts of a model share one network, as an engine requires."""
    if model not in _networks:
        _networks[model] = mask_network(model)
    kind = MaskTokensDrafter if quadratic else LinearMaskTokensDrafter
    return kind(_networks[model], model)
