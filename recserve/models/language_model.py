"""A causal language model: embedding, trunk, head."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from recserve.models.attention import Attend
from recserve.models.config import DecoderConfig
from recserve.models.decoder import AuxHiddenStates, Decoder


@dataclass(frozen=True)
class LanguageModelConfig:
    """A trunk and its vocabulary of V tokens.

    Attributes:
        decoder: The trunk.
        vocab_size: V.
        tied: Whether the head is the embedding.
        bos_token: First token of a text. None means that there is none.
        eos_tokens: End-of-text tokens.
    """

    decoder: DecoderConfig
    vocab_size: int
    tied: bool = False
    bos_token: int | None = None
    eos_tokens: tuple[int, ...] = ()


class LanguageModel(nn.Module):
    """Maps token numbers to logits of the next token. `head` is None if it is the embedding."""

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.config = config
        size = config.decoder.hidden_size
        self.tokens = nn.Embedding(config.vocab_size, size)
        self.decoder = Decoder(config.decoder)
        self.head: nn.Module | None = None
        if not config.tied:
            self.head = nn.Linear(size, config.vocab_size, bias=False)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        rows: Tensor | None = None,
        aux_states: AuxHiddenStates | None = None,
    ) -> Tensor:
        """Returns hidden states [..., T, E] of tokens and positions [..., T], or only of `rows`."""
        hidden: Tensor = self.decoder(self.embed(tokens), positions, attend, rows, aux_states)
        return hidden

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeds tokens [...] as [..., E]."""
        x: Tensor = self.tokens(tokens)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [..., V] of hidden states [..., E]."""
        if self.head is None:
            return F.linear(hidden, self.tokens.weight)
        logits: Tensor = self.head(hidden)
        return logits
