"""Block drafters with drawn weights, for tests."""

from dataclasses import replace

import torch

from recserve.drafters.block.drafter import BlockDrafter
from recserve.drafters.block.heads import ConvConfig, MarkovConfig, SelectorConfig
from recserve.drafters.block.network import Block, BlockConfig
from recserve.models.decoder import RMSNorm

# What makes a DFlash drafter another variant.
VARIANTS = {
    "dflash": {},
    "jetspec": {"causal": (True, True)},
    "mixed": {"causal": (True, False)},
    "windows": {"causal": (True, False), "windows": (7, 0)},
    "dflash2": {"conv": ConvConfig(2, 8), "selector": SelectorConfig(6, 5)},
    "dspark": {"markov": MarkovConfig(6), "from_anchor": True},
    "dspark-gated": {"markov": MarkovConfig(6, "gated"), "from_anchor": True},
    "dspark-rnn": {"markov": MarkovConfig(6, "rnn"), "from_anchor": True},
}


def block_network(model, variant: str = "dflash", seed: int = 0, fields=None) -> Block:
    """Returns a network of two layers and blocks of five rows, with drawn weights."""
    torch.manual_seed(seed)
    target, words = model.config.decoder, model.config.vocab_size
    chosen = {"causal": (False, False)} | VARIANTS[variant] | (fields or {})
    config = BlockConfig(
        decoder=replace(target, num_layers=2, qk_norm=True),
        target_size=target.hidden_size,
        target_layers=(0, target.num_layers // 2, target.num_layers),
        vocab_size=words,
        block_size=5,
        mask_token=words - 1,
        **{"draft_vocab_size": words} | chosen,
    )
    network = Block(config).requires_grad_(False).eval()
    for norm in (m for m in network.modules() if isinstance(m, RMSNorm)):
        norm.weight.add_(0.3 * torch.randn(norm.weight.shape))
    for name, weight in network.named_parameters():
        # Weights that training starts at zero or at the identity.
        if "conv" in name or name.startswith(("markov.", "selector.", "mask_embedding")):
            weight.add_(0.5 * torch.randn(weight.shape))
    if network.token_map is not None:
        network.token_map.copy_(torch.arange(0, 2 * config.draft_vocab_size, 2))
    return network


def block(model, variant: str = "dflash", seed: int = 0, fields=None, **sizes) -> BlockDrafter:
    """Returns a drafter with the network of `block_network`."""
    network = block_network(model, variant, seed, fields)
    return BlockDrafter(network, model, **{"num_nodes": 12, "num_candidates": 6} | sizes)
