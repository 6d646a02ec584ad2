"""Sizes of a new block drafter for a target model, and settings of its training."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from recserve.drafters.block.heads import ConvConfig, MarkovConfig, SelectorConfig
from recserve.drafters.block.network import BlockConfig
from recserve.models.language_model import LanguageModel
from recserve.training.schedule import Schedule


@dataclass(frozen=True)
class BlockRecipe:
    """Sizes of a block drafter and settings of its training.

    Attributes:
        kind: The variant.
        layers: Layers of the network.
        block_size: Rows of a block, the anchor's included.
        gamma: Slots after which the weight of the loss has fallen to 1/e.
        anchors: Blocks per training row.
        rank: Size of a token's vector in the Markov head and in the selector.
        window: Tokens of a training row.
        batch: Rows per step.
        validation_rows: Most validation rows that are measured.
        schedule: Learning rate, averaging and stopping.
    """

    kind: Literal["dflash", "jetspec", "dspark", "dflash2"] = "dflash2"
    layers: int = 2
    block_size: int = 8
    gamma: float = 4.0
    anchors: int = 24
    rank: int = 64
    window: int = 256
    batch: int = 8
    validation_rows: int = 64
    schedule: Schedule = field(
        default_factory=lambda: Schedule(
            6,
            5e-3,
            weight_decay=0.0,
            warmup=0.04,
            betas=(0.9, 0.95),
            # Muon: in equal time twice the accept length of AdamW at 1e-3 on a small target.
            orthogonal=("layers.", "fc."),
        )
    )


def block_config(recipe: BlockRecipe, target: LanguageModel) -> BlockConfig:
    """Returns the configuration of a new network for a target."""
    decoder, words = target.config.decoder, target.config.vocab_size
    size, depth = decoder.hidden_size, decoder.num_layers
    # Five layers from the second to the one before the last, which a shallow target has not.
    even = [round(2 + number * (depth - 4) / 4) for number in range(5)]
    layers = even if depth > 8 else [1, depth // 2, depth - 1]
    parts: dict[str, ConvConfig | SelectorConfig | MarkovConfig] = {}
    if recipe.kind == "dflash2":
        parts["conv"] = ConvConfig(group_size=math.gcd(16, size))
        parts["selector"] = SelectorConfig(recipe.rank, min(16, words))
    if recipe.kind == "dspark":
        parts["markov"] = MarkovConfig(recipe.rank)
    own = replace(
        decoder,
        num_layers=recipe.layers,
        dropout=0.0,
        qk_norm=True,
        attention_bias=False,
        output_bias=False,
    )
    config = BlockConfig(
        decoder=own,
        target_size=size,
        target_layers=tuple(sorted({max(layer, 1) for layer in layers})),
        vocab_size=words,
        draft_vocab_size=words,
        block_size=recipe.block_size,
        causal=(recipe.kind == "jetspec",) * recipe.layers,
        mask_token=target.config.eos_tokens[0] if target.config.eos_tokens else 0,
        own_mask=True,
        from_anchor=recipe.kind == "dspark",
    )
    return replace(config, **parts)  # type: ignore[arg-type]
