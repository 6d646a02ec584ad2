"""Scores of items whose levels are scored independently: the mean of L table entries.

A rank key is one int64 that holds an item and its score. The larger key is the better item; ties
resolve to the lower row. So one `topk` finds the best items, in any order and on any device.
Bytes moved for n items: n * L * (8 for the token + 4 for its log-probability).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 65_536
LANES = 8  # a pass over the items costs the same for 1 to 8 requests
NOTHING = torch.iinfo(torch.int64).min
ROW_BITS = 32
LAST_ROW = 2**ROW_BITS - 1


def keys_of(scores: Tensor, rows: Tensor) -> Tensor:
    """Returns rank keys.

    Args:
        scores: float32, no NaN.
        rows: 0 .. 2**32 - 1, broadcast against scores.
    """
    keys = _ordered(scores.contiguous().view(torch.int32)).long()
    # In place, because the catalogue's keys are the largest tensor of a request.
    keys.bitwise_left_shift_(ROW_BITS).bitwise_or_(LAST_ROW - rows)
    return keys


def rows_of(keys: Tensor) -> Tensor:
    """Returns the item row of each rank key; undefined for NOTHING."""
    rows: Tensor = LAST_ROW - (keys & LAST_ROW)
    return rows


def scores_of(keys: Tensor) -> Tensor:
    """Returns the float32 score of each rank key; undefined for NOTHING."""
    return _ordered((keys >> ROW_BITS).to(torch.int32)).view(torch.float32)


def score_rows(log_probs: Tensor, item_tokens: Tensor, owners: Tensor, rows: Tensor) -> Tensor:
    """Returns the scores of n (request, item) pairs.

    Args:
        log_probs: [B, V] of each token at its own level.
        item_tokens: [I, L].
        owners: [n] request of each pair.
        rows: [n] item row of each pair.

    Returns:
        [n] float32, the mean over the L levels.
    """
    places = item_tokens[rows] + (owners * log_probs.shape[1])[:, None]
    return log_probs.flatten()[places].mean(-1)


def best_of_all(log_probs: Tensor, item_tokens: Tensor, usable: Tensor | None, k: int) -> Tensor:
    """Scores all items and returns the rank keys of the k best of each request.

    Args:
        log_probs: [B, V].
        item_tokens: [I, L].
        usable: [B, I] bool. None means all items.
        k: Items per request.

    Returns:
        [B, k], best first, padded with NOTHING where fewer than k items are usable.
    """
    batch = log_probs.shape[0]
    table = F.pad(log_probs, (0, 0, 0, -batch % LANES)).T.contiguous()
    best = torch.full((batch, k), NOTHING, device=log_probs.device)
    for start in range(0, item_tokens.shape[0], CHUNK):
        tokens = item_tokens[start : start + CHUNK]
        rows = torch.arange(start, start + tokens.shape[0], device=table.device)
        scores = F.embedding_bag(tokens, table, mode="sum")[:, :batch].T / tokens.shape[1]
        keys = keys_of(scores, rows)
        if usable is not None:
            keys.masked_fill_(~usable[:, start : start + CHUNK], NOTHING)
        found = keys.topk(min(k, keys.shape[1]), dim=1).values
        best = torch.cat([best, found], dim=1).topk(k, dim=1).values
    return best


def _ordered(bits: Tensor) -> Tensor:
    """Maps int32 bits of a float to an int32 of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
