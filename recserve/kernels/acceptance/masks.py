"""Masks of allowed tokens: one bit for each token, applied to rows of logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recserve.kernels.acceptance import native
from recserve.kernels.backend import Operator

WORD_BITS = 32


@dataclass(frozen=True)
class TokenMasks:
    """Masks of T nodes.

    Attributes:
        bits: [R, ceil(V / 32)] int32. Bit t % 32 of word t // 32 allows token t.
        rows: [T] int64 row of `bits` for each node. -1 allows all tokens.
    """

    bits: Tensor
    rows: Tensor

    def apply(self, logits: Tensor, nodes: Tensor) -> None:
        """Bans the tokens that the masks of some nodes [m] forbid, in logits [m, V], in place."""
        ban_masked(logits, self.bits, self.rows[nodes])


def ban_masked_reference(logits: Tensor, bits: Tensor, rows: Tensor) -> None:
    """Sets the logits of forbidden tokens to -inf, in place.

    Args:
        logits: [m, V] float.
        bits: [R, ceil(V / 32)] int32, as in `TokenMasks`.
        rows: [m] int64 row of `bits` for each row of logits. -1 allows all tokens.
    """
    if not bits.shape[0]:
        return
    own = bits[rows.clamp(min=0)]
    places = torch.arange(WORD_BITS, dtype=torch.int32, device=bits.device)
    allowed = ((own[:, :, None] >> places) & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits.masked_fill_(~allowed & (rows >= 0)[:, None], float("-inf"))


def _c_supports(logits: Tensor, bits: Tensor, rows: Tensor) -> bool:
    return logits.dtype == torch.float32 and logits.is_contiguous() and bits.is_contiguous()


ban_masked = Operator(
    ban_masked_reference,
    native.ban_masked,
    _c_supports,
    triton="recserve.kernels.acceptance.triton_masks:ban_masked",
)
