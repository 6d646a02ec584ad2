"""The self-draft head: a small recurrent network that predicts a semantic id from one forward pass.

    s_0 = hidden state of the last root token
    s_l = tanh(W_l e(c_{l-1}) + U_l s_{l-1} + b_l)        logits_l = head_l(h_l + s_l)

h_l is the target's hidden state at the l-th placeholder, a learned vector that follows the root. A
head without placeholders has h_l = s_0. As the drafter of `speculative` it needs none: the target
itself scores level 0, and the head drafts levels 1 to L - 1. As `nezha` it decodes alone.
Source: NEZHA, arXiv 2511.18793, section 4, and its public code.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recserve.kernels import dispatch
from recserve.kernels.cpu.native import Panels
from recserve.kernels.trie.native_search import Cell, LevelCodes, NativeSearch
from recserve.models.drafters.draft_network import (
    RECURRENT,
    DraftNetwork,
    SelfDraftConfig,
    load_network,
)
from recserve.models.drafters.draft_network import save_network as save_self_draft
from recserve.models.recommender import Recommender


class SelfDraftHead(DraftNetwork):
    """Code embeddings, one recurrent cell per level, and output codes."""

    kind = RECURRENT

    def __init__(self, config: SelfDraftConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.cells = nn.ModuleList(nn.RNNCell(size, size) for _ in config.codebook_sizes[1:])
        if config.placeholders:
            levels = len(config.codebook_sizes)
            self.placeholders = nn.Parameter(torch.randn(levels, size) * size**-0.5)

    @torch.no_grad()
    def pack(self) -> None:
        """Packs the weights for this CPU; training drops the packed form."""
        if not dispatch.in_native(self.head.weight):
            return
        levels = range(len(self.config.codebook_sizes))
        cells = [
            Cell(Panels.of(self._cell(level).weight_hh, None), self._level_inputs(level))
            for level in levels[:-1]
        ]
        codes = [LevelCodes.of(self.codes_of_level(level)) for level in levels]
        self.search = NativeSearch(codes, cells)

    @property
    def first_level(self) -> int:
        """With placeholders the head predicts all levels, without them all but the first."""
        return 0 if self.config.placeholders else 1

    def contexts(self, last_hidden: Tensor, placeholder_states: Tensor | None = None) -> Tensor:
        """Returns h of each level [B, L, E].

        Args:
            last_hidden: [B, E].
            placeholder_states: [B, L, E]. None: h is the root's state at each level.
        """
        if placeholder_states is not None:
            return placeholder_states
        return last_hidden[:, None].expand(-1, len(self.config.codebook_sizes), -1)

    def first_state(self, last_hidden: Tensor) -> Tensor:
        """Returns s_0, the root's state [B, E]."""
        return last_hidden

    def step(self, level: int, state: Tensor, codes: Tensor) -> Tensor:
        """Returns the state [n, E] after a code.

        Args:
            level: Level of the code.
            state: [n, E].
            codes: [n].
        """
        inputs = F.embedding(codes, self._level_inputs(level))
        return torch.tanh(torch.addmm(inputs, state, self._cell(level).weight_hh.T))

    def level_logits(self, context: Tensor, state: Tensor, level: int) -> Tensor:
        """Returns raw logits [n, C_level] of one level's codes.

        Args:
            context: [n, E], h of the level, or s_0 without placeholders.
            state: [n, E].
            level: The level.
        """
        return F.linear(context + state, self.codes_of_level(level))

    def _cell(self, level: int) -> nn.RNNCell:
        cell = self.cells[level]
        assert isinstance(cell, nn.RNNCell)
        return cell

    def _level_inputs(self, level: int) -> Tensor:
        """Returns what each code of a level adds to the next state, [C_level, E]."""
        cell = self._cell(level)
        return self.cached(
            f"inputs {level}",
            lambda: F.linear(
                self.inputs_of_level(level), cell.weight_ih, cell.bias_ih + cell.bias_hh
            ),
        )


def load_self_draft(directory: Path | str, target: Recommender) -> SelfDraftHead:
    """Reads what `save_self_draft` wrote, in eval mode, on the target's device.

    Raises:
        ValueError: If the files are damaged or were made for another target.
    """
    return load_network(SelfDraftHead, directory, target)


__all__ = ["SelfDraftConfig", "SelfDraftHead", "load_self_draft", "save_self_draft"]
