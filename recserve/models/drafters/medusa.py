"""Medusa heads: head k reads the target's final hidden state and guesses the token k + 2 ahead.

    h_0 = h    h_j = h_(j-1) + silu(W_j h_(j-1) + b_j)    logits = U h_J

Source: Medusa (arXiv 2401.10774), section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recserve.kernels import dispatch
from recserve.models.language_model import LanguageModel

MOST_RANKS = 32  # that a kernel takes out of a tile of words one after another


@dataclass(frozen=True)
class MedusaConfig:
    """hidden_size E and vocab_size V of the target. num_heads K, num_layers: residual blocks of a
    head. bias: of the blocks. head_vocab: tokens that a head knows, None: all V. shared: one output
    matrix for all heads.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int = 1
    bias: bool = True
    head_vocab: int | None = None
    shared: bool = False


class MedusaHeads(nn.Module):
    """K heads. token_map [head_vocab]: the target's number of each token that heads know."""

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
        """One of the weights; all share its type and device."""
        return self.get_parameter("outputs.0.weight")

    @torch.no_grad()
    def start_from(self, target: LanguageModel) -> None:
        """Blocks that do nothing and the target's own head: every head guesses the next token.

        Raises ValueError for heads that know a part of the vocabulary, and for a packed target.
        """
        if self.config.head_vocab is not None:
            raise ValueError(f"these heads know {self.config.head_vocab} tokens; train whole ones")
        weight = (
            target.tokens.weight if target.head is None else target.head.get_parameter("weight")
        )
        for block in self.blocks.parameters():
            block.zero_()
        for output in self.outputs.parameters():
            output.copy_(weight)

    @torch.no_grad()
    def stack(self) -> None:
        """Lay the output matrices one behind the other, [K, head vocabulary, E] or [1, ...] where
        they are shared, for one kernel to read. Heads that were stacked are not moved any more.
        """
        self._stacked = torch.stack([output.get_parameter("weight") for output in self.outputs])
        for output, weight in zip(self.outputs, self._stacked, strict=True):
            output.weight = nn.Parameter(weight, requires_grad=False)

    def states(self, hidden: Tensor) -> list[Tensor]:
        """What each head compares with the words: K times [n, E]. hidden [n, E]."""
        states = []
        for layers in self.blocks:
            x = hidden
            assert isinstance(layers, nn.ModuleList)
            for layer in layers:
                x = x + F.silu(layer(x))
            states.append(x)
        return states

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [n, E] -> [K, n, head vocabulary]."""
        shared = self.config.shared
        states = enumerate(self.states(hidden))
        return torch.stack([self.outputs[0 if shared else k](x) for k, x in states])

    def best(self, hidden: Tensor, count: int) -> Tensor:
        """[K, n, count] each head's likeliest words, best first; without writing the logits where
        the heads were stacked. hidden [n, E].
        """
        if self._stacked is None or count > MOST_RANKS:
            return self.forward(hidden).topk(count).indices
        states = torch.stack(self.states(hidden), dim=1)
        return dispatch.head_topk(states, self._stacked, count).tokens.transpose(0, 1)

    def tokens(self, words: Tensor) -> Tensor:
        """The target's numbers of tokens as heads number them; any shape."""
        return words if self.token_map is None else self.token_map[words]
