"""The best tokens of several heads: their logits and a selection in one operator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.kernels.backend import Operator


@dataclass(frozen=True)
class HeadTopK:
    """Best tokens of n rows under P heads.

    Attributes:
        values: [n, P, k] float32 logits in descending order.
        tokens: [n, P, k]. Ties resolve to the lowest token.
    """

    values: Tensor
    tokens: Tensor


def head_topk_reference(hidden: Tensor, weight: Tensor, k: int) -> HeadTopK:
    """Returns the k best tokens of every head.

    Args:
        hidden: [n, P, E].
        weight: [P, V, E], or [1, V, E] for heads that share one matrix.
        k: Tokens per head, at most V.
    """
    logits = torch.einsum(
        "npe,pve->npv", hidden.float(), weight.float().expand(hidden.shape[1], -1, -1)
    )
    values, tokens = torch.sort(logits, dim=-1, descending=True, stable=True)
    return HeadTopK(values[..., :k], tokens[..., :k])


head_topk = Operator(
    head_topk_reference, triton="recserve.kernels.linear.triton_head_topk:head_topk"
)
