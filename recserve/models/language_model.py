"""A causal language model: embedding, trunk, head."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from recserve.models.attention import Attend
from recserve.models.config import DecoderConfig
from recserve.models.decoder import Decoder
from recserve.models.packed_linear import PackedLinear, can_pack, pack_linears


@dataclass(frozen=True)
class LanguageModelConfig:
    """A trunk and its vocabulary of V tokens.

    tied: the head is the embedding. bos_token: what a text begins with, None: nothing.
    eos_tokens: end-of-text tokens.
    """

    decoder: DecoderConfig
    vocab_size: int
    tied: bool = False
    bos_token: int | None = None
    eos_tokens: tuple[int, ...] = ()


class LanguageModel(nn.Module):
    """Token numbers in, logits of the next token out. head: None where it is the embedding."""

    head: nn.Linear | None

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.config = config
        size = config.decoder.hidden_size
        self.tokens = nn.Embedding(config.vocab_size, size)
        self.decoder = Decoder(config.decoder)
        own = None if config.tied else nn.Linear(size, config.vocab_size, bias=False)
        self.register_module("head", own)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Final hidden states [..., T, E], final norm applied. tokens, positions: [..., T]."""
        hidden: Tensor = self.decoder(self.tokens(tokens), positions, attend)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., E] -> [..., V]."""
        if self.head is None:
            return F.linear(hidden, self.tokens.weight)
        logits: Tensor = self.head(hidden)
        return logits

    def pack(self) -> None:
        """Lay the weights out for this CPU, where it has a layout of its own; for serving only."""
        if self.head is None and can_pack(self.tokens.weight):
            self.add_module("head", PackedLinear(self.tokens.weight, None))
        pack_linears(self)
