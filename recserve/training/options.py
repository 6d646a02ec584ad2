"""What a training run is asked for, and what it says when it is done."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch


@dataclass(frozen=True)
class TrainOptions:
    """Options of `recserve train`; None means the recipe's own value.

    max_minutes: of this run, earlier runs that it resumes not counted; training and validation end
    within it, and the learning rate falls in time for that.
    device: `auto` is CUDA where there is one. precision: `auto` is bfloat16 products where the
    processor has them. resume: go on from the last checkpoint of the bundle, if it has one. input:
    input form of a recommender. name, head: of a drafter. Raises ValueError naming the field, its
    bound and what came.
    """

    epochs: int | None = None
    max_minutes: float | None = None
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    resume: bool = False
    input: Literal["codes", "items"] = "items"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    learning_rate: float | None = None
    name: Literal["speculative", "nezha"] = "speculative"
    head: Literal["recurrent", "levels"] = "recurrent"

    def __post_init__(self) -> None:
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"epochs is {self.epochs}; train for at least 1")
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise ValueError(f"max_minutes is {self.max_minutes}; it must be above 0")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must be 0 or more")
        if self.learning_rate is not None and not self.learning_rate > 0:
            raise ValueError(f"learning_rate is {self.learning_rate}; it must be above 0")
        choices = {
            "device": ("auto", "cpu", "cuda"),
            "head": ("recurrent", "levels"),
            "input": ("codes", "items"),
            "name": ("speculative", "nezha"),
            "precision": ("auto", "float32", "bfloat16"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose one of {allowed}")

        if self.head == "levels" and self.name == "nezha":
            raise ValueError("head is 'levels' and name 'nezha'; nezha decodes by a recurrent head")

    def torch_device(self) -> torch.device:
        """The device to train on. Raises ValueError if CUDA is asked for and absent."""
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device is 'cuda' but this machine has none; use 'auto' or 'cpu'")
        cuda = self.device != "cpu" and torch.cuda.is_available()
        return torch.device("cuda" if cuda else "cpu")

    def autocast_dtype(self) -> torch.dtype | None:
        """Type of matrix products under autocast, None for float32 throughout."""
        if self.precision != "auto":
            return torch.bfloat16 if self.precision == "bfloat16" else None
        if self.torch_device().type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported() else None
        has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if has_bf16 else None


@dataclass(frozen=True)
class EpochRecord:
    """One epoch: mean losses per target, validation metrics, seconds since the run began, targets
    per second."""

    epoch: int
    losses: dict[str, float]
    metrics: dict[str, float]
    seconds: float
    tokens_per_s: float


@dataclass(frozen=True)
class TrainReport:
    """What a run did.

    best_epoch: 1-based, the one that was kept, chosen by `selection` on validation. metrics: its
    validation metrics. stopped: why it ended. seconds: training and validation, earlier parts of a
    resumed run included. directory: where the kept model lies.
    """

    epochs: int
    best_epoch: int
    selection: str
    metrics: dict[str, float]
    stopped: Literal["epochs", "early stop", "max_minutes"]
    seconds: float
    directory: Path
    history: list[EpochRecord] = field(default_factory=list)
