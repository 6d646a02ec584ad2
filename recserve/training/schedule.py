"""How the weights of a run move, step by step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from recserve.training.options import TrainOptions


@dataclass(frozen=True)
class Schedule:
    """How weights move: linear warm-up, cosine to `floor` of the peak, an average of the weights.

    warmup: share of all steps. averaging: decay per step of the average that is validated and kept,
    0 for none. patience: epochs without a better validation before it stops, 0 for never. max_norm:
    of the gradient. rates: learning rate of the parameters whose names begin so, relative to the
    others'; their decay per step stays the same. orthogonal: beginnings of the names of matrices
    that Muon moves; AdamW moves all others.
    """

    epochs: int
    learning_rate: float
    weight_decay: float = 0.1
    warmup: float = 0.1
    floor: float = 0.02
    averaging: float = 0.99
    patience: int = 0
    max_norm: float = 1.0
    betas: tuple[float, float] = (0.9, 0.98)
    rates: tuple[tuple[str, float], ...] = ()
    orthogonal: tuple[str, ...] = ()

    def asked(self, options: TrainOptions) -> Schedule:
        """With what the options say otherwise."""
        rate = self.learning_rate if options.learning_rate is None else options.learning_rate
        return replace(self, epochs=options.epochs or self.epochs, learning_rate=rate)

    def rate(self, name: str) -> float:
        """Relative learning rate of a parameter."""
        return next((rate for prefix, rate in self.rates if name.startswith(prefix)), 1.0)

    def factor(self, progress: float) -> float:
        """Share of the peak learning rate. progress: of the run, 0 to 1."""
        if progress < self.warmup:
            return max(progress, 1e-3) / self.warmup
        cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
        return self.floor + (1 - self.floor) * cosine
