"""Ranks a drafter's guesses with the target's own noise at their position.

Under the rule `sample` the target takes argmax(logits / temperature + noise), with noise keyed by
seed and position. A drafter that ranks its own logits the same way predicts this draw, not the
mode of the distribution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recserve.kernels.noise import gumbel_of_tokens

NUM_NOISY_TOKENS = 128  # only this many likeliest tokens get noise; others are hardly ever drawn


def best_with_noise(
    logits: Tensor,
    scale: Tensor,
    seeds: Tensor,
    positions: Tensor,
    width: int,
    token_map: Tensor | None = None,
) -> Tensor:
    """Returns the columns of the `width` largest values of `logits + scale * noise`, largest first.

    Only the NUM_NOISY_TOKENS likeliest columns compete, or `width` of them if that is more.

    Args:
        logits: [n, V].
        scale: [n] temperature for raw logits, 1 for divided logits, 0 for no noise.
        seeds: [n] int64.
        positions: [n] int64.
        width: Number of columns to return.
        token_map: [V] token id of each column; None means the column index itself.

    Returns:
        [n, width] column indices.
    """
    best = logits.topk(min(max(NUM_NOISY_TOKENS, width), logits.shape[1]))
    tokens = best.indices if token_map is None else token_map[best.indices]
    noise = gumbel_of_tokens(seeds, positions, tokens)
    order = torch.add(best.values, noise * scale[:, None]).topk(width).indices
    return best.indices.gather(1, order)


def likeliest_with_noise(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Returns the `width` likeliest columns of each row, and their log-probabilities.

    A row with a temperature above 0 is divided by it and gets the target's noise. Only the
    NUM_NOISY_TOKENS likeliest columns then compete, or `width` of them if that is more.

    Args:
        logits: [n, V].
        temperatures: [n] float32.
        seeds: [n] int64.
        positions: [n] int64.
        width: Number of columns to return.

    Returns:
        [n, width] column indices and [n, width] float32 log-probabilities, largest first.
    """
    best = logits.float().topk(min(max(NUM_NOISY_TOKENS, width), logits.shape[1]))
    noise = gumbel_of_tokens(seeds, positions, best.indices)
    heat = temperatures[:, None]
    scores = best.values / torch.where(heat > 0, heat, 1.0) + noise * (heat > 0)
    chosen = scores.log_softmax(-1).topk(width)
    return best.indices.gather(1, chosen.indices), chosen.values
