"""Level heads: predict every level of the next item's semantic id from one hidden state.

A head is a residual block that starts as the identity (Medusa, arXiv 2401.10774, section 2.2). Its
output is compared with the codes of its level, by dot product or by cosine over a temperature (RPG,
KDD 2025, section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ABSENT = float("-inf")


class LevelHead(nn.Module):
    """x + silu(W x) of the prefix's hidden state, with W starting at zero."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [n, E] to [n, E]."""
        return x + F.silu(self.linear(x))


@dataclass(frozen=True)
class LevelTables:
    """All level heads of a model stacked, so that a step is two products for any L.

    Attributes:
        weight: [L * E, E] of the heads.
        bias: [L * E] of the heads.
        codebooks: [L, C, E] embeddings of the codes, of length 1 if the temperature is above 0.
            Zero after a level's own codes.
        absent: [L, C] true after a level's own codes.
        present: [V - 1] places of the codes in [L, C], flattened, in the order of their tokens.
        temperature: Divides cosines. 0 means dot products.
    """

    weight: Tensor
    bias: Tensor
    codebooks: Tensor
    absent: Tensor
    present: Tensor
    temperature: float

    def states(self, hidden: Tensor) -> Tensor:
        """Returns states [n, L, E] to compare with the codes of each level. hidden: [n, E]."""
        levels, _, size = self.codebooks.shape
        read = F.silu(F.linear(hidden, self.weight, self.bias))
        states = hidden[:, None] + read.view(-1, levels, size)
        return F.normalize(states, dim=-1) / self.temperature if self.temperature else states

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Returns the log-probability [n, V] float32 of every code token among the codes of its
        level.

        Column 0, the token that begins a sequence, is 0. hidden: [n, E].
        """
        logits = torch.bmm(self.states(hidden).transpose(0, 1), self.codebooks.mT).float()
        log_p = logits.masked_fill_(self.absent[:, None], ABSENT).log_softmax(-1)
        return F.pad(log_p.transpose(0, 1).flatten(1).index_select(1, self.present), (1, 0))


def stack_heads(heads: nn.ModuleList, codebooks: list[Tensor], temperature: float) -> LevelTables:
    """Stacks the level heads of a model. Call it without gradients.

    Args:
        heads: The level heads.
        codebooks: Per level [C_l, E].
        temperature: Divides cosines. 0 means dot products.
    """
    linears = [head.linear for head in heads if isinstance(head, LevelHead)]
    widest = max(book.shape[0] for book in codebooks)
    padded = torch.stack([F.pad(b, (0, 0, 0, widest - b.shape[0])) for b in codebooks])
    sizes = torch.tensor([book.shape[0] for book in codebooks], device=padded.device)
    absent = torch.arange(widest, device=padded.device) >= sizes[:, None]
    return LevelTables(
        torch.cat([linear.weight for linear in linears]),
        torch.cat([linear.bias for linear in linears]),
        F.normalize(padded, dim=-1) if temperature else padded,
        absent,
        (~absent.flatten()).nonzero().flatten(),
        temperature,
    )
