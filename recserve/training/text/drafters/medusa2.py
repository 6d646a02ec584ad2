"""Medusa-2: heads and target are trained together, so that the target's states suit the heads.

    stage 1    the heads alone, on the frozen target (Medusa-1)
    stage 2    both: loss of the target + 0.2 * loss of the heads; the heads' rate is 4 times higher

The loss of the target is the cross-entropy of the text, or, in self-distillation, the divergence
KL(old target || new target) at every position. Self-distillation keeps the target's answers where
its training data is not at hand. The result is a new target and heads that fit it. Speculation is
lossless with respect to the new target.

Source: Medusa (arXiv 2401.10774), sections 2.2.2 (Medusa-2) and 2.3.2 (self-distillation).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor, nn

from recserve.drafters.medusa.network import MedusaHeads
from recserve.models.attention import DenseAttention
from recserve.models.language_model import LanguageModel
from recserve.models.saving import save_language_model
from recserve.tokenizer.tokenizer import copy_tokenizer
from recserve.training.loop import StepLoss, fit
from recserve.training.options import TrainOptions, TrainReport
from recserve.training.schedule import Schedule
from recserve.training.text.drafters.medusa import MedusaRecipe, MedusaTrainee

TARGET, HEADS, WARM_UP = "target", "heads", "warm-up"  # folders of the results and of stage 1
WARM_UP_SHARE = 1 / 3  # of `max_minutes`
LOSS_TO_REPORT = 0.05  # nats per token


@dataclass(frozen=True)
class Medusa2Recipe:
    """Settings of a joint training.

    Attributes:
        heads: Sizes of the heads, and the schedule of stage 1.
        weight: Weight of the heads' loss beside the target's.
        distill: True keeps the old target's distribution; False learns the text.
        schedule: Schedule of stage 2; its rate is the target's.
    """

    heads: MedusaRecipe = field(
        default_factory=lambda: MedusaRecipe(schedule=Schedule(1, 1e-3, weight_decay=0.0))
    )
    weight: float = 0.2
    distill: bool = False
    schedule: Schedule = field(
        default_factory=lambda: Schedule(2, 2.5e-4, weight_decay=0.0, rates=(("heads.", 4.0),))
    )


class TargetWithHeads(nn.Module):
    """A target and its heads, as one module of trained weights."""

    def __init__(self, target: LanguageModel, heads: MedusaHeads) -> None:
        super().__init__()
        self.target, self.heads = target, heads


class Medusa2Trainee:
    """Target and heads in stage 2, for the training loop.

    `objective` is the negative loss on the validation text. It selects the checkpoint, so heads
    never improve at an unbounded cost of the target.
    """

    selection = "objective"

    def __init__(self, recipe: Medusa2Recipe, heads: MedusaTrainee, old: LanguageModel) -> None:
        """Measures the old target on the validation text.

        Args:
            recipe: Settings.
            heads: The heads with the target that is trained, and the rows of text.
            old: The target before the training, which stays as it is.
        """
        self.recipe, self.heads, self.old = recipe, heads, old
        self.model = TargetWithHeads(heads.target, heads.model)
        rows = self.heads.validation_batches()
        self.old_likelihood = sum(self._likelihood(old, part) for part in rows) / self._count

    def plan(self, epoch: int) -> Sequence[NDArray[np.int64]]:
        """Returns the row numbers of each batch."""
        return self.heads.plan(epoch)

    def loss(self, batch: NDArray[np.int64]) -> StepLoss:
        """Returns the loss of the target plus the weighted loss of the heads."""
        return self._loss(self.heads.train[batch])

    def validate(self) -> dict[str, float]:
        """Returns the objective, the target's log-likelihood per token and its change by the
        training, and the heads' mean accept length and accuracies.
        """
        rows, objective, likelihood = self.heads.validation_batches(), 0.0, 0.0
        for part in rows:
            objective -= float(self._loss(part).total) * len(part)
            likelihood += self._likelihood(self.heads.target, part)
        likelihood /= self._count
        return {
            "objective": objective / self._count,
            "log_likelihood": likelihood,
            "log_likelihood_change": likelihood - self.old_likelihood,
            **self.heads.validate(),
        }

    def _loss(self, rows: NDArray[np.int64]) -> StepLoss:
        tokens = torch.from_numpy(rows).to(self.heads.device)
        hidden, logits = _outputs(self.heads.target, tokens)
        # The heads learn what the new target says; this loss does not move what it says.
        heads, parts = self.heads.heads_loss(hidden, logits.detach())
        if self.recipe.distill:
            with torch.no_grad():
                wanted = _outputs(self.old, tokens)[1].float().log_softmax(-1)
            given = logits.float().log_softmax(-1)
            target = F.kl_div(
                given.flatten(0, 1), wanted.flatten(0, 1), log_target=True, reduction="batchmean"
            )
        else:
            target = _cross_entropy(logits, tokens)
        parts = {"target": target.detach(), **parts}
        return StepLoss(target + self.recipe.weight * heads, parts, tokens.numel())

    def _likelihood(self, model: LanguageModel, rows: NDArray[np.int64]) -> float:
        """Returns the mean log-likelihood of a token, times the number of rows."""
        tokens = torch.from_numpy(rows).to(self.heads.device)
        with torch.inference_mode():
            return -float(_cross_entropy(_outputs(model, tokens)[1], tokens)) * len(rows)

    @property
    def _count(self) -> int:
        """Number of validation rows."""
        return min(len(self.heads.valid), self.recipe.heads.validation_rows)


def train_medusa2(
    target: LanguageModel,
    train: NDArray[np.int64],
    valid: NDArray[np.int64],
    directory: Path,
    options: TrainOptions,
    recipe: Medusa2Recipe | None = None,
    console: Console | None = None,
) -> TrainReport:
    """Trains heads together with a copy of their target.

    `directory` receives the new target in `target`, in Hugging Face's layout, and the heads in
    `heads`. Stage 1 takes a third of `max_minutes`. `epochs` and `learning_rate` are of stage 2.

    Args:
        target: The language model, which stays as it is.
        train: [n] int64 training tokens.
        valid: [n] int64 validation tokens.
        directory: Folder that receives both.
        options: Options of the run. The new target gets the tokenizer of `options.llm`.
        recipe: Sizes and settings; None means the defaults.
        console: Where progress is printed; None means standard error.

    Returns:
        The report of stage 2.

    Raises:
        ValueError: If a text is too short, or the heads of `options.start_from` have another shape.
    """
    options = options.start()
    recipe, console = recipe or Medusa2Recipe(), console or Console(stderr=True)
    new = copy.deepcopy(target).float().requires_grad_(False)
    heads = MedusaTrainee(recipe.heads, new, train, valid, options.seed)
    if options.start_from is not None:
        heads.start_from(options.start_from)
    checkpoint = directory / "checkpoint.safetensors"
    if not options.resume:
        checkpoint.unlink(missing_ok=True)  # of an earlier run, whose stage 2 is not this one's
    if not checkpoint.exists():
        console.print("stage 1: the heads alone")
        first = options.part(WARM_UP_SHARE)
        fit(heads, recipe.heads.schedule, first, directory / WARM_UP, console)
        console.print("stage 2: target and heads")
    heads.model.requires_grad_(True)
    new.requires_grad_(True)
    trainee = Medusa2Trainee(recipe, heads, target)
    report = fit(trainee, recipe.schedule.with_options(options), options, directory, console)
    lost = -report.metrics["log_likelihood_change"]
    if lost > LOSS_TO_REPORT:
        console.print(
            f"warning: the new target lost {lost:.2f} nats per token of held-out text; give the "
            "training more text, or more time for the heads",
            soft_wrap=True,
        )
    heads.save(directory / HEADS)
    save_language_model(new.to(target.tokens.weight.dtype), directory / TARGET)
    if options.llm is not None:
        copy_tokenizer(options.llm, directory / TARGET)
    return report


def _outputs(model: LanguageModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns final hidden states [b, T, E] and logits [b, T, V] of tokens [b, T]."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    hidden = model(tokens, positions, DenseAttention())
    return hidden, model.logits(hidden)


def _cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    """Returns the mean cross-entropy of each row's next tokens."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
