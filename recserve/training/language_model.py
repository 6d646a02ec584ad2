"""Training of a small language model on plain text: what drafters and examples are tried on.

The result is a Hugging Face folder (Llama layout, tokenizer.json), so everything that reads such
folders reads it. An epoch is `steps` batches at drawn places, not a pass over the text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from rich.console import Console
from safetensors.torch import save_file
from tokenizers import Tokenizer

from recserve.models.attention import DenseAttention
from recserve.models.config import DecoderConfig
from recserve.models.language_model import LanguageModel, LanguageModelConfig
from recserve.models.llama_layout import language_model_values, language_model_weights
from recserve.training.loop import Schedule, StepLoss, fit
from recserve.training.options import TrainOptions, TrainReport
from recserve.training.text_data import (
    END_OF_TEXT,
    Blocks,
    encode_text,
    read_text,
    train_tokenizer,
)

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class LanguageModelRecipe:
    """A small Llama and how it is trained.

    context: tokens of a training window. batch: windows. steps: batches of an epoch.
    tokenizer_bytes: of text that the tokenizer is trained on; text_bytes: read in all.
    validation_blocks: windows of the held-out text.
    """

    hidden_size: int = 384
    num_layers: int = 6
    num_heads: int = 6
    intermediate_size: int = 1024
    vocab_size: int = 8192
    max_positions: int = 2048
    context: int = 256
    batch: int = 16
    steps: int = 250
    tokenizer_bytes: int = 8 << 20
    text_bytes: int = 96 << 20
    validation_blocks: int = 64
    schedule: Schedule = Schedule(8, 1.5e-3, weight_decay=0.1, warmup=0.05, averaging=0.98)

    def config(self, vocab_size: int) -> LanguageModelConfig:
        """The model's configuration."""
        decoder = DecoderConfig(
            self.hidden_size,
            self.num_layers,
            self.num_heads,
            self.num_heads,
            self.hidden_size // self.num_heads,
            self.intermediate_size,
            self.max_positions,
        )
        return LanguageModelConfig(decoder, vocab_size, tied=True, bos_token=0, eos_tokens=(0,))


class LanguageModelTrainee:
    """A language model with its text, as the loop sees it."""

    selection = "negative_loss"

    def __init__(
        self,
        recipe: LanguageModelRecipe,
        model: LanguageModel,
        train: Blocks,
        valid: Blocks,
        seed: int,
    ) -> None:
        self.recipe, self.model, self.train, self.seed = recipe, model, train, seed
        self.held_out = valid.spread(recipe.validation_blocks)

    def plan(self, epoch: int) -> Sequence[int]:
        """A seed per batch."""
        first = (self.seed * 1_000_003 + epoch) * self.recipe.steps
        return range(first, first + self.recipe.steps)

    def loss(self, batch: int) -> StepLoss:
        """Mean cross-entropy of the next token."""
        windows = self.train.drawn(self.recipe.batch, batch)
        mean = self._cross_entropy(windows)
        return StepLoss(mean, {"loss": mean.detach()}, windows[:, 1:].size)

    def validate(self) -> dict[str, float]:
        """Loss per token of the held-out text, its negative, and the perplexity."""
        parts = np.array_split(self.held_out, -(-len(self.held_out) // self.recipe.batch))
        losses = [float(self._cross_entropy(part)) for part in parts]
        mean = float(np.average(losses, weights=[len(part) for part in parts]))
        return {"negative_loss": -mean, "perplexity": math.exp(min(mean, 50))}

    def _cross_entropy(self, windows: Ints) -> torch.Tensor:
        device = self.model.tokens.weight.device
        tokens = torch.from_numpy(windows).to(device)
        positions = torch.arange(tokens.shape[1] - 1, device=device)
        hidden = self.model(tokens[:, :-1], positions, DenseAttention())
        logits = self.model.logits(hidden).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train_language_model(
    text: Path,
    valid: Path,
    out: Path,
    options: TrainOptions,
    recipe: LanguageModelRecipe | None = None,
    tokenizer: Path | None = None,
    console: Console | None = None,
) -> TrainReport:
    """Train on `text`, keep the best epoch on `valid`, write a Hugging Face folder to `out`.

    text, valid: UTF-8 files, `.zst` or plain. tokenizer: a tokenizer.json to use; None trains one.
    Raises FileNotFoundError, or ValueError for a text that is too short or is no text.
    """
    recipe = recipe or LanguageModelRecipe()
    console = console or Console(stderr=True)
    schedule = recipe.schedule
    if options.epochs is not None:
        schedule = replace(schedule, epochs=options.epochs)
    out.mkdir(parents=True, exist_ok=True)
    if tokenizer is None:
        console.print(f"training a tokenizer of {recipe.vocab_size:,} tokens")
        known = train_tokenizer(read_text(text, recipe.tokenizer_bytes), recipe.vocab_size)
    else:
        known = Tokenizer.from_file(str(tokenizer))
    train = Blocks(encode_text(known, read_text(text, recipe.text_bytes)), recipe.context)
    held_out = Blocks(encode_text(known, read_text(valid)), recipe.context)
    torch.manual_seed(options.seed)
    model = LanguageModel(recipe.config(known.get_vocab_size())).to(options.torch_device())
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.02)
    count = sum(p.numel() for p in model.parameters())
    console.print(f"{count:,} parameters, {len(train.tokens):,} tokens of text")
    trainee = LanguageModelTrainee(recipe, model, train, held_out, options.seed)
    report = fit(trainee, schedule, options, out, console)
    save_language_model(model, known, out)
    return report


def save_language_model(model: LanguageModel, tokenizer: Tokenizer, out: Path) -> None:
    """Write config.json, model.safetensors, tokenizer.json and tokenizer_config.json."""
    weights = {n: w.detach().cpu().contiguous() for n, w in language_model_weights(model).items()}
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    ends = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    for name, values in (
        ("config.json", language_model_values(model)),
        ("tokenizer_config.json", ends | {"add_bos_token": False}),
    ):
        (out / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
