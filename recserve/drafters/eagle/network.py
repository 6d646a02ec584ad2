"""EAGLE's draft network: one decoder layer over the target's states and the next tokens.

Row p reads the target's state at position p and the token at p + 1. Its output is a feature, from
which the logits of the token at p + 2 follow. Deeper rows of a draft read the feature of their
parent in place of the target's state.

EAGLE-1 and EAGLE-2 share a network: the final state and the embedding are projected to one vector,
and the target's head reads the feature. EAGLE-3 reads the states of several layers, has a norm and
a head of its own, and may have a smaller vocabulary. EAGLE-3.1 adds norms before the projection.
HASS adds norms to EAGLE-1. P-EAGLE is EAGLE-3 with several layers; all rows of a draft but the
first read a mask token and learned states, so that one forward pass drafts all positions.

Sources: EAGLE-1 (arXiv 2401.15077), EAGLE-2 (arXiv 2406.16858), EAGLE-3 (arXiv 2503.01840),
EAGLE-3.1 (arXiv 2605.09992), HASS (arXiv 2408.15766), P-EAGLE (arXiv 2602.01469).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recserve.drafters.shared.feature_network import LayerView, MaskRow, RowsBefore
from recserve.models.attention import Attend, Rope, rope_frequencies
from recserve.models.config import DecoderConfig
from recserve.models.decoder import FINAL_LAYER, DecoderLayer, RMSNorm
from recserve.models.language_model import LanguageModel


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
        embedding_norm: A norm on the embedding before the projection (HASS).
        feature_norm: A norm on the feature before the projection (HASS).
        layer_norm: A norm on the inputs of the first layer (HASS; EAGLE-3 always has it).
        head_norm: A norm on what the target's head reads (HASS).
        own_embedding: An embedding of its own, trained from the target's (P-EAGLE).
        mask_token: The token of the rows that read no token (P-EAGLE). None for other networks.
        views: What each layer sees. Empty if all layers see everything.

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
    embedding_norm: bool = False
    feature_norm: bool = False
    layer_norm: bool = False
    head_norm: bool = False
    own_embedding: bool = False
    mask_token: int | None = None
    views: tuple[LayerView, ...] = ()

    def __post_init__(self) -> None:
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc are both true; a head has one or neither")
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}; expected 1..{self.vocab_size}"
            )
        if not self.fused and self.draft_vocab_size != self.vocab_size:
            raise ValueError("EAGLE-1 and 2 read the target's head, so they have its vocabulary")
        if self.views and len(self.views) != self.decoder.num_layers:
            raise ValueError(f"views has {len(self.views)} values, one per layer is needed")
        if self.reads_final and self.target_size != self.decoder.hidden_size:
            raise ValueError(
                f"the head reads the target's final state of size {self.target_size} without a "
                f"projection, so its hidden_size cannot be {self.decoder.hidden_size}"
            )
        if self.mask_token is not None and not 0 <= self.mask_token < self.vocab_size:
            raise ValueError(
                f"mask_token_id is {self.mask_token}; expected 0..{self.vocab_size - 1}"
            )

    @property
    def reads_final(self) -> bool:
        """Whether a fused network reads the final state alone, which needs no projection."""
        return self.fused and self.target_layers == (FINAL_LAYER,)

    @property
    def output_size(self) -> int:
        """Numbers of an output: a feature."""
        return self.decoder.hidden_size

    @property
    def num_features(self) -> int:
        """F, numbers that are read of the target at each position."""
        return self.target_size * len(self.target_layers)


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
        if not config.reads_final:
            inner = config.num_features + (0 if config.fused else size)
            self.fc = nn.Linear(inner, size, bias=config.fc_bias)
        inputs = [2 * size if config.fused else size] + [size] * (decoder.num_layers - 1)
        self.layers = nn.ModuleList(DecoderLayer(decoder, count) for count in inputs)

        def norm(present: bool) -> nn.Module:
            return RMSNorm(size, eps) if present else nn.Identity()

        # Norms of the inputs of each layer. The first layer of EAGLE-1 has none.
        self.input_norms = nn.ModuleList(
            norm(number > 0 or config.fused or config.layer_norm)
            for number in range(decoder.num_layers)
        )
        self.embedding_norm = norm(config.embedding_norm)
        self.feature_norm = norm(config.fused or config.feature_norm)
        self.norm = norm(config.fused or config.head_norm)
        if config.fused:
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
        if config.own_embedding:
            self.tokens = nn.Embedding(config.vocab_size, size)
        if config.mask_token is not None:
            self.mask_states = nn.Parameter(torch.zeros(config.num_features))
        # Not a buffer: positions need these in float32 whatever the weights are cast to.
        self._frequencies = rope_frequencies(decoder)

    def features(self, states: Tensor) -> Tensor:
        """Returns features of the target's states [..., T, F].

        These are [..., T, E] for EAGLE-3. EAGLE-1 and 2, and EAGLE-3 on the final state alone, read
        the state itself.
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
        projected: Tensor = states if config.reads_final else self.fc(states)
        return projected

    def embed(self, tokens: Tensor, target: LanguageModel) -> Tensor:
        """Returns the embedding [..., E] of the target's tokens [...]."""
        table = self.tokens if self.config.own_embedding else target.tokens
        embedded: Tensor = table(tokens)
        return embedded

    def mask_row(self, target: LanguageModel) -> MaskRow | None:
        """Returns what rows without a token and a state read (P-EAGLE); None for others."""
        if self.config.mask_token is None:
            return None
        device = self.mask_states.device
        token = torch.full((), self.config.mask_token, device=device)
        return MaskRow(self.features(self.mask_states), self.embed(token, target))

    def committed(
        self,
        states: Tensor,
        embedded: Tensor,
        positions: Tensor,
        attend: Attend,
        before: RowsBefore | None = None,
    ) -> Tensor:
        """Computes the outputs [T, E] of committed tokens; `before` has no effect."""
        outputs: Tensor = self(self.features(states), embedded, positions, attend)
        return outputs

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
        rope = Rope(positions, self._frequencies, features.dtype, config.decoder.rope_scale)
        if config.fused:
            normed = self.feature_norm(features)
            inputs = torch.cat([self.input_norms[0](embedded), normed], dim=-1)
            residual = normed if config.norm_before_residual else features
        else:
            both = [self.embedding_norm(embedded), self.feature_norm(features)]
            residual = self.fc(torch.cat(both, dim=-1))
            inputs = self.input_norms[0](residual)
        x = residual
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            if number:
                inputs = self.input_norms[number](x)
            x, update = layer(inputs, x, rope, number, attend)
            x = x + update
        return self.norm(x) if config.norm_output else x

    def logits(self, outputs: Tensor, target: LanguageModel, level: int = 0) -> Tensor:
        """Returns float32 logits [..., draft_vocab_size] of outputs [..., E].

        They are normalised once, if the network has a norm. All levels of a draft are alike.
        """
        read = outputs if self.config.norm_output else self.norm(outputs)
        if self.config.fused:
            own: Tensor = self.head(read)
            return own.float()
        return target.logits(read.to(target.tokens.weight.dtype)).float()

    def targets(self, columns: Tensor) -> Tensor:
        """Returns the target's tokens of draft tokens of any shape."""
        return columns if self.token_map is None else self.token_map[columns]
