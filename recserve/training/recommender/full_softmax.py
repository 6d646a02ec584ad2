"""Cross-entropy over the whole catalogue without ever holding the whole matrix of logits.

Loss and gradients are computed together, a chunk of rows at a time: a chunk of logits stays in the
cache of the processor and its memory is used again, which on a CPU is worth more than the
arithmetic it saves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _FullSoftmaxLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, items: Tensor, targets: Tensor, hidden: Tensor, chunk: int
    ) -> Tensor:
        low = torch.bfloat16 if torch.is_autocast_enabled(query.device.type) else torch.float32
        total = query.new_zeros((), dtype=torch.float32)
        query_grad = torch.empty_like(query, dtype=torch.float32)
        items_grad = torch.zeros_like(items, dtype=torch.float32)
        with torch.autocast(query.device.type, enabled=False):
            query, items = query.to(low), items.to(low)
            bounds = torch.searchsorted(
                hidden[:, 0].contiguous(), torch.arange(0, query.shape[0] + chunk, chunk).to(hidden)
            ).tolist()
            for number, start in enumerate(range(0, query.shape[0], chunk)):
                part = query[start : start + chunk]
                logits = (part @ items.T).float()
                out = hidden[bounds[number] : bounds[number + 1]]
                logits[out[:, 0] - start, out[:, 1]] = -torch.inf
                index = torch.arange(part.shape[0], device=query.device)
                target = targets[start : start + chunk]
                norm = logits.logsumexp(-1)
                total += (norm - logits[index, target]).sum()
                gradient = logits.sub_(norm[:, None]).exp_()
                gradient[index, target] -= 1
                gradient = gradient.to(low)
                query_grad[start : start + chunk] = gradient @ items
                items_grad += gradient.T @ part
        ctx.save_for_backward(query_grad, items_grad)
        return total

    @staticmethod
    def backward(ctx: Any, *scales: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        query_grad, items_grad = ctx.saved_tensors
        return query_grad * scales[0], items_grad * scales[0], None, None, None


def full_softmax_loss(
    query: Tensor, items: Tensor, targets: Tensor, hidden: Tensor, chunk: int = 128
) -> Tensor:
    """Summed cross-entropy of `softmax(query @ items.T)`, in bf16 products under autocast.

    query: [q, E]. items: [I, E]. targets: [q] item rows. hidden: [x, 2] pairs (row of query, item
    row) taken out of the softmax, sorted by the first; never a target. Returns a scalar, float32.
    """
    apply: Callable[..., Tensor] = _FullSoftmaxLoss.apply
    return apply(query, items, targets, hidden, chunk)
