"""Cross-entropy over the whole catalogue, without the whole matrix of logits in memory.

Loss and gradients are computed together, one chunk of rows at a time. A chunk of logits stays in
the processor's cache and its memory is reused. On a CPU this gains more than the saved arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _FullSoftmaxLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        items: Tensor,
        targets: Tensor,
        hidden: Tensor,
        chunk: int,
        weights: Tensor | None,
    ) -> Tensor:
        low = torch.bfloat16 if torch.is_autocast_enabled(query.device.type) else torch.float32
        total = query.new_zeros((), dtype=torch.float32)
        query_grad = torch.empty_like(query, dtype=torch.float32)
        items_grad = torch.zeros_like(items, dtype=torch.float32)
        with torch.autocast(query.device.type, enabled=False):
            query, items = query.to(low), items.to(low)
            # Chunk c leaves out the pairs hidden[bounds[c] : bounds[c + 1]].
            bounds = torch.searchsorted(
                hidden[:, 0].contiguous(), torch.arange(0, query.shape[0] + chunk, chunk).to(hidden)
            ).tolist()
            for number, start in enumerate(range(0, query.shape[0], chunk)):
                part, target = query[start : start + chunk], targets[start : start + chunk]
                logits = (part @ items.T).float()
                out = hidden[bounds[number] : bounds[number + 1]]
                logits[out[:, 0] - start, out[:, 1]] = -torch.inf
                own = logits.gather(1, target[:, None])
                peak = logits.amax(-1, keepdim=True)
                shares = logits.sub_(peak).exp_()  # softmax * sums
                sums = shares.sum(-1, keepdim=True)
                each, grad = sums.log() + peak - own, part
                # The gradient of cross-entropy is softmax(logits) minus the one-hot target.
                shares = shares.to(low)
                towards = (shares @ items).float() / sums - items[target]
                if weights is not None:
                    weight = weights[start : start + chunk, None].float()
                    each, towards, grad = each * weight, towards * weight, part * weight
                total += each.sum()
                query_grad[start : start + chunk] = towards
                items_grad += shares.T @ (grad / sums).to(low)
                items_grad.index_add_(0, target, grad.float(), alpha=-1)
        ctx.save_for_backward(query_grad, items_grad)
        return total

    @staticmethod
    def backward(ctx: Any, *scales: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        query_grad, items_grad = ctx.saved_tensors
        return query_grad * scales[0], items_grad * scales[0], None, None, None, None


def full_softmax_loss(
    query: Tensor,
    items: Tensor,
    targets: Tensor,
    hidden: Tensor,
    chunk: int = 128,
    weights: Tensor | None = None,
) -> Tensor:
    """Returns the summed cross-entropy of `softmax(query @ items.T)`.

    Matrix products are in bfloat16 under autocast.

    Args:
        query: [q, E] query vectors.
        items: [I, E] item vectors.
        targets: [q] item rows.
        hidden: [x, 2] pairs (row of `query`, item row) that are left out of the softmax. They are
            sorted by the first number and never contain a target.
        chunk: Rows of `query` that are computed at once.
        weights: [q] weight of each row's cross-entropy; None: 1 each.

    Returns:
        A float32 scalar.
    """
    apply: Callable[..., Tensor] = _FullSoftmaxLoss.apply
    return apply(query, items, targets, hidden, chunk, weights)
