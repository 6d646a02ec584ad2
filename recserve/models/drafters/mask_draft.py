"""The mask-token draft head: placeholders in the root's forward pass, and a sampler below them.

    z_l = A m_l + B_l e(c_{l-1}) + b        logits_l = <E_l, m_l + W_l silu(z_l)>

m_l is the target's hidden state at the l-th mask token, a learned vector that follows the root.
There is one for each level below the first. The sampler gives each slot the code before it. The
target's own states do not see the mask tokens, so its scores stay the same.
Source: Samragh et al. 2025, arXiv 2507.11851, without the gated LoRA in the target.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recserve.models.drafters.draft_network import DraftNetwork, SelfDraftConfig


class MaskDraftHead(DraftNetwork):
    """Mask tokens, and a two-layer sampler per level.

    The state is B_l e(c) of the last code, [n, E]. A context holds A m_l + b and the logits of m_l,
    padded to the largest codebook.
    """

    kind = "mask_tokens"

    def __init__(self, config: SelfDraftConfig) -> None:
        super().__init__(replace(config, placeholders=True))
        size, later = config.hidden_size, len(config.codebook_sizes) - 1
        self.masks = nn.Linear(size, size)
        self.by_code = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(later))
        self.outputs = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(later))
        self.placeholders = nn.Parameter(torch.randn(later, size) * size**-0.5)

    def contexts(self, last_hidden: Tensor, placeholder_states: Tensor | None = None) -> Tensor:
        """Returns [B, L, E + C]: A m_l + b, and the logits of m_l.

        Level 0, which the head does not predict, is 0.

        Args:
            last_hidden: [B, E], not used.
            placeholder_states: [B, L - 1, E] states m of the mask tokens.

        Raises:
            ValueError: If there are no placeholder states.
        """
        if placeholder_states is None:
            raise ValueError("mask tokens need the target's states at the placeholders; got none")
        read = [self.masks(placeholder_states), self.root_logits(placeholder_states)]
        return F.pad(torch.cat(read, dim=2), (0, 0, 1, 0))

    def first_state(self, last_hidden: Tensor) -> Tensor:
        """Returns zeros [B, E]: there is no code yet. last_hidden: [B, E]."""
        return torch.zeros_like(last_hidden)

    def step(self, level: int, state: Tensor, codes: Tensor) -> Tensor:
        """Returns B e(c) [n, E] of codes [n] of a level; earlier codes do not matter."""
        return F.embedding(codes, self._inputs(level))

    def level_logits(self, context: Tensor, state: Tensor, level: int) -> Tensor:
        """Returns raw logits [n, C_level] of one level's codes, below the first level.

        Args:
            context: [n, E + C].
            state: [n, E].
            level: The level.
        """
        size, count = self.config.hidden_size, self.config.codebook_sizes[level]
        hidden = F.silu(context[:, :size] + state)
        return context[:, size : size + count] + F.linear(hidden, self._codes(level))

    def _inputs(self, level: int) -> Tensor:
        """Returns what each code of a level adds to the next z, [C_level, E]."""
        linear = self.by_code[level]
        assert isinstance(linear, nn.Linear)
        return self.cached(f"inputs {level}", lambda: linear(self.inputs_of_level(level)))

    def _codes(self, level: int) -> Tensor:
        """Returns the codes that silu(z) is compared with, E_l W_l: [C_level, E]."""
        linear = self.outputs[level - 1]
        assert isinstance(linear, nn.Linear)
        return self.cached(f"codes {level}", lambda: self.codes_of_level(level) @ linear.weight)
