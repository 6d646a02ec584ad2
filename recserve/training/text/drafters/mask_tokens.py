"""Training of mask tokens, which draft with a frozen target model.

One forward pass holds a row of text and, for several of its prefixes, a block of masks:

    x0 x1 x2 x3 x4 x5 | m1 m2 m3 below x1 | m1 m2 m3 below x3

A text token sees the text before it, as without masks. A mask sees its prefix and the earlier masks
of its block, and its position continues from the prefix. So mask i below x_t learns token
t + 1 + i.

The loss has three parts:

- cross-entropy of the target's head on the mask's state
- cross-entropy of the sampler's state given the token before
- the squared distance between the mask's state and the target's own state that predicts the same
  token (latent consistency)

Source: Samragh et al. (arXiv 2507.11851), sections 3.2 and 3.3. The labels here are the target's
distributions, as for Medusa and EAGLE, and the three parts have the same weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from recserve.drafters.mask_tokens.files import load_mask_tokens, save_mask_tokens
from recserve.drafters.mask_tokens.gated_lora import MaskRows
from recserve.drafters.mask_tokens.network import MaskTokens, MaskTokensConfig
from recserve.models.attention import DenseAttention
from recserve.models.language_model import LanguageModel
from recserve.training.loop import StepLoss, fit
from recserve.training.options import TrainOptions, TrainReport
from recserve.training.schedule import Schedule
from recserve.training.text.windows import shuffled_batches, windows


@dataclass(frozen=True)
class MaskTokensRecipe:
    """Sizes of mask tokens and settings of their training.

    Attributes:
        num_masks: k, tokens that are drafted.
        rank: Rank of the low-rank updates.
        alpha: An update is multiplied by alpha / rank.
        blocks: Prefixes of a row that have masks.
        window: Tokens of a training row.
        batch: Rows per step.
        validation_rows: Most validation rows that are measured.
        schedule: Learning rate, averaging and stopping.
    """

    num_masks: int = 4
    rank: int = 16
    alpha: float = 32.0
    blocks: int = 48
    window: int = 256
    batch: int = 4
    validation_rows: int = 64
    schedule: Schedule = field(
        default_factory=lambda: Schedule(4, 3e-3, weight_decay=0.0, betas=(0.9, 0.95))
    )


@dataclass(frozen=True)
class MaskedStates:
    """States of a batch of rows with m blocks of k masks each.

    Attributes:
        tokens: [B, T] the rows.
        wanted: [B, T, V] float32 probabilities of the target after each token.
        anchors: [B, T, E] final states of the target.
        given: [B, m, k, E] final states of the masks.
        labels: [m, k] row position whose `wanted` and `anchors` each mask should reach.
    """

    tokens: Tensor
    wanted: Tensor
    anchors: Tensor
    given: Tensor
    labels: Tensor


class MaskTokensTrainee:
    """Mask tokens on a frozen target, for the training loop."""

    selection = "accept_length"

    def __init__(
        self,
        recipe: MaskTokensRecipe,
        target: LanguageModel,
        train: NDArray[np.int64],
        valid: NDArray[np.int64],
        seed: int,
    ) -> None:
        """Splits the texts into rows and initialises the network.

        Args:
            recipe: Sizes and settings.
            target: The frozen language model.
            train: [n] int64 training tokens.
            valid: [n] int64 validation tokens.
            seed: Seed of weights, order and prefixes.

        Raises:
            ValueError: If either text is shorter than a window, or a window holds no block.
        """
        if recipe.window <= recipe.num_masks + 1:
            raise ValueError(
                f"window is {recipe.window}; {recipe.num_masks} masks need a longer one"
            )
        self.recipe, self.target, self.seed = recipe, target, seed
        self.device = target.tokens.weight.device
        self.train, self.valid = (windows(text, recipe.window) for text in (train, valid))
        torch.manual_seed(seed)
        config = MaskTokensConfig(
            target.config.decoder, recipe.num_masks, recipe.rank, recipe.alpha
        )
        self.model = MaskTokens(config).to(self.device)
        self.model.start_from(target)

    def plan(self, epoch: int) -> Sequence[NDArray[np.int64]]:
        """Returns the row numbers of each batch."""
        return shuffled_batches(len(self.train), self.recipe.batch, self.seed, epoch)

    def loss(self, batch: NDArray[np.int64]) -> StepLoss:
        """Returns the loss of a batch, as the mean over masks."""
        most = self.recipe.window - self.recipe.num_masks - 1
        ends = torch.randperm(most)[: self.recipe.blocks].sort().values.to(self.device)
        states = self.states(self.train[batch], ends)
        wanted, anchors = states.wanted[:, states.labels], states.anchors[:, states.labels]
        base = self._likelihood(states.given, wanted)
        sampler = self._likelihood(self._sample_states(states), wanted)
        distance = (states.given.float() - anchors).square().mean()
        parts = {"base": base.detach(), "sampler": sampler.detach(), "latent": distance.detach()}
        return StepLoss(base + sampler + distance, parts, wanted[..., 0].numel())

    def validate(self) -> dict[str, float]:
        """Returns the mean accept length of a chain of k tokens, and each mask's accuracy.

        The sampler reads the text's own token, so this is the accept length on text that the
        target wrote without draws.
        """
        rows, found = self.valid[: self.recipe.validation_rows], []
        most = self.recipe.window - self.recipe.num_masks - 1
        step = max(most // self.recipe.blocks, 1)
        ends = torch.arange(0, most, step, device=self.device)
        for part in np.array_split(rows, -(-len(rows) // self.recipe.batch)):
            states = self.states(part, ends)
            said = self.target.logits(
                self._sample_states(states).to(self.target.tokens.weight.dtype)
            )
            right = said.argmax(-1) == states.wanted.argmax(-1)[:, states.labels]
            found.append(right.flatten(0, 1))
        hits = torch.cat(found).T
        metrics = {f"mask_{number}": float(own.float().mean()) for number, own in enumerate(hits)}
        return {"accept_length": float(hits.cumprod(0).sum(0).float().mean()), **metrics}

    def states(self, rows: NDArray[np.int64], ends: Tensor) -> MaskedStates:
        """Runs the target over rows with one block of masks below each of some positions.

        Args:
            rows: [B, T] tokens.
            ends: [m] positions of the last token of each prefix.
        """
        tokens = torch.from_numpy(rows).to(self.device)
        size, k = tokens.shape[1], self.recipe.num_masks
        text, number = torch.arange(size, device=self.device), torch.arange(k, device=self.device)
        count, below = len(ends) * k, ends.repeat_interleave(k)
        block = torch.arange(len(ends), device=self.device).repeat_interleave(k)
        own = number.repeat(len(ends))
        mask = torch.zeros(size + count, size + count, dtype=torch.bool, device=self.device)
        mask[:size, :size] = text <= text[:, None]
        mask[size:, :size] = text <= below[:, None]
        mask[size:, size:] = (block == block[:, None]) & (own <= own[:, None])
        mask_rows = MaskRows(self.model.lora, torch.cat([torch.full_like(text, -1), own]))
        inputs = torch.cat([tokens, tokens.new_zeros(len(tokens), count)], dim=1)
        positions = torch.cat([text, below + 1 + own])
        hidden = mask_rows.forward(self.target, inputs, positions, DenseAttention(mask))
        anchors = hidden[:, :size].detach()
        with torch.no_grad():
            wanted = self.target.logits(anchors).float().softmax(-1)
        given = torch.unflatten(hidden[:, size:], 1, (len(ends), k))
        return MaskedStates(tokens, wanted, anchors.float(), given, ends[:, None] + 1 + number)

    def _sample_states(self, states: MaskedStates) -> Tensor:
        """Returns the sampler's states [B, m, k, E], given the text's token before each label."""
        embedded = self.target.tokens(states.tokens[:, states.labels])
        return self.model.sample_states(embedded.float(), states.given.float())

    def _likelihood(self, states: Tensor, wanted: Tensor) -> Tensor:
        """Returns the cross-entropy of the target's head on states [..., E], as a mean."""
        said = self.target.logits(states.to(self.target.tokens.weight.dtype)).float()
        return -(wanted * said.log_softmax(-1)).sum(-1).mean()


def train_mask_tokens(
    target: LanguageModel,
    train: NDArray[np.int64],
    valid: NDArray[np.int64],
    directory: Path,
    options: TrainOptions,
    recipe: MaskTokensRecipe | None = None,
    console: Console | None = None,
) -> TrainReport:
    """Trains mask tokens for a target and writes them with a PEFT adapter.

    Args:
        target: The language model.
        train: [n] int64 training tokens, preferably text that the target wrote.
        valid: [n] int64 validation tokens.
        directory: Folder that receives the files.
        options: Options of the run.
        recipe: Sizes and settings; None means the defaults.
        console: Where progress is printed; None means standard error.

    Returns:
        The report of the run.

    Raises:
        ValueError: If a text is too short, or the network of `options.start_from` has another
            shape.
    """
    recipe = recipe or MaskTokensRecipe()
    trainee = MaskTokensTrainee(recipe, target.requires_grad_(False), train, valid, options.seed)
    if options.start_from is not None:
        trainee.model.load_state_dict(_old_weights(options.start_from, target, trainee.model))
    report = fit(trainee, recipe.schedule.with_options(options), options, directory, console)
    save_mask_tokens(trainee.model, directory)
    return report


def _old_weights(folder: Path, target: LanguageModel, new: MaskTokens) -> dict[str, Tensor]:
    """Returns the weights of older mask tokens of the same shape.

    Raises:
        ValueError: If their configuration differs; the message names the field.
    """
    old = load_mask_tokens(folder, target)
    for name in (part.name for part in fields(MaskTokensConfig)):
        theirs, ours = getattr(old.config, name), getattr(new.config, name)
        if theirs != ours:
            raise ValueError(f"{folder.name}: {name} is {theirs}; the new masks have {ours}")
    device = new.lora.embeddings.device
    return {name: weight.to(device, torch.float32) for name, weight in old.state_dict().items()}
