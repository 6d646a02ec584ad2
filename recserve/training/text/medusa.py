"""Training of Medusa heads: they learn what the frozen target will say some tokens later.

Head k reads the target's hidden state at position t and is pulled by cross-entropy towards the
target's own distribution of token t + k + 2, weighted 0.8 ** k; later heads have less to know.
Source: Medusa (arXiv 2401.10774), section 2.2 (Medusa-1); there the text's token is the label.
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
from recserve.models.drafters.medusa import MedusaConfig, MedusaHeads
from recserve.models.drafters.medusa_files import save_medusa
from recserve.models.language_model import LanguageModel
from recserve.speculation.drafters.medusa import RANKS
from recserve.training.loop import StepLoss, fit
from recserve.training.options import TrainOptions, TrainReport
from recserve.training.schedule import Schedule

DISCOUNT = 0.8


@dataclass(frozen=True)
class MedusaRecipe:
    """num_heads, num_layers of the heads. window: tokens of a training row; batch: rows of a step.
    validation_rows: rows of the validation text that are measured.
    """

    num_heads: int = 4
    num_layers: int = 1
    window: int = 256
    batch: int = 8
    validation_rows: int = 64
    schedule: Schedule = field(
        default_factory=lambda: Schedule(2, 1e-3, weight_decay=0.0, patience=0)
    )


class MedusaTrainee:
    """Heads on a frozen target, as the loop sees them.

    train, valid [n] int64 tokens. Raises ValueError for a text shorter than a window.
    """

    selection = "accept_length"

    def __init__(
        self,
        recipe: MedusaRecipe,
        target: LanguageModel,
        train: NDArray[np.int64],
        valid: NDArray[np.int64],
        seed: int,
    ) -> None:
        if min(len(train), len(valid)) < recipe.window:
            raise ValueError(
                f"the text has {len(train)} tokens for training and {len(valid)} for validation; "
                f"each needs at least a window of {recipe.window}"
            )
        self.recipe, self.target, self.seed = recipe, target, seed
        self.device = target.tokens.weight.device
        self.train, self.valid = _rows(train, recipe.window), _rows(valid, recipe.window)
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
        """Row numbers of each batch."""
        rng = np.random.default_rng((self.seed, epoch))
        order = rng.permutation(len(self.train))
        return np.array_split(order, -(-len(order) // self.recipe.batch))

    def loss(self, batch: NDArray[np.int64]) -> StepLoss:
        """Cross-entropy with the target's distribution, discounted by head; mean over tokens."""
        hidden, wanted = self._target(self.train[batch])
        total = hidden.new_zeros((), dtype=torch.float32)
        parts: dict[str, Tensor] = {}
        logits = self.model(hidden.flatten(0, 1)).unflatten(1, hidden.shape[:2])
        for k, own in enumerate(logits):
            given = own[:, : -k - 1].float().log_softmax(-1)
            part = -(wanted[:, k + 1 :].float().softmax(-1) * given).sum(-1).mean()
            parts[f"head_{k}"] = part.detach()
            total = total + DISCOUNT**k * part
        return StepLoss(total, parts, hidden.shape[0] * hidden.shape[1])

    def validate(self) -> dict[str, float]:
        """Mean accept length of the heads' best chain, and how often each head's best is right."""
        right = self.hits()[..., 0]
        metrics = {f"head_{k}": float(own.float().mean()) for k, own in enumerate(right)}
        return {"accept_length": float(right.cumprod(0).sum(0).float().mean()), **metrics}

    @torch.inference_mode()
    def hits(self) -> Tensor:
        """[K, n, RANKS] whether each head's guess of each rank is what the target says there.

        Measured along the validation text at the n positions that all heads look ahead of.
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
        """How often the guess of each rank is right, by head: what a tree is made of."""
        shares: list[list[float]] = self.hits().float().mean(1).tolist()
        return shares

    @torch.no_grad()
    def _target(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Final hidden states [b, T, E] and logits [b, T, V] of some rows."""
        tokens = torch.from_numpy(rows).to(self.device)
        positions = torch.arange(tokens.shape[1], device=self.device)
        hidden = self.target(tokens, positions, DenseAttention())
        return hidden, self.target.logits(hidden)


def _rows(text: NDArray[np.int64], window: int) -> NDArray[np.int64]:
    """[n, window], the rest left out."""
    count = len(text) // window
    return np.ascontiguousarray(text[: count * window].reshape(count, window), dtype=np.int64)


def train_medusa(
    target: LanguageModel,
    train: NDArray[np.int64],
    valid: NDArray[np.int64],
    directory: Path,
    options: TrainOptions,
    recipe: MedusaRecipe | None = None,
    console: Console | None = None,
) -> TrainReport:
    """Train heads for a target and write them, with their measured accuracies, to `directory`.

    train, valid [n] int64 tokens of text, best of the kind the target writes.
    """
    recipe = recipe or MedusaRecipe()
    trainee = MedusaTrainee(recipe, target.requires_grad_(False), train, valid, options.seed)
    report = fit(trainee, recipe.schedule.asked(options), options, directory, console)
    save_medusa(trainee.model, directory, trainee.accuracies())
    return report
