"""Sample and walk: draw the next token from the target, go to the child that carries it.

The draft cannot influence what is drawn, only how many draws one forward serves, so the rule is
exact for every draft; and because the noise is keyed by seed and absolute position, the text is the
same token for token as without a draft. The chance to stay in the tree at a node is the target's
mass on its children, which is also what accepting children one after another gives.
"""

from __future__ import annotations

from torch import Tensor

from recserve.core.text import Accepted, ScoredTrees, TextDraft
from recserve.kernels.noise import gumbel
from recserve.verify.path import follow


class SampleRule:
    """The default rule."""

    exact = True

    def check(self, draft: TextDraft) -> None:
        """Every draft will do."""

    def verify(self, scored: ScoredTrees) -> Accepted:
        """The path of the target's own draws (Gumbel-max)."""

        def draw(nodes: Tensor, trees: Tensor) -> Tensor:
            logits = scored.target(nodes)
            positions = scored.lengths[trees] + scored.tree.depths[nodes]
            noise = gumbel(scored.seeds[trees], positions, scored.vocab_size)
            return (logits + noise).argmax(-1)

        return follow(scored, draw)
