"""Multi-token prediction (MTP): a module that was trained with the target, as a draft network.

Row p reads the target's final state at position p and the token at p + 1, each normalised, and
projects both to one vector. A decoder layer follows. A norm and a head give the logits of the token
at p + 2. Deeper rows of a draft read what their parent feeds back in place of the target's state.

    DeepSeek      feeds back the layer's output before its norm; a token at position 0 reads nothing
    Qwen3-Next    feeds back the normalised output; its attention has a gate, and RoPE turns only
                  the first part of each head

Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.2), vLLM (deepseek_mtp.py, qwen3_next_mtp.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recserve.models.attention import Attend, Rope, rope_frequencies
from recserve.models.config import DecoderConfig
from recserve.models.decoder import FINAL_LAYER, DecoderLayer, RMSNorm
from recserve.models.language_model import LanguageModel


@dataclass(frozen=True)
class MtpConfig:
    """Configuration of a module.

    Attributes:
        decoder: Sizes of its layer; `num_layers` is 1.
        vocab_size: Vocabulary of the target.
        feeds_norm: Whether the normalised output is fed back (Qwen3-Next), or the output before.
        first_token: Whether the row at position 0 reads its token. DeepSeek's reads zeros.
        gated: Whether the attention has an output gate.
        rotary_dim: Numbers of a head that RoPE turns, the first and the second half of them being
            the first numbers of both halves of a head. None means all.
        own_head: Whether it has a head of its own. Otherwise it reads the target's.

    Raises:
        ValueError: If the fields contradict each other.
    """

    decoder: DecoderConfig
    vocab_size: int
    feeds_norm: bool = False
    first_token: bool = False
    gated: bool = False
    rotary_dim: int | None = None
    own_head: bool = False

    def __post_init__(self) -> None:
        turned = self.rotary_dim
        if turned is not None and (turned % 2 or not 0 < turned <= self.decoder.head_dim):
            raise ValueError(
                f"RoPE turns {turned} of {self.decoder.head_dim} numbers of a head; an even number "
                "is needed"
            )

    @property
    def target_size(self) -> int:
        """E of the target's states."""
        return self.decoder.hidden_size

    @property
    def target_layers(self) -> tuple[int, ...]:
        """The target's final state, which is the only one that is read."""
        return (FINAL_LAYER,)

    @property
    def draft_vocab_size(self) -> int:
        """Tokens that it can propose: all."""
        return self.vocab_size


class Mtp(nn.Module):
    """One MTP module. Embedding and, where it has none of its own, head are the target's.

    Attributes:
        config: The configuration.
        mask_token: None, because every row reads a token.
        token_map: None, because it proposes tokens of the target's vocabulary.
    """

    mask_token: None = None
    token_map: None = None

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        self.config = config
        decoder = config.decoder
        size, eps = decoder.hidden_size, decoder.norm_eps
        self.token_norm = RMSNorm(size, eps)
        self.state_norm = RMSNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layer = DecoderLayer(decoder, gated=config.gated)
        self.norm = RMSNorm(size, eps)
        self.head = nn.Linear(size, config.vocab_size, bias=False) if config.own_head else None
        # Not a buffer: positions need these in float32 whatever the weights are cast to.
        turned = replace(decoder, head_dim=config.rotary_dim or decoder.head_dim)
        frequencies = rope_frequencies(turned)
        self._frequencies = F.pad(frequencies, (0, decoder.head_dim // 2 - len(frequencies)))

    def features(self, states: Tensor) -> Tensor:
        """Returns the target's states [..., T, E], which are the features."""
        return states

    def mask_features(self) -> Tensor:
        """Raises NotImplementedError, because every row reads a state."""
        raise NotImplementedError("an MTP module has no rows without a state")

    def embed(self, tokens: Tensor, target: LanguageModel) -> Tensor:
        """Returns the embedding [..., E] of the target's tokens [...]."""
        embedded: Tensor = target.tokens(tokens)
        return embedded

    def forward(
        self, features: Tensor, embedded: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """Computes the features of the next positions.

        Args:
            features: [..., T, E] the target's states at each row's position, or outputs.
            embedded: [..., T, E] the target's embedding of the token after it.
            positions: [..., T] positions.
            attend: Attention.

        Returns:
            [..., T, E], to feed back and to read logits from.
        """
        if self._frequencies.device != features.device:
            self._frequencies = self._frequencies.to(features.device)
        rope = Rope(positions, self._frequencies, features.dtype)
        if not self.config.first_token:
            embedded = embedded.masked_fill((positions == 0)[..., None], 0.0)
        both = torch.cat([self.token_norm(embedded), self.state_norm(features)], dim=-1)
        output: Tensor = self.layer(self.fc(both), rope, 0, attend)
        return self.norm(output) if self.config.feeds_norm else output

    def logits(self, outputs: Tensor, target: LanguageModel) -> Tensor:
        """Returns float32 logits [..., V] of outputs [..., E]."""
        read = outputs if self.config.feeds_norm else self.norm(outputs)
        if self.head is not None:
            own: Tensor = self.head(read)
            return own.float()
        return target.logits(read.to(target.tokens.weight.dtype)).float()

    def targets(self, columns: Tensor) -> Tensor:
        """Returns the columns, which are the target's tokens."""
        return columns
