"""What all drafters for texts share in training: rows of text, the network, the run, the files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor, nn

from recserve.models.language_model import LanguageModel
from recserve.training.loop import StepLoss, fit
from recserve.training.options import TrainOptions, TrainReport
from recserve.training.schedule import Schedule
from recserve.training.text.windows import shuffled_batches, windows


class DrafterRecipe(Protocol):
    """Settings that every recipe has."""

    @property
    def window(self) -> int:
        """Tokens of a training row."""
        ...

    @property
    def batch(self) -> int:
        """Rows per step."""
        ...

    @property
    def validation_rows(self) -> int:
        """Most validation rows that are measured."""
        ...

    @property
    def schedule(self) -> Schedule:
        """Learning rate, averaging and stopping."""
        ...


Recipe = TypeVar("Recipe", bound=DrafterRecipe)
Network = TypeVar("Network", bound=nn.Module)


class DrafterTrainee(ABC, Generic[Recipe, Network]):
    """A drafter on a frozen target, for the training loop.

    Attributes:
        recipe: Sizes and settings.
        target: The language model.
        train: [n, T] int64 training rows.
        valid: [m, T] int64 validation rows.
        model: The network, on the target's device.
    """

    selection = "accept_length"

    def __init__(
        self,
        recipe: Recipe,
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
            seed: Seed of weights, order and draws.

        Raises:
            ValueError: If either text is shorter than a window, or a window is too short for the
                drafter.
        """
        self.recipe, self.target, self.seed = recipe, target, seed
        self.device = target.tokens.weight.device
        self.train, self.valid = (windows(text, recipe.window) for text in (train, valid))
        torch.manual_seed(seed)
        self.model = self.new_network(train)

    @classmethod
    def train_on(
        cls,
        target: LanguageModel,
        train: NDArray[np.int64],
        valid: NDArray[np.int64],
        directory: Path,
        options: TrainOptions,
        recipe: Recipe,
        console: Console | None = None,
    ) -> TrainReport:
        """Trains a drafter for a target and writes it in its published layout.

        Args:
            target: The language model.
            train: [n] int64 training tokens, preferably text that the target wrote.
            valid: [n] int64 validation tokens.
            directory: Folder that receives the drafter.
            options: Options of the run.
            recipe: Sizes and settings.
            console: Where progress is printed; None means standard error.

        Returns:
            The report of the run.

        Raises:
            ValueError: If a text is too short, or the drafter of `options.start_from` has another
                shape.
        """
        trainee = cls(recipe, target.requires_grad_(False), train, valid, options.seed)
        if options.start_from is not None:
            trainee.start_from(options.start_from)
        report = fit(trainee, recipe.schedule.with_options(options), options, directory, console)
        trainee.save(directory)
        return report

    @abstractmethod
    def new_network(self, train: NDArray[np.int64]) -> Network:
        """Returns an initialised network on the device, for training tokens [n]."""

    @abstractmethod
    def load(self, folder: Path) -> Network:
        """Returns the network of a folder."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes the network to a folder."""

    @abstractmethod
    def loss(self, batch: NDArray[np.int64]) -> StepLoss:
        """Returns the loss of the training rows with these numbers."""

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Returns `accept_length` and other metrics of the validation rows."""

    def start_from(self, folder: Path) -> None:
        """Takes the weights of an older network of the same shape.

        Raises:
            ValueError: If its configuration differs; the message names the field.
        """
        old = self.load(folder)
        before: Any = old.config
        config: Any = self.model.config
        for name in (part.name for part in fields(config)):
            theirs, ours = getattr(before, name), getattr(config, name)
            if theirs != ours:
                raise ValueError(f"{folder.name}: {name} is {theirs}; the new network has {ours}")
        self.model.load_state_dict(old.state_dict())

    def plan(self, epoch: int) -> Sequence[NDArray[np.int64]]:
        """Returns the row numbers of each batch."""
        return shuffled_batches(len(self.train), self.recipe.batch, self.seed, epoch)

    def validation_batches(self) -> list[NDArray[np.int64]]:
        """Returns the measured validation rows, at most a batch at a time."""
        rows = self.valid[: self.recipe.validation_rows]
        return np.array_split(rows, -(-len(rows) // self.recipe.batch))


def accept_metrics(right: Tensor, name: str) -> dict[str, float]:
    """Returns the mean accept length of a chain, and the accuracy of each of its places.

    Args:
        right: [K, n] bool, whether each of K guesses at n positions is right.
        name: What a place is called, such as `slot`.
    """
    metrics = {f"{name}_{place}": float(own.float().mean()) for place, own in enumerate(right)}
    return {"accept_length": float(right.cumprod(0).sum(0).float().mean()), **metrics}
