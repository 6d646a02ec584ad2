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

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recserve.drafters.mask_tokens.files import load_mask_tokens, save_mask_tokens
from recserve.drafters.mask_tokens.gated_lora import MaskRows
from recserve.drafters.mask_tokens.network import MaskTokens, MaskTokensConfig
from recserve.models.attention import DenseAttention
from recserve.training.loop import StepLoss
from recserve.training.schedule import Schedule
from recserve.training.text.drafters.trainee import DrafterTrainee, accept_metrics


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


class MaskTokensTrainee(DrafterTrainee[MaskTokensRecipe, MaskTokens]):
    """Mask tokens on a frozen target, for the training loop."""

    def new_network(self, train: NDArray[np.int64]) -> MaskTokens:
        """Returns new mask tokens. Raises ValueError if a window holds no block."""
        recipe, target = self.recipe, self.target
        if recipe.window <= recipe.num_masks + 1:
            raise ValueError(
                f"window is {recipe.window}; {recipe.num_masks} masks need a longer one"
            )
        config = MaskTokensConfig(
            target.config.decoder, recipe.num_masks, recipe.rank, recipe.alpha
        )
        network = MaskTokens(config).to(self.device)
        network.start_from(target)
        return network

    def load(self, folder: Path) -> MaskTokens:
        """Returns the mask tokens of a folder."""
        return load_mask_tokens(folder, self.target)

    def save(self, folder: Path) -> None:
        """Writes the mask tokens with a PEFT adapter."""
        save_mask_tokens(self.model, folder)

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
        found = []
        most = self.recipe.window - self.recipe.num_masks - 1
        step = max(most // self.recipe.blocks, 1)
        ends = torch.arange(0, most, step, device=self.device)
        for part in self.validation_batches():
            states = self.states(part, ends)
            said = self.target.logits(
                self._sample_states(states).to(self.target.tokens.weight.dtype)
            )
            right = said.argmax(-1) == states.wanted.argmax(-1)[:, states.labels]
            found.append(right.flatten(0, 1))
        return accept_metrics(torch.cat(found).T, "mask")

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
