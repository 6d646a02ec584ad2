"""MTP and P-EAGLE drafters with drawn weights."""

from dataclasses import replace

import torch

from recserve.drafters.eagle.drafter import EagleDrafter
from recserve.drafters.eagle.network import Eagle, EagleConfig
from recserve.drafters.mtp.drafter import MtpDrafter
from recserve.drafters.mtp.network import Mtp, MtpConfig
from recserve.models.decoder import RMSNorm

SIZES = {"width": 3, "depth": 4, "num_nodes": 12}


def mtp(model, qwen: bool = False, seed: int = 0, modules: int = 1, **sizes) -> MtpDrafter:
    """Returns a drafter with DeepSeek's modules, or with Qwen3-Next's."""
    torch.manual_seed(seed)
    target = model.config.decoder
    config = MtpConfig(
        decoder=replace(target, num_layers=modules, qk_norm=qwen),
        vocab_size=model.config.vocab_size,
        feeds_norm=qwen,
        first_token=qwen,
        gated=qwen,
        rotary_dim=target.head_dim // 2 if qwen else None,
        own_head=not qwen,
    )
    return MtpDrafter(drawn(Mtp(config)), model, **SIZES | sizes)


def peagle(model, seed: int = 0, fields=None, **sizes) -> EagleDrafter:
    """Returns a drafter with a P-EAGLE network of two layers."""
    torch.manual_seed(seed)
    target, words = model.config.decoder, model.config.vocab_size
    config = EagleConfig(
        decoder=replace(target, num_layers=2),
        target_size=target.hidden_size,
        target_layers=(0, target.num_layers // 2, target.num_layers),
        vocab_size=words,
        draft_vocab_size=words,
        fused=True,
        mask_token=words - 1,
        **(fields or {}),
    )
    return EagleDrafter(drawn(Eagle(config)), model, **SIZES | sizes)


def drawn(network):
    """Gives the norms and the free parameters of a new network other values than their first."""
    network.requires_grad_(False).eval()
    for norm in (m for m in network.modules() if isinstance(m, RMSNorm)):
        norm.weight.add_(0.3 * torch.randn(norm.weight.shape))
    if isinstance(network, Eagle) and network.config.mask_token is not None:
        network.mask_states.copy_(torch.randn(network.mask_states.shape))
    return network
