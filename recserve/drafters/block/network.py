"""Draft networks that predict a block of tokens in one forward pass: DFlash and its descendants.

The rows of a block are the last committed token, the anchor, and masks at the positions after it.
Each layer projects the target's states at all positions before the anchor to keys and values. A
row attends to these and to the block, and its output gives the token of its own position.

    context (target's states)  0 1 2 ... a-1  |  block  a    a+1  a+2  ...
    tokens                                    |  anchor mask mask ...
    predicted tokens                          |    -    a+1  a+2  ...

DFlash attends to the whole block, JetSpec only to earlier rows. DSpark also predicts from the
anchor's row, so that the row of position p predicts the token of p + 1. It adds a Markov head.
DFlash2 adds convolutions and a selector; see block_heads.py.

Sources: DFlash (arXiv 2602.06036), JetSpec (arXiv 2606.18394), DSpark (arXiv 2607.05147), DFlash2
(z-lab/dflash).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recserve.drafters.block.heads import (
    CandidateSelector,
    ConvConfig,
    GroupedConv,
    MarkovConfig,
    MarkovHead,
    SelectorConfig,
)
from recserve.kernels.host import on_device
from recserve.models.attention import Attend, Rope, rope_frequencies
from recserve.models.config import DecoderConfig
from recserve.models.decoder import RMSNorm, Silu
from recserve.models.language_model import LanguageModel


@dataclass(frozen=True)
class BlockConfig:
    """Configuration of a block drafter.

    Attributes:
        decoder: Sizes of its layers.
        target_size: E of the target's states.
        target_layers: Layers of the target that are read, as in `Drafter.hidden_layers`.
        vocab_size: Vocabulary of the target.
        draft_vocab_size: Tokens that it can propose, at most `vocab_size`.
        block_size: S, rows of a block, the anchor's included.
        causal: For each layer, whether a row of the block sees only earlier rows of the block.
        windows: For each layer, positions that the anchor's row sees, its own included; 0 means all
            of them. All rows of a block have the window of its anchor. The published code moves it
            with the row, which differs by less than a block. Empty means no windows.
        mask_token: Token whose embedding is the mask's, unless `own_mask`.
        from_anchor: Whether the anchor's row predicts too (DSpark).
        own_mask: Whether the mask has an embedding of its own.
        own_embedding: Whether the network has an embedding of its own.
        own_head: Whether the network has a head of its own.
        input_scale: Factor on the embeddings.
        output_scale: Factor on the logits.
        softcap: c of c tanh(logit / c); 0 means none.
        conv: Convolutions (DFlash2), or None.
        selector: Candidate selector (DFlash2), or None.
        markov: Markov head (DSpark), or None.

    Raises:
        ValueError: If the fields contradict each other.
    """

    decoder: DecoderConfig
    target_size: int
    target_layers: tuple[int, ...]
    vocab_size: int
    draft_vocab_size: int
    block_size: int
    causal: tuple[bool, ...]
    mask_token: int
    windows: tuple[int, ...] = ()
    from_anchor: bool = False
    own_mask: bool = False
    own_embedding: bool = False
    own_head: bool = False
    input_scale: float = 1.0
    output_scale: float = 1.0
    softcap: float = 0.0
    conv: ConvConfig | None = None
    selector: SelectorConfig | None = None
    markov: MarkovConfig | None = None

    def __post_init__(self) -> None:
        size = self.decoder.hidden_size
        if self.num_slots < 1:
            raise ValueError(f"block_size is {self.block_size}; a block needs a mask")
        if not self.target_layers:
            raise ValueError("the drafter reads no layer of its target")
        if len(self.causal) != self.decoder.num_layers:
            raise ValueError(f"causal has {len(self.causal)} values, one per layer is needed")
        if self.windows and len(self.windows) != self.decoder.num_layers:
            raise ValueError(f"windows has {len(self.windows)} values, one per layer is needed")
        if short := [w for w in self.windows if w and w <= self.block_size]:
            raise ValueError(f"the window is {short[0]}, not larger than the block")
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}; expected 1..{self.vocab_size}"
            )
        if not self.own_mask and not 0 <= self.mask_token < self.vocab_size:
            raise ValueError(
                f"mask_token_id is {self.mask_token}, outside the target's vocabulary of "
                f"{self.vocab_size}, and there is no mask_embedding"
            )
        if size != self.target_size and not (self.own_embedding and self.own_head):
            raise ValueError(
                f"hidden_size is {size} and the target's {self.target_size}; a drafter without "
                "an embedding and a head of its own needs the same"
            )
        if self.selector is not None and self.markov is not None:
            raise ValueError("a drafter has a candidate selector or a Markov head, not both")
        if self.selector is not None and self.draft_vocab_size != self.vocab_size:
            raise ValueError("a drafter with a candidate selector proposes the whole vocabulary")
        if self.conv is not None:
            if size % self.conv.group_size:
                raise ValueError(
                    f"conv_group_size is {self.conv.group_size}; it must divide {size}"
                )
            if not 1 <= self.conv.taps <= self.block_size:
                raise ValueError(
                    f"conv_kernel_size is {self.conv.taps}; expected 1..{self.block_size}"
                )

    @property
    def num_features(self) -> int:
        """F, numbers that are read of the target at each position."""
        return self.target_size * len(self.target_layers)

    @property
    def num_slots(self) -> int:
        """K, tokens that a block predicts."""
        return self.block_size if self.from_anchor else self.block_size - 1


class BlockLayer(nn.Module):
    """A decoder layer whose keys and values also come from the target's states."""

    def __init__(self, config: DecoderConfig, conv: ConvConfig | None, block_size: int) -> None:
        super().__init__()
        self.config = config
        size, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.attention_norm = RMSNorm(size, config.norm_eps)
        self.query = nn.Linear(size, config.num_heads * dim, bias=bias)
        self.key_value = nn.Linear(size, 2 * config.num_kv_heads * dim, bias=bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(dim, config.norm_eps)
            self.k_norm = RMSNorm(dim, config.norm_eps)
        self.output = nn.Linear(config.num_heads * dim, size, bias=config.output_bias)
        self.mlp_norm = RMSNorm(size, config.norm_eps)
        self.gate_up = nn.Linear(size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, size, bias=False)
        self.silu = Silu()
        if conv is not None:
            self.attention_conv: GroupedConv | None = GroupedConv(conv, size, block_size)
            self.mlp_conv: GroupedConv | None = GroupedConv(conv, size, block_size)
        else:
            self.attention_conv = self.mlp_conv = None

    def entries(self, inputs: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Returns keys after RoPE and values [..., T, K, D] of inputs [..., T, E]."""
        both = self.key_value(inputs).unflatten(-1, (-1, self.config.head_dim))
        key, value = both.chunk(2, dim=-2)
        if self.config.qk_norm:
            key = self.k_norm(key)
        return rope(key), value

    def forward(self, x: Tensor, rope: Rope, layer: int, attend: Attend) -> Tensor:
        """Runs the layer on the rows of whole blocks, x [..., n S, E]."""
        inputs, kernel = self.attention_norm(x), None
        if self.attention_conv is not None:
            inputs, kernel = self.attention_conv.before(inputs)
        query = self.query(inputs).unflatten(-1, (-1, self.config.head_dim))
        if self.config.qk_norm:
            query = self.q_norm(query)
        key, value = self.entries(inputs, rope)
        mixed = self.output(attend(layer, rope(query), key, value).flatten(-2))
        if self.attention_conv is not None and kernel is not None:
            mixed = self.attention_conv.after(mixed, kernel)
        x = x + mixed
        inputs, kernel = self.mlp_norm(x), None
        if self.mlp_conv is not None:
            inputs, kernel = self.mlp_conv.before(inputs)
        gated = self.down(self.silu.gate(self.gate_up(inputs)))
        if self.mlp_conv is not None and kernel is not None:
            gated = self.mlp_conv.after(gated, kernel)
        out: Tensor = x + gated
        return out


class Block(nn.Module):
    """A block drafter. Embedding and head are the target's where it has none of its own.

    Attributes:
        config: The configuration.
        token_map: [draft_vocab_size] int64 token of the target for each draft token. None if both
            vocabularies are the same.
    """

    token_map: Tensor | None
    tokens: nn.Embedding
    mask_embedding: Tensor

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        decoder = config.decoder
        size, eps = decoder.hidden_size, decoder.norm_eps
        self.fc = nn.Linear(config.num_features, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps)
        self.layers = nn.ModuleList(
            BlockLayer(decoder, config.conv, config.block_size) for _ in range(decoder.num_layers)
        )
        self.norm = RMSNorm(size, eps)
        if config.own_embedding:
            self.tokens = nn.Embedding(config.vocab_size, size)
        if config.own_mask:
            self.mask_embedding = nn.Parameter(torch.zeros(size))
        if config.own_head:
            self.head = nn.Linear(size, config.draft_vocab_size, bias=False)
        if config.selector is not None:
            self.selector = CandidateSelector(config.selector, size, config.vocab_size)
        if config.markov is not None:
            self.markov = MarkovHead(
                config.markov, size, config.vocab_size, config.draft_vocab_size
            )
        mapped = config.draft_vocab_size < config.vocab_size
        tokens = torch.zeros(config.draft_vocab_size, dtype=torch.int64) if mapped else None
        self.register_buffer("token_map", tokens)
        # Not a buffer: positions need these in float32 whatever the weights are cast to.
        self._frequencies = rope_frequencies(decoder)

    def entries(self, states: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns the keys and values that the target's states give, layer by layer.

        Args:
            states: [..., T, F] states of the target.
            positions: [..., T] their positions.

        Returns:
            For each layer keys after RoPE and values, [..., T, K, D] each.
        """
        features = self.hidden_norm(self.fc(states))
        rope = self._rope(positions, features)
        found = []
        for layer in self.layers:
            assert isinstance(layer, BlockLayer)
            found.append(layer.entries(features, rope))
        return found

    def embed(self, anchors: Tensor, target: LanguageModel) -> Tensor:
        """Returns the embedded rows [..., S, E] of blocks with the anchor tokens [...]."""
        config = self.config
        table = self.tokens if config.own_embedding else target.tokens
        mask = self.mask_embedding if config.own_mask else table.weight[config.mask_token]
        first = table(anchors)[..., None, :]
        masks = mask.to(first.dtype).expand(*anchors.shape, config.block_size - 1, -1)
        return torch.cat([first, masks], dim=-2) * config.input_scale

    def forward(self, embedded: Tensor, positions: Tensor, attends: Seq[Attend]) -> Tensor:
        """Computes the outputs of whole blocks.

        Args:
            embedded: [..., n S, E] rows of n blocks, from `embed`.
            positions: [..., n S] their positions.
            attends: Attention of each layer.

        Returns:
            [..., n K, E] normalised outputs, one for each predicted token.
        """
        config, x = self.config, embedded
        rope = self._rope(positions, x)
        for number, (layer, attend) in enumerate(zip(self.layers, attends, strict=True)):
            x = layer(x, rope, number, attend)
        blocks = x.reshape(*x.shape[:-2], -1, config.block_size, x.shape[-1])
        outputs: Tensor = self.norm(blocks[..., -config.num_slots :, :].flatten(-3, -2))
        return outputs

    def logits(self, outputs: Tensor, target: LanguageModel) -> Tensor:
        """Returns float32 logits [..., draft_vocab_size] of outputs [..., E]."""
        config = self.config
        if config.own_head:
            said: Tensor = self.head(outputs).float()
        else:
            said = target.logits(outputs.to(target.tokens.weight.dtype)).float()
            said = said if self.token_map is None else said[..., self.token_map]
        said = said.mul_(config.output_scale)  # in place: the table may be hundreds of megabytes
        if config.softcap:
            said = torch.tanh(said / config.softcap) * config.softcap
        return said

    def targets(self, columns: Tensor) -> Tensor:
        """Returns the target's tokens of draft tokens of any shape."""
        return columns if self.token_map is None else self.token_map[columns]

    def _rope(self, positions: Tensor, x: Tensor) -> Rope:
        if self._frequencies.device != x.device:
            self._frequencies = on_device(self._frequencies, x.device)
        return Rope(positions, self._frequencies, x.dtype, self.config.decoder.rope_scale)
