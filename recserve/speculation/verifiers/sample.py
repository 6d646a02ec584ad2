"""The rule `sample`: draws the next token from the target and moves to the child that carries it.

A draft cannot influence the draws, only the number of draws per forward pass, so the rule is exact
for every draft. The noise is keyed by seed and absolute position, so the text equals undrafted
text token for token. The probability of staying in the tree at a node is the target's mass on the
node's children. Trying the children one after another gives the same probability.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recserve.kernels.acceptance import acceptance
from recserve.kernels.acceptance.acceptance import Keys, largest
from recserve.kernels.acceptance.noise import gumbel, gumbel_of_tokens
from recserve.speculation.verifier import Accepted, ScoredTrees, Verifier
from recserve.speculation.verifiers.path import follow

SPARSE_NOISE_DIVISOR = 8  # with at most V // 8 possible tokens, noise is computed for those only


class SampleRule(Verifier):
    """The default rule, for every kind of draft."""

    name = "sample"

    def verify(self, scored: ScoredTrees) -> Accepted:
        """Returns the path of the target's own draws."""
        if scored.fixed_shapes:
            return _sample_everywhere(scored)

        def draw(nodes: Tensor, trees: Tensor) -> Tensor:
            positions = scored.lengths[trees] + scored.tree.depths[nodes]
            return draw_tokens(scored.target(nodes), scored.seeds[trees], positions)

        return follow(scored, draw)


def _sample_everywhere(scored: ScoredTrees) -> Accepted:
    """Draws a token at every node, then walks, in device launches only."""
    tree, logits, temperatures = scored.tree, scored.logits, scored.temperatures
    if logits is None or temperatures is None:
        # The target's logits include the temperature, and allow one token at temperature 0.
        logits = scored.target(torch.arange(tree.num_nodes, device=tree.tokens.device))
        temperatures = torch.ones_like(scored.seeds, dtype=torch.float32)
    keys = Keys(scored.seeds, scored.lengths - 1)
    walk = acceptance.accept(logits, tree, keys, temperatures, scored.depth)
    return Accepted(walk.nodes, walk.lengths, walk.bonus)


def draw_tokens(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draws one token per row by Gumbel-max, ties to the lowest token.

    Args:
        logits: [m, V], -inf at banned tokens.
        seeds: [m] int64.
        positions: [m] int64.

    Returns:
        [m] tokens.
    """
    # A row may have no token left. Whoever knows why ends its text, whatever is drawn.
    possible = max(int((logits > float("-inf")).sum(1).max()), 1)
    if possible > logits.shape[1] // SPARSE_NOISE_DIVISOR:
        return largest(logits + gumbel(seeds, positions, logits.shape[1]))
    # Noise for the whole vocabulary costs more than finding the few possible tokens. Each of them
    # gets the same noise either way.
    tokens = logits.topk(possible).indices.sort().values
    noise = gumbel_of_tokens(seeds, positions, tokens)
    best = (logits.gather(1, tokens) + noise).argmax(-1, keepdim=True)
    return tokens.gather(1, best)[:, 0]
