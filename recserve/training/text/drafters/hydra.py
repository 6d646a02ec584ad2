"""Training of Hydra's heads, which draft for a frozen target model.

Head i reads the target's state at position t and the text's tokens t + 1 .. t + i + 1. It learns
the target's own distribution of token t + i + 2 by cross-entropy (teacher loss). All heads have the
same weight.

Source: Hydra (arXiv 2402.05109), section 4, and the settings of its published trainer.
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

from recserve.models.attention import DenseAttention
from recserve.models.drafters.hydra import Hydra, HydraConfig
from recserve.models.drafters.hydra_files import load_hydra, save_hydra
from recserve.models.language_model import LanguageModel
from recserve.training.loop import StepLoss, fit
from recserve.training.options import TrainOptions, TrainReport
from recserve.training.schedule import Schedule
from recserve.training.text.windows import shuffled_batches, windows


@dataclass(frozen=True)
class HydraRecipe:
    """Sizes of Hydra's heads and settings of their training.

    Attributes:
        num_heads: Number of heads.
        num_layers: Blocks of each head.
        prefix: Whether a decoder layer precedes the heads (Hydra++).
        window: Tokens of a training row.
        batch: Rows per step.
        validation_rows: Maximum number of validation rows that are measured.
        schedule: Learning rate, averaging and stopping.
    """

    num_heads: int = 4
    num_layers: int = 2
    prefix: bool = False
    window: int = 256
    batch: int = 8
    validation_rows: int = 64
    schedule: Schedule = field(
        default_factory=lambda: Schedule(2, 1e-3, weight_decay=0.0, patience=0)
    )


class HydraTrainee:
    """Hydra's heads on a frozen target, for the training loop."""

    selection = "accept_length"

    def __init__(
        self,
        recipe: HydraRecipe,
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
        config = HydraConfig(
            decoder=target.config.decoder,
            vocab_size=target.config.vocab_size,
            num_heads=recipe.num_heads,
            num_layers=recipe.num_layers,
            prefix=recipe.prefix,
        )
        self.model = Hydra(config).to(self.device)
        self.model.start_from(target)

    def plan(self, epoch: int) -> Sequence[NDArray[np.int64]]:
        """Returns the row numbers of each batch."""
        return shuffled_batches(len(self.train), self.recipe.batch, self.seed, epoch)

    def loss(self, batch: NDArray[np.int64]) -> StepLoss:
        """Returns the sum of the heads' cross-entropies, each the mean over tokens."""
        given, wanted = self._outputs(self.train[batch])
        total = wanted.new_zeros((), dtype=torch.float32)
        parts: dict[str, Tensor] = {}
        for number, own in enumerate(given):
            teacher = wanted[:, number + 1 : number + 1 + own.shape[1]].float().softmax(-1)
            part = -(teacher * own.float().log_softmax(-1)).sum(-1).mean()
            parts[f"head_{number}"] = part.detach()
            total = total + part
        return StepLoss(total, parts, wanted.shape[0] * wanted.shape[1])

    @torch.inference_mode()
    def validate(self) -> dict[str, float]:
        """Returns the mean accept length of a chain, and each head's accuracy.

        A head reads the text's own tokens, so this is the accept length on text that the target
        wrote without draws.
        """
        rows, found = self.valid[: self.recipe.validation_rows], []
        for part in np.array_split(rows, -(-len(rows) // self.recipe.batch)):
            given, wanted = self._outputs(part)
            said, size = wanted.argmax(-1), given[-1].shape[1]
            right = [
                own[:, :size].argmax(-1) == said[:, number + 1 : number + 1 + size]
                for number, own in enumerate(given)
            ]
            found.append(torch.stack([own.flatten() for own in right]))
        hits = torch.cat(found, dim=1)
        metrics = {f"head_{number}": float(own.float().mean()) for number, own in enumerate(hits)}
        return {"accept_length": float(hits.cumprod(0).sum(0).float().mean()), **metrics}

    def _outputs(self, rows: NDArray[np.int64]) -> tuple[list[Tensor], Tensor]:
        """Returns logits [b, T - i - 1, V] of each head i, and the target's [b, T, V]."""
        tokens = torch.from_numpy(rows).to(self.device)
        positions = torch.arange(tokens.shape[1], device=self.device)
        with torch.no_grad():
            hidden = self.target(tokens, positions, DenseAttention())
            wanted = self.target.logits(hidden)
            embedded = self.target.tokens(tokens).float()
        states = self.model.states(hidden.float(), positions, DenseAttention())
        given = []
        for number in range(self.recipe.num_heads):
            count = tokens.shape[1] - number - 1
            own = [embedded[:, n : n + count] for n in range(1, number + 2)]
            given.append(self.model.logits(number, torch.cat([states[:, :count], *own], dim=-1)))
        return given, wanted


def train_hydra(
    target: LanguageModel,
    train: NDArray[np.int64],
    valid: NDArray[np.int64],
    directory: Path,
    options: TrainOptions,
    recipe: HydraRecipe | None = None,
    console: Console | None = None,
) -> TrainReport:
    """Trains heads for a target and writes them in Hydra's published layout.

    Args:
        target: The language model.
        train: [n] int64 training tokens, preferably text that the target wrote.
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
    recipe = recipe or HydraRecipe()
    trainee = HydraTrainee(recipe, target.requires_grad_(False), train, valid, options.seed)
    if options.start_from is not None:
        old = load_hydra(options.start_from, target)
        if old.config != trainee.model.config:
            raise ValueError(
                f"{options.start_from.name} holds {old.config}; the new heads are "
                f"{trainee.model.config}"
            )
        trainee.model.load_state_dict(old.state_dict())
    report = fit(trainee, recipe.schedule.with_options(options), options, directory, console)
    save_hydra(trainee.model, directory)
    return report
