"""Level heads as drafter: every level of a prefix guessed from the root, without the codes before.

    logits_l = E_l (h + silu(W_l h))        h: the target's hidden state at the last root token

They are the recommender's own, trained with it by cross-entropy, and cost one product for all
levels. Guesses that know nothing of each other are weak: the head of nezha.py needs fewer nodes for
the same proof, and this one needs no training.
Source: Medusa (arXiv 2401.10774, section 2.2); their comparison as drafters: AtSpeed, ICLR 2025.
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
    """A recommender's level heads as they are now.

    calibration: what drafts of them are worth, None where it was not measured. Raises ValueError if
    the recommender has no level heads.
    """

    def __init__(self, target: Recommender, calibration: Calibration | None = None) -> None:
        self.tables = target.level_tables()
        sizes = target.config.codebook_sizes
        self._codes = [self.tables.codebooks[level, :size] for level, size in enumerate(sizes)]
        self.calibration = calibration
        self.search: NativeSearch | None = None

    @torch.no_grad()
    def pack(self) -> None:
        """Lay the codes out for this CPU."""
        if dispatch.in_native(self.tables.codebooks):
            self.search = NativeSearch(list(map(LevelCodes.of, self._codes)))

    def contexts(self, last_hidden: Tensor) -> Tensor:
        """[B, L, E] what each level reads of the root. last_hidden [B, E]."""
        return self.tables.states(last_hidden)

    def step(self, level: int, state: Tensor, codes: Tensor) -> Tensor:
        """[n, E] the state, which nobody reads: there is no way for a code to be heard of."""
        return state

    def level_logits(self, context: Tensor, state: Tensor, level: int) -> Tensor:
        """[n, C_level] raw logits of one level's codes. context [n, E]."""
        return F.linear(context, self._codes[level])
