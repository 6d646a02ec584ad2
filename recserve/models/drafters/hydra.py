"""Hydra's heads: head i reads the target's state and the tokens drafted before its own.

    x_0 = [h, e_0, ..., e_i]    x_1 = R x_0 + silu(W x_0)    x_(j+1) = x_j + silu(S x_j)
    logits = U x_n + b

h is the target's state at position p, and e_0 is the embedding of the token at p + 1. Head i
predicts the token at p + i + 2. All blocks of a head after the first share the matrix S. Heads that
are not grounded read h alone, and all their blocks share S. Hydra++ puts one decoder layer between
the target's states and the heads.

Source: Hydra (arXiv 2402.05109), sections 3 and 4, and its published code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recserve.models.attention import Attend
from recserve.models.config import DecoderConfig
from recserve.models.decoder import FINAL_LAYER, Decoder
from recserve.models.language_model import LanguageModel


@dataclass(frozen=True)
class HydraConfig:
    """Configuration of Hydra's heads.

    Attributes:
        decoder: Sizes of the target.
        vocab_size: V of the target.
        num_heads: Number of heads.
        num_layers: Blocks of a head.
        grounded: Whether heads read the drafted tokens.
        prefix: Whether a decoder layer precedes the heads (Hydra++).
        layer: Layer of the target that is read, as in `Drafter.hidden_layers`.

    Raises:
        ValueError: If there is no head or no block.
    """

    decoder: DecoderConfig
    vocab_size: int
    num_heads: int = 4
    num_layers: int = 1
    grounded: bool = True
    prefix: bool = False
    layer: int = FINAL_LAYER

    def __post_init__(self) -> None:
        if min(self.num_heads, self.num_layers) < 1:
            raise ValueError(
                f"the network has {self.num_heads} heads with {self.num_layers} blocks each; both "
                "must be at least 1"
            )


class HydraHead(nn.Module):
    """One head, which reads the state and `num_tokens` embeddings."""

    def __init__(self, config: HydraConfig, num_tokens: int) -> None:
        super().__init__()
        size = config.decoder.hidden_size
        self.num_shared = config.num_layers - config.grounded
        if config.grounded:
            self.first = nn.Linear((num_tokens + 1) * size, size)
            self.residual = nn.Linear((num_tokens + 1) * size, size)
        if self.num_shared:
            self.shared = nn.Linear(size, size)
        self.output = nn.Linear(size, config.vocab_size)
        self.grounded = config.grounded

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns logits [..., V] of inputs [..., (num_tokens + 1) E], the state first."""
        x = inputs
        if self.grounded:
            x = self.residual(x) + F.silu(self.first(x))
        for _ in range(self.num_shared):
            x = x + F.silu(self.shared(x))
        logits: Tensor = self.output(x)
        return logits


class Hydra(nn.Module):
    """All heads, and the decoder layer of Hydra++. The embedding is the target's."""

    def __init__(self, config: HydraConfig) -> None:
        super().__init__()
        self.config = config
        self.heads = nn.ModuleList(
            HydraHead(config, number + 1 if config.grounded else 0)
            for number in range(config.num_heads)
        )
        self.prefix: Decoder | None = None
        if config.prefix:
            self.prefix = Decoder(replace(config.decoder, num_layers=1, dropout=0.0))

    @torch.no_grad()
    def start_from(self, target: LanguageModel) -> None:
        """Makes every head predict the next token of the state, as the target's head does.

        Raises:
            ValueError: If the target is packed.
        """
        weight = (
            target.tokens.weight if target.head is None else target.head.get_parameter("weight")
        )
        for head in self.heads:
            assert isinstance(head, HydraHead)
            for parameter in head.parameters():
                parameter.zero_()
            head.output.weight.copy_(weight)
            if head.grounded:
                head.residual.weight[:, : weight.shape[1]].fill_diagonal_(1.0)

    def states(self, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Returns what the heads read of the target's states.

        Args:
            states: [..., T, E] states of the target.
            positions: [..., T] positions.
            attend: Attention of the decoder layer of Hydra++.

        Returns:
            [..., T, E].
        """
        if self.prefix is None:
            return states
        read: Tensor = self.prefix(states, positions, attend)
        return read

    def logits(self, head: int, inputs: Tensor) -> Tensor:
        """Returns logits [..., V] of one head.

        Args:
            head: Number of the head.
            inputs: [..., n] the state and, side by side, the embeddings of the tokens since then.
                Heads that are not grounded read the state alone.
        """
        size = self.config.decoder.hidden_size
        own = inputs if self.config.grounded else inputs[..., :size]
        logits: Tensor = self.heads[head](own)
        return logits
