"""Medusa heads: head k reads the target's final hidden state and predicts the token k + 2 ahead.

    h_0 = h    h_j = h_(j-1) + silu(W_j h_(j-1) + b_j)    logits = U h_J

Source: Medusa (arXiv 2401.10774), section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recserve.kernels.linear import head_topk
from recserve.models.language_model import LanguageModel

MOST_RANKS = 32  # ranks that the kernel extracts from a tile of tokens one after another


@dataclass(frozen=True)
class MedusaConfig:
    """Sizes of Medusa heads.

    Attributes:
        hidden_size: E of the target.
        vocab_size: V of the target.
        num_heads: K.
        num_layers: Residual blocks of a head.
        bias: Whether the blocks have biases.
        head_vocab: Tokens that a head predicts. None means all V.
        shared: Whether all heads share one output matrix.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int = 1
    bias: bool = True
    head_vocab: int | None = None
    shared: bool = False


class MedusaHeads(nn.Module):
    """K heads. `token_map` [head_vocab] is the target's number of each token that heads predict."""

    token_map: Tensor | None

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(size, size, config.bias) for _ in range(config.num_layers))
            for _ in range(config.num_heads)
        )
        words = config.head_vocab or config.vocab_size
        self.outputs = nn.ModuleList(
            nn.Linear(size, words, bias=False)
            for _ in range(1 if config.shared else config.num_heads)
        )
        known = None if config.head_vocab is None else torch.zeros(words, dtype=torch.int64)
        self.register_buffer("token_map", known)
        self._stacked: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """One of the weights; all have the same type and device."""
        return self.get_parameter("outputs.0.weight")

    @torch.no_grad()
    def start_from(self, target: LanguageModel) -> None:
        """Initialises the blocks as identity and the outputs as the target's head.

        Every head then predicts the next token.

        Raises:
            ValueError: If the heads predict a part of the vocabulary, or the target is packed.
        """
        if self.config.head_vocab is not None:
            raise ValueError(
                f"head_vocab is {self.config.head_vocab}; expected heads of the whole vocabulary"
            )
        weight = (
            target.tokens.weight if target.head is None else target.head.get_parameter("weight")
        )
        for block in self.blocks.parameters():
            block.zero_()
        for output in self.outputs.parameters():
            output.copy_(weight)

    @torch.no_grad()
    def stack(self) -> None:
        """Stores the output matrices contiguously, so that one kernel reads them.

        The shape is [K, head vocabulary, E], or [1, ...] if they are shared. Do not move the heads
        to another device afterwards.
        """
        self._stacked = torch.stack([output.get_parameter("weight") for output in self.outputs])
        for output, weight in zip(self.outputs, self._stacked, strict=True):
            output.weight = nn.Parameter(weight, requires_grad=False)

    def states(self, hidden: Tensor) -> list[Tensor]:
        """Returns the state [n, E] of each of K heads before its output matrix. hidden: [n, E]."""
        states = []
        for layers in self.blocks:
            x = hidden
            assert isinstance(layers, nn.ModuleList)
            for layer in layers:
                x = x + F.silu(layer(x))
            states.append(x)
        return states

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns logits [K, n, head vocabulary] of hidden states [n, E]."""
        shared = self.config.shared
        states = enumerate(self.states(hidden))
        return torch.stack([self.outputs[0 if shared else k](x) for k, x in states])

    def best(self, hidden: Tensor, count: int) -> Tensor:
        """Returns each head's most likely tokens [K, n, count], best first. hidden: [n, E].

        If the heads are stacked, the logits are not written.
        """
        if self._stacked is None or count > MOST_RANKS:
            return self.forward(hidden).topk(count).indices
        states = torch.stack(self.states(hidden), dim=1)
        return head_topk.head_topk(states, self._stacked, count).tokens.transpose(0, 1)

    def tokens(self, words: Tensor) -> Tensor:
        """Converts the heads' token numbers to the target's; any shape."""
        return words if self.token_map is None else self.token_map[words]
