"""Load-aware drafting in a stated world: never slower than the better of never and always drafting
by more than 3 %, from the first step on, though nothing is known of the drafter.

The world: a step of n nodes takes `cost(n)`, a call of the drafter a part for itself and a part for
each text and level; every level of a chain is kept with one probability. Texts end after 64 tokens
and others take their place.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from recserve.core.cost import Cost
from recserve.engine.text.budget import NOTHING, Asking, DraftBudget
from recserve.speculation.draft import Budget
from tests.support.grids import covering

LEVELS, LENGTH = 5, 64
FULL = Budget(64, 64)
# Milliseconds: reading weights is all that few nodes cost, and then each costs its arithmetic.
STEP = Cost((1, 8, 64, 1024), (4.0, 5.0, 20.0, 308.0))
PLACES = np.arange(LEVELS)


@dataclass
class Drafter:
    """kept: chance of a level. call_ms, level_ms: of a call, and of a level of one text."""

    kept: float
    call_ms: float
    level_ms: float


CHEAP, DEAR = (0.05, 0.01), (2.0, 0.6)


@dataclass
class World:
    """Some texts at once, and what became of them."""

    drafter: Drafter
    load: int
    random: np.random.Generator
    tokens: int = 0
    milliseconds: float = 0.0

    def step(self, depths: np.ndarray) -> tuple[np.ndarray, float, float]:
        """depths [B]: kept levels, and milliseconds of the step and of the drafter."""
        drafting = 0.0
        if depths.any():
            drafting = self.drafter.call_ms + self.drafter.level_ms * float(depths.sum())
        step = STEP(self.load + int(depths.sum()))
        luck = self.random.random((self.load, LEVELS)) < self.drafter.kept
        kept = (luck & (depths[:, None] > PLACES)).cumprod(1).sum(1)
        self.tokens += self.load + int(kept.sum())
        self.milliseconds += step + drafting
        return kept, step, drafting

    @property
    def rate(self) -> float:
        return self.tokens / self.milliseconds


def unaware(drafter: Drafter, load: int, depth: int, steps: int) -> float:
    world = World(drafter, load, np.random.default_rng(1))
    for _ in range(steps):
        world.step(np.full(load, depth))
    return world.rate


def aware(drafter: Drafter, load: int, busy: float, steps: int) -> float:
    """busy: by how much too long a step was measured at start."""
    measured = Cost(STEP.sizes, tuple(busy * ms for ms in STEP.milliseconds))
    world, budget = World(drafter, load, np.random.default_rng(1)), DraftBudget(measured)
    names = itertools.count()
    texts = [Asking(next(names), "d", FULL) for _ in range(load)]
    written = np.zeros(load)
    for _ in range(steps):
        given = [NOTHING] * load if budget.rests(load, 0, 0) else budget.spend(texts, 0)
        depths = np.array([min(budget.depth, LEVELS) for budget in given])
        kept, step, drafting = world.step(depths)
        drafted = int((depths > 0).sum())
        for text, allowed, depth in zip(texts, given, depths.tolist(), strict=True):
            if depth:
                budget.proposed(text, allowed, depth, depth)
        if drafted:
            budget.timed("d", int(depths.max()), drafted, drafting)
        for text, depth, own in zip(texts, depths.tolist(), kept.tolist(), strict=True):
            if depth:
                budget.judged(text, depth, depth, own)
        budget.stepped(load + int(depths.sum()), {"d": drafted} if drafted else {}, step)
        written += kept + 1
        for place in np.flatnonzero(written >= LENGTH).tolist():
            budget.forget(texts[place].id)
            texts[place], written[place] = Asking(next(names), "d", FULL), 0.0
    return world.rate


@pytest.mark.parametrize(
    "price,kept,load,busy",
    covering(
        {"cheap": CHEAP, "dear": DEAR},
        (0.05, 0.4, 0.7, 0.95),
        (1, 8, 32),
        {"idle": 1.0, "busy": 1.6},
        pairs=True,
    ),
)
def test_never_slower_than_the_better(price, kept, load, busy):
    drafter, steps = Drafter(kept, *price), 1500
    better = max(unaware(drafter, load, 0, 400), unaware(drafter, load, LEVELS, steps))
    assert aware(drafter, load, busy, steps) >= 0.97 * better
