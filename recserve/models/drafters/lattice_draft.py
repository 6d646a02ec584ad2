"""The lattice draft head: independent slots, and a score for each pair of adjacent codes.

    h_l = h + silu(W_l h)        logits_l(p -> c) = <E_l[c], h_l> + <A[p] * V h_l, B[c]>

h is the target's hidden state at the last root token, p the code of level l - 1, and `*` the
elementwise product. All slots are computed in one pass; a step only looks up A[p]. The trie's
children take the place of the 16 best candidates of each slot.
Source: the candidate selector of DFlash2 (vLLM pull request 52816), without its convolutions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recserve.models.drafters.draft_network import DraftNetwork, SelfDraftConfig
from recserve.models.level_heads import LevelHead

RANK = 64  # of the pair scores


class LatticeDraftHead(DraftNetwork):
    """Slot states from the root, and pair scores of low rank.

    The state is A[p] of the last code, [n, RANK]. A context holds V h_l and the logits of the slot,
    padded to the largest codebook.
    """

    kind = "lattice"

    def __init__(self, config: SelfDraftConfig) -> None:
        super().__init__(config)
        size, vocabulary = config.hidden_size, 1 + sum(config.codebook_sizes)
        self.slots = nn.ModuleList(LevelHead(size) for _ in config.codebook_sizes[1:])
        self.predecessors = nn.Embedding(vocabulary, RANK)
        self.successors = nn.Embedding(vocabulary, RANK)
        self.hidden = nn.Linear(size, RANK, bias=False)
        nn.init.normal_(self.successors.weight, std=RANK**-0.5)

    def contexts(self, last_hidden: Tensor, placeholder_states: Tensor | None = None) -> Tensor:
        """Returns [B, L, RANK + C]: V h_l, and the slots' logits.

        Level 0, which the head does not predict, is 0. last_hidden: [B, E].
        """
        if not len(self.slots):
            return last_hidden.new_zeros(last_hidden.shape[0], 1, 1)
        slots = torch.stack([slot(last_hidden) for slot in self.slots], 1)
        return F.pad(torch.cat([self.hidden(slots), self.root_logits(slots)], 2), (0, 0, 1, 0))

    def first_state(self, last_hidden: Tensor) -> Tensor:
        """Returns zeros [B, RANK]: there is no code yet. last_hidden: [B, E]."""
        return last_hidden.new_zeros(last_hidden.shape[0], RANK)

    def step(self, level: int, state: Tensor, codes: Tensor) -> Tensor:
        """Returns A [n, RANK] of codes [n] of a level; earlier codes do not matter."""
        return F.embedding(codes, self.predecessors.weight[self.rows(level)])

    def level_logits(self, context: Tensor, state: Tensor, level: int) -> Tensor:
        """Returns raw logits [n, C_level] of one level's codes, below the first level.

        Args:
            context: [n, RANK + C].
            state: [n, RANK].
            level: The level.
        """
        pairs = F.linear(context[:, :RANK] * state, self.successors.weight[self.rows(level)])
        return context[:, RANK : RANK + pairs.shape[1]] + pairs
