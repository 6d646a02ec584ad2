"""Training of Medusa heads, which predict later tokens of a frozen target model.

Head k reads the target's hidden state at position t. It is trained by cross-entropy with the
target's own distribution of token t + k + 2, with weight 0.8 ** k. The weight falls because later
heads have less information.

Source: Medusa (arXiv 2401.10774), section 2.2 (Medusa-1), which uses the text's token as the label.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recserve.drafters.medusa.drafter import RANKS
from recserve.drafters.medusa.files import load_medusa, save_medusa
from recserve.drafters.medusa.network import MedusaConfig, MedusaHeads
from recserve.models.attention import DenseAttention
from recserve.training.loop import StepLoss
from recserve.training.schedule import Schedule
from recserve.training.text.drafters.trainee import DrafterTrainee, accept_metrics

DISCOUNT = 0.8


@dataclass(frozen=True)
class MedusaRecipe:
    """Sizes of Medusa heads and settings of their training.

    Attributes:
        num_heads: Number of heads.
        num_layers: Layers of each head.
        window: Tokens of a training row.
        batch: Rows per step.
        validation_rows: Maximum number of validation rows that are measured.
        schedule: Learning rate, averaging and stopping.
    """

    num_heads: int = 4
    num_layers: int = 1
    window: int = 256
    batch: int = 8
    validation_rows: int = 64
    schedule: Schedule = field(default_factory=lambda: Schedule(2, 1e-3, weight_decay=0.0))


class MedusaTrainee(DrafterTrainee[MedusaRecipe, MedusaHeads]):
    """Medusa heads on a frozen target, for the training loop."""

    def new_network(self, train: NDArray[np.int64]) -> MedusaHeads:
        """Returns new heads, which begin as the target's head."""
        recipe, config = self.recipe, self.target.config
        heads = MedusaHeads(
            MedusaConfig(
                config.decoder.hidden_size, config.vocab_size, recipe.num_heads, recipe.num_layers
            )
        ).to(self.device)
        heads.start_from(self.target)
        return heads

    def load(self, folder: Path) -> MedusaHeads:
        """Returns the heads of a folder."""
        own = self.model.config
        return load_medusa(folder, own.hidden_size, own.vocab_size, device=self.device)

    def save(self, folder: Path) -> None:
        """Writes the heads with their measured accuracies."""
        save_medusa(self.model, folder, self.accuracies())

    def loss(self, batch: NDArray[np.int64]) -> StepLoss:
        """Returns the discounted cross-entropy with the target's distribution, as the mean over
        tokens.
        """
        hidden, wanted = self._target(self.train[batch])
        total, parts = self.heads_loss(hidden, wanted)
        return StepLoss(total, parts, hidden.shape[0] * hidden.shape[1])

    def heads_loss(self, hidden: Tensor, wanted: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the discounted sum of the heads' losses, and each head's own loss by name.

        Args:
            hidden: [b, T, E] final hidden states of the target.
            wanted: [b, T, V] logits of the target.
        """
        total = hidden.new_zeros((), dtype=torch.float32)
        parts: dict[str, Tensor] = {}
        logits = self.model(hidden.flatten(0, 1)).unflatten(1, hidden.shape[:2])
        for k, own in enumerate(logits):
            given = own[:, : -k - 1].float().log_softmax(-1)
            part = -(wanted[:, k + 1 :].float().softmax(-1) * given).sum(-1).mean()
            parts[f"head_{k}"] = part.detach()
            total = total + DISCOUNT**k * part
        return total, parts

    def validate(self) -> dict[str, float]:
        """Returns the mean accept length of the heads' best chain, and each head's accuracy."""
        return accept_metrics(self.hits()[..., 0], "head")

    @torch.inference_mode()
    def hits(self) -> Tensor:
        """Returns whether each head's guess of each rank equals the target's token.

        The n measured positions of the validation text are those from which all heads can look
        ahead.

        Returns:
            [K, n, RANKS] bool.
        """
        count, width = self.recipe.num_heads, min(RANKS, self.target.config.vocab_size)
        found = []
        for rows in self.validation_batches():
            hidden, wanted = self._target(rows)
            size = hidden.shape[1] - count
            best = self.model(hidden[:, :size].flatten(0, 1)).topk(width).indices
            said = wanted.argmax(-1)
            true = torch.stack([said[:, k + 1 : k + 1 + size].flatten() for k in range(count)])
            found.append(best == true[..., None])
        return torch.cat(found, dim=1)

    def accuracies(self) -> list[list[float]]:
        """Returns the accuracy of each head's guess of each rank, from which the draft tree is
        built.
        """
        shares: list[list[float]] = self.hits().float().mean(1).tolist()
        return shares

    @torch.no_grad()
    def _target(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Returns final hidden states [b, T, E] and logits [b, T, V] of some rows."""
        tokens = torch.from_numpy(rows).to(self.device)
        positions = torch.arange(tokens.shape[1], device=self.device)
        hidden = self.target(tokens, positions, DenseAttention())
        return hidden, self.target.logits(hidden)
