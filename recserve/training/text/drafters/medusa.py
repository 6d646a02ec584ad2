"""Training of Medusa heads, which predict later tokens of a frozen target model.

Head k reads the target's hidden state at position t. It is trained by cross-entropy with the
target's own distribution of token t + k + 2, with weight 0.8 ** k. The weight falls because later
heads have less information.

Source: Medusa (arXiv 2401.10774), section 2.2 (Medusa-1), which uses the text's token as the label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from recserve.drafters.medusa.drafter import RANKS
from recserve.drafters.medusa.files import load_medusa, save_medusa
from recserve.drafters.medusa.network import MedusaConfig, MedusaHeads
from recserve.models.attention import DenseAttention
from recserve.models.language_model import LanguageModel
from recserve.training.loop import StepLoss, fit
from recserve.training.options import TrainOptions, TrainReport
from recserve.training.schedule import Schedule
from recserve.training.text.windows import shuffled_batches, windows

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


class MedusaTrainee:
    """Medusa heads on a frozen target, for the training loop."""

    selection = "accept_length"

    def __init__(
        self,
        recipe: MedusaRecipe,
        target: LanguageModel,
        train: NDArray[np.int64],
        valid: NDArray[np.int64],
        seed: int,
    ) -> None:
        """Splits the texts into rows and initialises the heads from the target.

        Args:
            recipe: Sizes and settings.
            target: The frozen language model.
            train: [n] int64 training tokens.
            valid: [n] int64 validation tokens.
            seed: Seed of weights and order.

        Raises:
            ValueError: If either text is shorter than a window.
        """
        self.recipe, self.target, self.seed = recipe, target, seed
        self.device = target.tokens.weight.device
        self.train, self.valid = (windows(text, recipe.window) for text in (train, valid))
        torch.manual_seed(seed)
        self.model = MedusaHeads(
            MedusaConfig(
                target.config.decoder.hidden_size,
                target.config.vocab_size,
                recipe.num_heads,
                recipe.num_layers,
            )
        ).to(self.device)
        self.model.start_from(target)

    def plan(self, epoch: int) -> Sequence[NDArray[np.int64]]:
        """Returns the row numbers of each batch."""
        return shuffled_batches(len(self.train), self.recipe.batch, self.seed, epoch)

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

    def load(self, folder: Path) -> None:
        """Starts from the heads of a folder.

        Raises:
            ValueError: If they have another shape.
        """
        own = self.model.config
        old = load_medusa(folder, own.hidden_size, own.vocab_size, device=self.device)
        if old.config != own:
            raise ValueError(f"{folder.name} holds {old.config}; the new heads are {own}")
        self.model.load_state_dict(old.state_dict())

    def validate(self) -> dict[str, float]:
        """Returns the mean accept length of the heads' best chain, and each head's accuracy."""
        right = self.hits()[..., 0]
        metrics = {f"head_{k}": float(own.float().mean()) for k, own in enumerate(right)}
        return {"accept_length": float(right.cumprod(0).sum(0).float().mean()), **metrics}

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
        for rows in np.array_split(
            self.valid[: self.recipe.validation_rows],
            -(-min(len(self.valid), self.recipe.validation_rows) // self.recipe.batch),
        ):
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


def train_medusa(
    target: LanguageModel,
    train: NDArray[np.int64],
    valid: NDArray[np.int64],
    directory: Path,
    options: TrainOptions,
    recipe: MedusaRecipe | None = None,
    console: Console | None = None,
) -> TrainReport:
    """Trains heads for a target and writes them with their measured accuracies.

    Args:
        target: The language model.
        train: [n] int64 training tokens, preferably of the kind of text that the target writes.
        valid: [n] int64 validation tokens.
        directory: Folder that receives the heads.
        options: Options of the run.
        recipe: Sizes and settings; None means the defaults.
        console: Where progress is printed; None means standard error.

    Returns:
        The report of the run.

    Raises:
        ValueError: If a text is too short, or the heads of `options.start_from` have another shape.
    """
    recipe = recipe or MedusaRecipe()
    trainee = MedusaTrainee(recipe, target.requires_grad_(False), train, valid, options.seed)
    if options.start_from is not None:
        trainee.load(options.start_from)
    report = fit(trainee, recipe.schedule.with_options(options), options, directory, console)
    save_medusa(trainee.model, directory, trainee.accuracies())
    return report
