"""Mask tokens with a sampler head: several tokens ahead in the target's own forward pass.

    target:   ... x  m1  m2  m3        the target's logits at x give the next token, y
                     z1  z2  z3        states of the mask tokens
    sampler:  s_i = block(block([embedding(token before); z_i])),  logits = target's head(s_i)
              block = Linear, SiLU, LayerNorm

The token before z1's is y. The token before z_i's is the one drafted from z_(i-1).

Source: Samragh et al. (arXiv 2507.11851), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recserve.drafters.mask_tokens.gated_lora import GatedLora, LowRank
from recserve.models.config import DecoderConfig
from recserve.models.language_model import LanguageModel


@dataclass(frozen=True)
class MaskTokensConfig:
    """Sizes of mask tokens and their sampler head.

    Attributes:
        decoder: The target's decoder.
        num_masks: k, tokens that are drafted.
        rank: r of the low-rank updates.
        alpha: An update is multiplied by alpha / r.
    """

    decoder: DecoderConfig
    num_masks: int
    rank: int
    alpha: float


class SamplerBlock(nn.Module):
    """Linear, SiLU, LayerNorm."""

    def __init__(self, inner: int, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inner, size)
        self.norm = nn.LayerNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [..., inner] to [..., size]."""
        out: Tensor = self.norm(F.silu(self.linear(x)))
        return out


class MaskTokens(nn.Module):
    """Mask tokens with their low-rank updates, and the sampler head."""

    def __init__(self, config: MaskTokensConfig) -> None:
        super().__init__()
        self.config = config
        self.lora = GatedLora(config.decoder, config.num_masks, config.rank, config.alpha)
        size = config.decoder.hidden_size
        self.sampler = nn.ModuleList([SamplerBlock(2 * size, size), SamplerBlock(size, size)])

    @torch.no_grad()
    def start_from(self, target: LanguageModel) -> None:
        """Initialises the weights; at first the updates are zero.

        A mask's embedding is the mean of all tokens with a little noise. The sampler's last norm
        has the scale of the target's final norm, because the target's head reads both.
        """
        mean, spread = target.tokens.weight.mean(0), target.tokens.weight.std()
        noise = torch.randn_like(self.lora.embeddings)
        self.lora.embeddings.copy_(mean + 0.1 * spread * noise)
        for update in self.lora.modules():
            if isinstance(update, LowRank):
                nn.init.kaiming_uniform_(update.down, a=5**0.5)
        last = self.sampler[-1]
        assert isinstance(last, SamplerBlock)
        last.norm.weight.copy_(target.decoder.norm.weight)

    def sample_states(self, embedded: Tensor, states: Tensor) -> Tensor:
        """Returns states [..., E] for the target's head.

        Args:
            embedded: [..., E] embedding of the token before.
            states: [..., E] final hidden state of the mask token.
        """
        x = torch.cat([embedded, states], dim=-1)
        for block in self.sampler:
            x = block(x)
        return x
