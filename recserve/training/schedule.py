"""Learning-rate schedule and optimiser settings of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from recserve.training.options import TrainOptions


@dataclass(frozen=True)
class Schedule:
    """Settings of the optimisers: linear warm-up, then cosine decay, and an average of the weights.

    Attributes:
        epochs: Number of epochs.
        learning_rate: Peak learning rate.
        weight_decay: Weight decay of matrices.
        warmup: Share of the run in which the learning rate rises.
        floor: Final learning rate as a share of the peak.
        averaging: Decay per step of the averaged weights, which are validated and saved; 0 turns
            averaging off.
        max_norm: Bound on the norm of the gradient.
        betas: Momentum coefficients of AdamW.
        rates: Pairs of a name prefix and a relative learning rate for the parameters with this
            prefix. Their weight decay per step stays the same.
        orthogonal: Name prefixes of the matrices that Muon moves; AdamW moves all other parameters.
    """

    epochs: int
    learning_rate: float
    weight_decay: float = 0.1
    warmup: float = 0.1
    floor: float = 0.02
    averaging: float = 0.99
    max_norm: float = 1.0
    betas: tuple[float, float] = (0.9, 0.98)
    rates: tuple[tuple[str, float], ...] = ()
    orthogonal: tuple[str, ...] = ()

    def with_options(self, options: TrainOptions) -> Schedule:
        """Returns the schedule with the epochs and the learning rate of the options, if they are
        set.
        """
        rate = self.learning_rate if options.learning_rate is None else options.learning_rate
        return replace(self, epochs=options.epochs or self.epochs, learning_rate=rate)

    def rate(self, name: str) -> float:
        """Returns the relative learning rate of a parameter."""
        return next((rate for prefix, rate in self.rates if name.startswith(prefix)), 1.0)

    def factor(self, progress: float) -> float:
        """Returns the learning rate as a share of its peak.

        Args:
            progress: Finished share of the run, 0 to 1.
        """
        if progress < self.warmup:
            return max(progress, 1e-3) / self.warmup
        cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
        return self.floor + (1 - self.floor) * cosine
