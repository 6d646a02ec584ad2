"""Multi-token prediction (MTP): a module that was trained with the target, as a draft network.

Row p reads the target's final state at position p and the token at p + 1, each normalised, and
projects both to one vector. A decoder layer follows. A norm and a head give the logits of the token
at p + 2. Deeper rows of a draft read what their parent feeds back in place of the target's state.

    DeepSeek      feeds back the layer's output before its norm; a token at position 0 reads nothing
    Qwen3-Next    feeds back the normalised output; its attention has a gate, and RoPE turns only
                  the first part of each head

A model may have several modules. Module k reads, at the token p + 1, what module k - 1 returned at
the token before, and its logits are those of level k of a draft. Level k of a deeper draft reads
module k mod n, and module 0 then reads what the last module returned. Outputs before a text, or
before the part of it that was computed again, count as zero.

Sources: DeepSeek-V3 (arXiv 2412.19437, section 2.2), vLLM (deepseek_mtp.py, qwen3_next_mtp.py).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recserve.drafters.shared.feature_network import LayerView, RowsBefore
from recserve.models.attention import Attend, Rope, rope_frequencies
from recserve.models.config import DecoderConfig
from recserve.models.decoder import FINAL_LAYER, DecoderLayer, RMSNorm
from recserve.models.language_model import LanguageModel


@dataclass(frozen=True)
class MtpConfig:
    """Configuration of a module.

    Attributes:
        decoder: Sizes of the modules' layers; `num_layers` is n, the number of modules.
        vocab_size: Vocabulary of the target.
        feeds_norm: Whether the normalised output is fed back (Qwen3-Next), or the output before.
        first_token: Whether the row at position 0 reads its token. DeepSeek's reads zeros.
        gated: Whether the attention has an output gate.
        rotary_dim: Numbers of a head that RoPE turns, the first and the second half of them being
            the first numbers of both halves of a head. None means all.
        own_head: Whether it has a head of its own. Otherwise it reads the target's.
        target_layer: Layer of the target whose states it reads, as in `Drafter.hidden_layers`.

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
    target_layer: int = FINAL_LAYER

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
        """The one layer of the target whose states are read."""
        return (self.target_layer,)

    @property
    def output_size(self) -> int:
        """Numbers of an output: what all modules return."""
        return self.decoder.hidden_size * self.decoder.num_layers

    @property
    def views(self) -> tuple[LayerView, ...]:
        """Module k has no rows before the k-th, where module k - 1 has returned nothing yet."""
        count = self.decoder.num_layers
        return tuple(LayerView(first=number) for number in range(count)) if count > 1 else ()

    @property
    def draft_vocab_size(self) -> int:
        """Tokens that it can propose: all."""
        return self.vocab_size


class MtpModule(nn.Module):
    """One module: two norms and a projection, a decoder layer, a norm and maybe a head."""

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        self.feeds_norm = config.feeds_norm
        size, eps = config.decoder.hidden_size, config.decoder.norm_eps
        self.token_norm = RMSNorm(size, eps)
        self.state_norm = RMSNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layer = DecoderLayer(config.decoder, gated=config.gated)
        self.norm = RMSNorm(size, eps)
        self.head = nn.Linear(size, config.vocab_size, bias=False) if config.own_head else None

    def forward(
        self, features: Tensor, embedded: Tensor, rope: Rope, number: int, attend: Attend
    ) -> Tensor:
        """Returns [..., T, E] of features and embedded tokens [..., T, E]; `number` is k."""
        both = torch.cat([self.token_norm(embedded), self.state_norm(features)], dim=-1)
        x = self.fc(both)
        x, update = self.layer(self.layer.attention_norm(x), x, rope, number, attend)
        output, normed = self.norm.after_sum(x, update)
        return normed if self.feeds_norm else output


class Mtp(nn.Module):
    """n MTP modules. Embedding and, where they have none of their own, head are the target's.

    Attributes:
        config: The configuration.
        token_map: None, because it proposes tokens of the target's vocabulary.
    """

    token_map: None = None

    def __init__(self, config: MtpConfig) -> None:
        super().__init__()
        self.config = config
        decoder = config.decoder
        self.blocks = nn.ModuleList(MtpModule(config) for _ in range(decoder.num_layers))
        # Not a buffer: positions need these in float32 whatever the weights are cast to.
        turned = replace(decoder, head_dim=config.rotary_dim or decoder.head_dim)
        frequencies = rope_frequencies(turned)
        self._frequencies = F.pad(frequencies, (0, decoder.head_dim // 2 - len(frequencies)))

    def mask_row(self, target: LanguageModel) -> None:
        """Returns None: every row reads a token and a state."""

    def embed(self, tokens: Tensor, target: LanguageModel) -> Tensor:
        """Returns the embedding [..., E] of the target's tokens [...]."""
        embedded: Tensor = target.tokens(tokens)
        return embedded

    def committed(
        self,
        states: Tensor,
        embedded: Tensor,
        positions: Tensor,
        attend: Attend,
        before: RowsBefore | None = None,
    ) -> Tensor:
        """Computes the outputs of committed tokens from the target's states before them.

        Args:
            states: [T, E] final states of the target.
            embedded: [T, E] the target's embedding of the tokens.
            positions: [T] positions of the states.
            attend: Attention.
            before: What is known of the rows before. None if there is one module.

        Returns:
            [T, n E].
        """
        rope, embedded = self._prepare(embedded, positions)
        features, outputs = states, list[Tensor]()
        known: Seq[Tensor] = ()
        if len(self.blocks) > 1:
            assert before is not None
            known = before.values().chunk(len(self.blocks), dim=-1)
        for number, block in enumerate(self.blocks):
            if number:
                assert before is not None
                last = known[number - 1]
                features = outputs[-1].roll(1, dims=0).index_copy(0, before.starts, last)
            outputs.append(block(features, embedded, rope, number, attend))
        return torch.cat(outputs, dim=-1)

    def forward(
        self, features: Tensor, embedded: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """Computes the outputs of drafted tokens.

        Args:
            features: [..., T, n E] outputs at the token before; the target's states [..., T, E] if
                there is one module.
            embedded: [..., T, E] the target's embedding of the tokens.
            positions: [..., T] positions of the tokens before.
            attend: Attention.

        Returns:
            [..., T, n E], to feed back and to read logits from.
        """
        rope, embedded = self._prepare(embedded, positions)
        parts = features.chunk(len(self.blocks), dim=-1)
        outputs = [
            block(parts[number - 1], embedded, rope, number, attend)
            for number, block in enumerate(self.blocks)
        ]
        return torch.cat(outputs, dim=-1)

    def _prepare(self, embedded: Tensor, positions: Tensor) -> tuple[Rope, Tensor]:
        """Returns rotary positions, and the embedding with what is not read as zeros."""
        if self._frequencies.device != embedded.device:
            self._frequencies = self._frequencies.to(embedded.device)
        if not self.config.first_token:
            embedded = embedded.masked_fill((positions == 0)[..., None], 0.0)
        scale = self.config.decoder.rope_scale
        return Rope(positions, self._frequencies, embedded.dtype, scale), embedded

    def logits(self, outputs: Tensor, target: LanguageModel, level: int = 0) -> Tensor:
        """Returns float32 logits [..., V] of a draft's level from outputs [..., n E]."""
        number = level % len(self.blocks)
        block = self.blocks[number]
        assert isinstance(block, MtpModule)
        read = outputs.chunk(len(self.blocks), dim=-1)[number]
        read = read if self.config.feeds_norm else block.norm(read)
        if block.head is not None:
            own: Tensor = block.head(read)
            return own.float()
        return target.logits(read.to(target.tokens.weight.dtype)).float()

    def targets(self, columns: Tensor) -> Tensor:
        """Returns the columns, which are the target's tokens."""
        return columns
