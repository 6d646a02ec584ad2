"""Scores of items whose levels are scored independently: the mean of L numbers out of a table.

An item and its score travel as one int64, its rank key: the larger key is the better item, and of
equal scores the lower row. So the best of many are one `topk`, the same for every order and device.
Bytes moved for n items: n * L * (8 of the token + 4 of its log-probability).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 65_536
LANES = 8  # requests that one pass over the items scores at the price of one
NOTHING = torch.iinfo(torch.int64).min
ROW_BITS = 32
LAST_ROW = 2**ROW_BITS - 1


def keys_of(scores: Tensor, rows: Tensor) -> Tensor:
    """Rank keys. scores: float32, no NaN. rows: 0 .. 2**32 - 1, broadcast against scores."""
    keys = _ordered(scores.contiguous().view(torch.int32)).long()
    # In place: the catalogue's keys are the largest thing a request makes.
    keys.bitwise_left_shift_(ROW_BITS).bitwise_or_(LAST_ROW - rows)
    return keys


def rows_of(keys: Tensor) -> Tensor:
    """Item row of each rank key; meaningless for NOTHING."""
    rows: Tensor = LAST_ROW - (keys & LAST_ROW)
    return rows


def scores_of(keys: Tensor) -> Tensor:
    """float32 score of each rank key; meaningless for NOTHING."""
    return _ordered((keys >> ROW_BITS).to(torch.int32)).view(torch.float32)


def score_rows(log_probs: Tensor, item_tokens: Tensor, owners: Tensor, rows: Tensor) -> Tensor:
    """Scores of n (request, item) pairs.

    log_probs: [B, V] of each token at its own level. item_tokens: [I, L]. owners, rows: [n].
    Returns [n] float32, the mean over the L levels.
    """
    places = item_tokens[rows] + (owners * log_probs.shape[1])[:, None]
    return log_probs.flatten()[places].mean(-1)


def best_of_all(log_probs: Tensor, item_tokens: Tensor, usable: Tensor | None, k: int) -> Tensor:
    """Rank keys of the k best items of each request, all items scored.

    log_probs: [B, V]. item_tokens: [I, L]. usable: [B, I] bool, None: all. Returns [B, k], best
    first, NOTHING where fewer than k are usable.
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
    """int32 bits of a float to an int32 of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
