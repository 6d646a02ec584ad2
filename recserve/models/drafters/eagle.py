"""EAGLE's draft network: one decoder layer over the target's states and the next tokens.

Row p reads the target's state at position p and the token at p + 1. Its output is a feature, from
which the logits of the token at p + 2 follow. Deeper rows of a draft read the feature of their
parent in place of the target's state.

EAGLE-1 and EAGLE-2 share a network: the final state and the embedding are projected to one vector,
and the target's head reads the feature. EAGLE-3 reads the states of several layers, has a norm and
a head of its own, and may have a smaller vocabulary. EAGLE-3.1 adds norms before the projection.

Sources: EAGLE-1 (arXiv 2401.15077), EAGLE-2 (arXiv 2406.16858), EAGLE-3 (arXiv 2503.01840),
EAGLE-3.1 (arXiv 2605.09992).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recserve.models.attention import Attend, Rope, rope_frequencies
from recserve.models.config import DecoderConfig
from recserve.models.decoder import RMSNorm, Silu


@dataclass(frozen=True)
class EagleConfig:
    """Configuration of a draft network.

    Attributes:
        decoder: Sizes of its layers. `num_layers` is 1 in all published heads.
        target_size: E of the target's states.
        target_layers: Layers of the target that are read, as in `Drafter.hidden_layers`.
        vocab_size: Vocabulary of the target.
        draft_vocab_size: Tokens that it can propose, at most `vocab_size`.
        fused: True for EAGLE-3: embedding and feature enter the attention side by side, and norm
            and head are its own. False for EAGLE-1 and 2.
        fc_bias: A bias on the projection (EAGLE-1 and 2).
        fc_norm: A norm on each layer's state before the projection.
        norm_before_fc: One norm on all states before the projection.
        norm_output: The normalised output is fed back instead of the output.
        norm_before_residual: The residual is the normalised feature instead of the feature.

    Raises:
        ValueError: If the fields contradict each other.
    """

    decoder: DecoderConfig
    target_size: int
    target_layers: tuple[int, ...]
    vocab_size: int
    draft_vocab_size: int
    fused: bool
    fc_bias: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False

    def __post_init__(self) -> None:
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc are both true; a head has one or neither")
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}; expected 1..{self.vocab_size}"
            )
        if not self.fused and self.draft_vocab_size != self.vocab_size:
            raise ValueError("EAGLE-1 and 2 read the target's head, so they have its vocabulary")

    @property
    def num_features(self) -> int:
        """F, numbers that are read of the target at each position."""
        return self.target_size * len(self.target_layers)


class EagleLayer(nn.Module):
    """A decoder layer whose attention reads `num_inputs` numbers per row."""

    def __init__(self, config: DecoderConfig, num_inputs: int) -> None:
        super().__init__()
        self.config = config
        size, dim = config.hidden_size, config.head_dim
        heads = config.num_heads + 2 * config.num_kv_heads
        self.qkv = nn.Linear(num_inputs, heads * dim, bias=config.attention_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(dim, config.norm_eps)
            self.k_norm = RMSNorm(dim, config.norm_eps)
        self.output = nn.Linear(config.num_heads * dim, size, bias=config.output_bias)
        self.mlp_norm = RMSNorm(size, config.norm_eps)
        self.gate_up = nn.Linear(size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, size, bias=False)
        self.silu = Silu()

    def forward(
        self, inputs: Tensor, residual: Tensor, rope: Rope, layer: int, attend: Attend
    ) -> Tensor:
        """Runs the layer on inputs [..., T, num_inputs] and a residual [..., T, E]."""
        c = self.config
        qkv = self.qkv(inputs).unflatten(-1, (-1, c.head_dim))
        query, key, value = qkv.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=-2)
        if c.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        mixed = attend(layer, rope(query), rope(key), value).flatten(-2)
        x = residual + self.output(mixed)
        out: Tensor = x + self.down(self.silu.gate(self.gate_up(self.mlp_norm(x))))
        return out


class Eagle(nn.Module):
    """The draft network. Embedding and, where it has none of its own, head are the target's.

    Attributes:
        config: The configuration.
        token_map: [draft_vocab_size] int64 token of the target for each draft token. None if both
            vocabularies are the same.
    """

    token_map: Tensor | None

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        decoder = config.decoder
        size, eps = decoder.hidden_size, decoder.norm_eps
        self.fc = nn.Linear(
            config.num_features + (0 if config.fused else size), size, bias=config.fc_bias
        )
        inputs = [2 * size if config.fused else size] + [size] * (decoder.num_layers - 1)
        self.layers = nn.ModuleList(EagleLayer(decoder, count) for count in inputs)
        # Norms of the inputs of each layer. The first layer of EAGLE-1 has none.
        self.input_norms = nn.ModuleList(
            RMSNorm(size, eps) if number or config.fused else nn.Identity()
            for number in range(decoder.num_layers)
        )
        if config.fused:
            self.feature_norm = RMSNorm(size, eps)
            self.norm = RMSNorm(size, eps)
            self.head = nn.Linear(size, config.draft_vocab_size, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_size, eps) for _ in config.target_layers
            )
        if config.norm_before_fc:
            self.states_norm = RMSNorm(config.num_features, eps)
        mapped = config.draft_vocab_size < config.vocab_size
        tokens = torch.zeros(config.draft_vocab_size, dtype=torch.int64) if mapped else None
        self.register_buffer("token_map", tokens)
        # Not a buffer: positions need these in float32 whatever the weights are cast to.
        self._frequencies = rope_frequencies(decoder)

    def features(self, states: Tensor) -> Tensor:
        """Returns features of the target's states [..., T, F].

        These are [..., T, E] for EAGLE-3. EAGLE-1 and 2 read the state itself.
        """
        config = self.config
        if not config.fused:
            return states
        if config.fc_norm:
            parts = torch.split(states, config.target_size, dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            states = torch.cat(normed, dim=-1)
        if config.norm_before_fc:
            states = self.states_norm(states)
        projected: Tensor = self.fc(states)
        return projected

    def forward(
        self, features: Tensor, embedded: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """Computes the feature of the next position.

        Args:
            features: [..., T, E] features at each row's position, from `features` or from a row
                before.
            embedded: [..., T, E] the target's embedding of the token after it.
            positions: [..., T] positions.
            attend: Attention.

        Returns:
            [..., T, E], to feed back and to read logits from.
        """
        config = self.config
        if self._frequencies.device != features.device:
            self._frequencies = self._frequencies.to(features.device)
        rope = Rope(positions, self._frequencies, features.dtype)
        if config.fused:
            normed = self.feature_norm(features)
            inputs = torch.cat([self.input_norms[0](embedded), normed], dim=-1)
            residual = normed if config.norm_before_residual else features
        else:
            residual = inputs = self.fc(torch.cat([embedded, features], dim=-1))
        x: Tensor = self.layers[0](inputs, residual, rope, 0, attend)
        for number in range(1, len(self.layers)):
            x = self.layers[number](self.input_norms[number](x), x, rope, number, attend)
        return self.norm(x) if config.norm_output else x

    def read_by_head(self, outputs: Tensor) -> Tensor:
        """Returns what a head reads of outputs [..., E]: normalised once, if it has a norm."""
        if not self.config.fused or self.config.norm_output:
            return outputs
        normed: Tensor = self.norm(outputs)
        return normed

    def targets(self, columns: Tensor) -> Tensor:
        """Returns the target's tokens of draft tokens of any shape."""
        return columns if self.token_map is None else self.token_map[columns]
