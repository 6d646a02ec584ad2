"""Starts the training of a head from an older head, where that is better than a fresh start.

An older head fits its own recommender. How much of it fits a newly trained one depends on how far
the new states have moved. So each possible start is measured on some training batches, and the one
with the lowest loss is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from recserve.bundle.bundle import Bundle, BundleError
from recserve.training.loop import Trainee

Batch = TypeVar("Batch")
FRESH = "fresh"
NUM_BATCHES = 4


@dataclass(frozen=True)
class Start:
    """The chosen start of a training run.

    Attributes:
        chosen: Name of the start.
        losses: Mean loss of each possible start, by name.
    """

    chosen: str
    losses: Mapping[str, float]

    def to_dict(self) -> dict[str, object]:
        """Returns the values that the bundle records."""
        return {"chosen": self.chosen, "losses": dict(self.losses)}


def choose_start(trainee: Trainee[Batch], starts: Mapping[str, Mapping[str, Tensor]]) -> Start:
    """Gives the model the weights with the lowest loss.

    Args:
        trainee: A trainee whose model has its fresh weights.
        starts: Other weights by name. Weights that a start lacks stay fresh.

    Returns:
        The chosen start; the fresh weights win a tie.
    """
    model = trainee.model
    fresh = {name: value.clone() for name, value in model.state_dict().items()}
    batches = list(trainee.plan(0))[:NUM_BATCHES]
    losses = {}
    for name, weights in {FRESH: {}, **starts}.items():
        model.load_state_dict({**fresh, **weights})
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(0)  # the same draws for every start
            losses[name] = sum(float(trainee.loss(one).total) for one in batches) / len(batches)
    chosen = min(losses, key=lambda name: losses[name])
    model.load_state_dict({**fresh, **({} if chosen == FRESH else starts[chosen])})
    return Start(chosen, losses)


def old_section(old: Bundle, section: str) -> Bundle:
    """Returns the bundle if it has a section. Raises BundleError."""
    if not old.has(section):
        raise BundleError(f"{old.root}: has no {section} to start from")
    return old
