"""Level heads as drafter: every level of a prefix is predicted from the root, independently.

    logits_l = E_l (h + silu(W_l h))        h: the target's hidden state at the last root token

The heads belong to the recommender and are trained with it by cross-entropy. They cost one product
for all levels. Independent predictions are weak: the head of nezha.py needs fewer nodes for the
same proof, but this one needs no training. Source: Medusa (arXiv 2401.10774, section 2.2);
comparison as drafters: AtSpeed, ICLR 2025.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from recserve.kernels import dispatch
from recserve.kernels.trie.native_search import LevelCodes, NativeSearch
from recserve.models.drafters.calibration import Calibration
from recserve.models.recommender import Recommender


class LevelDraftHead:
    """A recommender's current level heads as a draft head.

    Attributes:
        calibration: Calibration of its drafts. None means not measured.

    Raises:
        ValueError: If the recommender has no level heads.
    """

    def __init__(self, target: Recommender, calibration: Calibration | None = None) -> None:
        self.tables = target.level_tables()
        sizes = target.config.codebook_sizes
        self._codes = [self.tables.codebooks[level, :size] for level, size in enumerate(sizes)]
        self.calibration = calibration
        self.search: NativeSearch | None = None
        self.placeholders: None = None

    @torch.no_grad()
    def pack(self) -> None:
        """Packs the codes for this CPU."""
        if dispatch.in_native(self.tables.codebooks):
            self.search = NativeSearch(list(map(LevelCodes.of, self._codes)))

    def contexts(self, last_hidden: Tensor, placeholder_states: Tensor | None = None) -> Tensor:
        """Returns what each level reads of the root, [B, L, E]. last_hidden: [B, E]."""
        return self.tables.states(last_hidden)

    def first_state(self, last_hidden: Tensor) -> Tensor:
        """Returns [B, E], which level heads do not use."""
        return last_hidden

    def step(self, level: int, state: Tensor, codes: Tensor) -> Tensor:
        """Returns the state [n, E] unchanged, because level heads do not use earlier codes."""
        return state

    def level_logits(self, context: Tensor, state: Tensor, level: int) -> Tensor:
        """Returns raw logits [n, C_level] of one level's codes. context: [n, E]."""
        return F.linear(context, self._codes[level])
