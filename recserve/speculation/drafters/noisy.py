"""Guesses ranked as the target will draw: with its own noise at the position they are for.

Under the rule `sample` the target takes argmax(logits / temperature + noise), noise keyed by seed
and position; a drafter that ranks its own logits the same way guesses that draw and not the mode.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recserve.kernels.noise import gumbel_of_tokens

NUM_NOISY_TOKENS = 128  # likeliest tokens that noise is made for; others are hardly ever drawn


def best_with_noise(
    logits: Tensor,
    scale: Tensor,
    seeds: Tensor,
    positions: Tensor,
    width: int,
    token_map: Tensor | None = None,
) -> Tensor:
    """Columns of the `width` largest of `logits + scale * noise`, largest first: [n, width].

    logits [n, V]. scale [n]: the temperature for raw logits, 1 for divided ones, 0 for no noise.
    seeds, positions [n]. token_map [V]: tokens that the columns stand for, None: themselves.
    """
    best = logits.topk(min(max(NUM_NOISY_TOKENS, width), logits.shape[1]))
    tokens = best.indices if token_map is None else token_map[best.indices]
    noise = gumbel_of_tokens(seeds, positions, tokens)
    order = torch.add(best.values, noise * scale[:, None]).topk(width).indices
    return best.indices.gather(1, order)
