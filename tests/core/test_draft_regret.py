"""Load-aware drafting in a stated world: never slower than the better of never and always drafting
by more than 3 %, from the first step on, though nothing is known of the drafter.

The world: a step of n nodes takes `cost(n)`, a call of the drafter a part for itself and a part for
each text and level; every level of a chain is accepted with one probability.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from recserve.core.draft_policy import Cost, DepthPolicy
from tests.support.grids import covering

LEVELS = 5
FULL = 64  # levels of the largest budget
# Milliseconds: reading weights is all that few nodes cost, and then each costs its arithmetic.
STEP = Cost((1, 8, 64, 1024), (4.0, 5.0, 20.0, 308.0))
PLACES = np.arange(LEVELS)


@dataclass
class Drafter:
    """accepted: chance of a level. call_ms, level_ms: of a call, and of a level of one text."""

    accepted: float
    call_ms: float
    level_ms: float


CHEAP, DEAR = (0.05, 0.01), (2.0, 0.6)


@dataclass
class World:
    """Some texts at once, and the tokens that they have."""

    drafter: Drafter
    load: int
    random: np.random.Generator
    tokens: int = 0
    milliseconds: float = 0.0

    def step(self, depth: int) -> tuple[np.ndarray, float, float]:
        """Accepted levels [B], and milliseconds of the step and of the drafter."""
        drafting = 0.0
        if depth:
            drafting = self.drafter.call_ms + self.drafter.level_ms * depth * self.load
        step = STEP(self.load * (1 + depth))
        luck = self.random.random((self.load, LEVELS)) < self.drafter.accepted
        accepted = (luck & (depth > PLACES)).cumprod(1).sum(1)
        self.tokens += self.load + int(accepted.sum())
        self.milliseconds += step + drafting
        return accepted, step, drafting

    @property
    def rate(self) -> float:
        return self.tokens / self.milliseconds


def unaware(drafter: Drafter, load: int, depth: int, steps: int) -> float:
    world = World(drafter, load, np.random.default_rng(1))
    for _ in range(steps):
        world.step(depth)
    return world.rate


def aware(drafter: Drafter, load: int, busy: float, steps: int) -> float:
    """busy: by how much too long a step was measured at start."""
    measured = Cost(STEP.sizes, tuple(busy * ms for ms in STEP.milliseconds))
    world, policy = World(drafter, load, np.random.default_rng(1)), DepthPolicy(measured)
    for _ in range(steps):
        allowed = policy.depths({"d": load}, load, 0)["d"]
        depth = min(allowed, LEVELS)
        accepted, step, drafting = world.step(depth)
        if allowed:
            policy.record_drafts("d", [(min(allowed, FULL), depth, depth)] * load, drafting)
            for own in accepted.tolist():
                policy.record("d").add(own, depth, own)
        policy.record_step(load, load * (1 + depth), step)
    return world.rate


@pytest.mark.parametrize(
    "price,accepted,load,busy",
    covering(
        {"cheap": CHEAP, "dear": DEAR},
        (0.05, 0.4, 0.7, 0.95),
        (1, 8, 32),
        {"idle": 1.0, "busy": 1.6},
        pairs=True,
    ),
)
def test_never_slower_than_the_better(price, accepted, load, busy):
    drafter, steps = Drafter(accepted, *price), 1500
    better = max(unaware(drafter, load, 0, 400), unaware(drafter, load, LEVELS, steps))
    assert aware(drafter, load, busy, steps) >= 0.97 * better
