"""Options and reports of a training run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from recserve.kernels.native.processor import processor
from recserve.training.time_limit import NO_LIMIT, Clock, TimeLimit


@dataclass(frozen=True)
class TrainOptions:
    """Options of `recserve train`. None means the recipe's own value.

    Attributes:
        epochs: Number of epochs, at least 1.
        max_minutes: Time limit of this run, without the runs that it resumes. Training, validation
            and what follows them end within it, and the learning rate decays in time for it.
        clock: What `max_minutes` counts. `processor`: the process's time on the processor, for
            comparisons on a machine that does other work too.
        seed: Seed of weights and draws, at least 0.
        device: `auto` is CUDA if the machine has it.
        resume: True continues from the last checkpoint in the bundle, if there is one.
        input: Input form of a recommender.
        precision: `auto` is bfloat16 matrix products where they are faster than float32 ones.
        learning_rate: Peak learning rate, above 0.
        half_life_days: As in RecommenderRecipe, above 0.
        name: Which drafter is trained.
        start_from: Older bundle whose head the training of a drafter or a retriever starts from, if
            that has a lower loss than a fresh start.
        llm: Folder of the target of a drafter for texts. Language models that the run writes get
            its tokenizer.
        started: The limit that `max_minutes` gives, counted from `start`; None before it.

    Raises:
        ValueError: If a value is out of range. The message names the field, its bound and the
            value.
    """

    epochs: int | None = None
    max_minutes: float | None = None
    clock: Clock = "wall"
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    resume: bool = False
    input: Literal["codes", "items"] = "items"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    learning_rate: float | None = None
    half_life_days: float | None = None
    name: Literal["speculative", "nezha"] = "speculative"
    start_from: Path | None = None
    llm: Path | None = None
    started: TimeLimit | None = None

    def __post_init__(self) -> None:
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"epochs is {self.epochs}; train for at least 1")
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise ValueError(f"max_minutes is {self.max_minutes}; it must be above 0")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must be 0 or more")
        for name in ("learning_rate", "half_life_days"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be above 0 and finite")
        choices = {
            "clock": ("wall", "processor"),
            "device": ("auto", "cpu", "cuda"),
            "input": ("codes", "items"),
            "name": ("speculative", "nezha"),
            "precision": ("auto", "float32", "bfloat16"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose one of {allowed}")

    def start(self) -> TrainOptions:
        """Returns the options with a time limit that runs from now on, or has been running."""
        if self.started is not None:
            return self
        return replace(self, started=TimeLimit.of(self.max_minutes, self.clock))

    @property
    def limit(self) -> TimeLimit:
        """What is left of `max_minutes`; no limit before `start`."""
        return NO_LIMIT if self.started is None else self.started

    def part(self, share: float) -> TrainOptions:
        """Returns options whose time limit ends after this share of the time left."""
        return replace(self, started=self.start().limit.part(share))

    def torch_device(self) -> torch.device:
        """Returns the device to train on.

        Raises:
            ValueError: If `device` is `cuda` and the machine has none.
        """
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device is 'cuda' but this machine has none; use 'auto' or 'cpu'")
        cuda = self.device != "cpu" and torch.cuda.is_available()
        return torch.device("cuda" if cuda else "cpu")

    def autocast_dtype(self) -> torch.dtype | None:
        """Returns the dtype of matrix products under autocast; None means float32 throughout."""
        if self.precision != "auto":
            return torch.bfloat16 if self.precision == "bfloat16" else None
        if self.torch_device().type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported() else None
        # AVX-512's bfloat16 products are twice as fast as float32 ones on AMD, and slower on Intel
        # (75 against 125 GFLOP/s on one Xeon). AMX is faster than both.
        on_amd = torch.cpu._is_avx512_bf16_supported() and "AMD" in processor().name
        return torch.bfloat16 if on_amd or torch.cpu._is_amx_tile_supported() else None


@dataclass(frozen=True)
class EpochRecord:
    """Figures of one epoch.

    Attributes:
        epoch: Number of the epoch, from 1.
        losses: Mean loss per target, by name.
        metrics: Validation metrics.
        seconds: Time since the run began, including the runs that it resumes.
        tokens_per_s: Targets per second of training.
    """

    epoch: int
    losses: dict[str, float]
    metrics: dict[str, float]
    seconds: float
    tokens_per_s: float


@dataclass(frozen=True)
class TrainReport:
    """Result of a training run.

    Attributes:
        epochs: Number of finished epochs.
        best_epoch: Epoch whose weights the model has now, from 1.
        selection: Name of the validation metric that selected it.
        metrics: Validation metrics of the best epoch.
        stopped: Why the run ended.
        seconds: Training and validation time, including the runs that this one resumes.
        directory: Folder of the trained model.
        history: One record per epoch.
    """

    epochs: int
    best_epoch: int
    selection: str
    metrics: dict[str, float]
    stopped: Literal["epochs", "max_minutes"]
    seconds: float
    directory: Path
    history: list[EpochRecord] = field(default_factory=list)
