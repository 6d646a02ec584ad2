"""The MLP draft head: one small network per level reads the root's state and all earlier codes.

    z_l = A_l h + sum over j < l of B_lj e(c_j) + b_l        logits_l = E_l (h + W_l silu(z_l))

h is the target's hidden state at the last root token. Everything but silu is a product of a weight
and a code or a weight and the root. So a step adds one row of a table, and a level costs one
product with the table E_l W_l [C_level, E].
Source: per-level MLP heads on (context, prefix), SID-MLP, arXiv 2605.12617.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recserve.models.drafters.draft_network import DraftNetwork, SelfDraftConfig


class MlpDraftHead(DraftNetwork):
    """One hidden layer per level, whose input is split by what it comes from.

    The state holds the sums over the codes so far, for all levels at once: [n, (L - 1) * E]. A
    context holds A_l h + b_l and the logits E_l h, padded to the largest codebook.
    """

    kind = "mlp"

    def __init__(self, config: SelfDraftConfig) -> None:
        super().__init__(config)
        size, later = config.hidden_size, len(config.codebook_sizes) - 1
        self.roots = nn.Linear(size, later * size)
        # by_code[j] maps a code of level j to all levels below it, L - 1 - j of them
        self.by_code = nn.ModuleList(
            nn.Linear(size, (later - level) * size, bias=False) for level in range(later)
        )
        self.outputs = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(later))

    def contexts(self, last_hidden: Tensor, placeholder_states: Tensor | None = None) -> Tensor:
        """Returns [B, L, E + C]: what the root adds to z, and the root's logits.

        Level 0, which the head does not predict, is 0. last_hidden: [B, E].
        """
        batch, size = last_hidden.shape
        later = len(self.config.codebook_sizes) - 1
        logits = self.root_logits(last_hidden[:, None].expand(-1, later, -1))
        sums = self.roots(last_hidden).view(batch, later, size)
        return F.pad(torch.cat([sums, logits], dim=2), (0, 0, 1, 0))

    def first_state(self, last_hidden: Tensor) -> Tensor:
        """Returns [B, (L - 1) * E] zeros: no code was added yet. last_hidden: [B, E]."""
        batch, size = last_hidden.shape
        return last_hidden.new_zeros(batch, (len(self.config.codebook_sizes) - 1) * size)

    def step(self, level: int, state: Tensor, codes: Tensor) -> Tensor:
        """Adds a code to the sums of all later levels.

        Args:
            level: Level of the code.
            state: [n, (L - 1) * E].
            codes: [n].
        """
        return state + F.embedding(codes, self._sums(level))

    def level_logits(self, context: Tensor, state: Tensor, level: int) -> Tensor:
        """Returns raw logits [n, C_level] of one level's codes, below the first level.

        Args:
            context: [n, E + C].
            state: [n, (L - 1) * E].
            level: The level.
        """
        size, count = self.config.hidden_size, self.config.codebook_sizes[level]
        own = state[:, (level - 1) * size : level * size]
        hidden = F.silu(context[:, :size] + own)
        return context[:, size : size + count] + F.linear(hidden, self._codes(level))

    def _sums(self, level: int) -> Tensor:
        """Returns what each code of a level adds to the state, [C_level, (L - 1) * E]."""
        size, linear = self.config.hidden_size, self.by_code[level]
        assert isinstance(linear, nn.Linear)
        return self.cached(
            f"sums {level}",
            lambda: F.pad(linear(self.inputs_of_level(level)), (level * size, 0)),
        )

    def _codes(self, level: int) -> Tensor:
        """Returns the codes that silu(z) is compared with, E_l W_l: [C_level, E]."""
        linear = self.outputs[level - 1]
        assert isinstance(linear, nn.Linear)
        return self.cached(f"codes {level}", lambda: self.codes_of_level(level) @ linear.weight)
