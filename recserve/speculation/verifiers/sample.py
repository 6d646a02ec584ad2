"""Sample and walk: draw the next token from the target, go to the child that carries it.

The draft cannot influence what is drawn, only how many draws one forward serves, so the rule is
exact for every draft; and because the noise is keyed by seed and absolute position, the text is the
same token for token as without a draft. The chance to stay in the tree at a node is the target's
mass on its children, which is also what accepting children one after another gives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recserve.kernels import dispatch
from recserve.kernels.accept_reference import Keys
from recserve.kernels.noise import gumbel, gumbel_of_tokens
from recserve.speculation.sampling import largest
from recserve.speculation.verifier import Accepted, ScoredTrees, Verifier
from recserve.speculation.verifiers.path import follow

SPARSE_NOISE_DIVISOR = 8  # share of the vocabulary under which tokens are looked up one by one


class SampleRule(Verifier):
    """The default rule."""

    name = "sample"

    def verify(self, scored: ScoredTrees) -> Accepted:
        """The path of the target's own draws."""
        if scored.everywhere:
            return _sample_everywhere(scored)

        def draw(nodes: Tensor, trees: Tensor) -> Tensor:
            positions = scored.lengths[trees] + scored.tree.depths[nodes]
            return draw_tokens(scored.target(nodes), scored.seeds[trees], positions)

        return follow(scored, draw)


def _sample_everywhere(scored: ScoredTrees) -> Accepted:
    """A token at every node, then the walk: launches on the device and nothing else."""
    tree, logits, temperatures = scored.tree, scored.logits, scored.temperatures
    if logits is None or temperatures is None:
        # At temperature 0 the target itself leaves one token.
        logits = scored.target(torch.arange(tree.num_nodes, device=tree.tokens.device))
        temperatures = torch.ones_like(scored.seeds, dtype=torch.float32)
    keys = Keys(scored.seeds, scored.lengths - 1)
    walk = dispatch.accept(logits, tree, keys, temperatures, scored.depth)
    return Accepted(walk.nodes, walk.lengths, walk.bonus)


def draw_tokens(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """One token per row by Gumbel-max, ties to the lowest token.

    logits [m, V], -inf where banned; seeds, positions [m]. Returns [m].
    """
    possible = int((logits > float("-inf")).sum(1).max())
    if possible > logits.shape[1] // SPARSE_NOISE_DIVISOR:
        return largest(logits + gumbel(seeds, positions, logits.shape[1]))
    # Noise costs more than finding the few tokens that can win, and is the same for each of them.
    tokens = logits.topk(possible).indices.sort().values
    noise = gumbel_of_tokens(seeds, positions, tokens)
    best = (logits.gather(1, tokens) + noise).argmax(-1, keepdim=True)
    return tokens.gather(1, best)[:, 0]
