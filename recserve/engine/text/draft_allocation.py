"""Load-aware draft depth: as deep as the expected tokens justify the time, or no draft at all.

While a forward pass is bound by reading the weights, draft nodes are nearly free. With many texts
each node costs its arithmetic. Before a step, every drafter gets the depth that maximises

    expected tokens of the step / expected milliseconds of the step

The milliseconds come from a measured cost per number of nodes, corrected by completed steps. The
tokens come from the acceptance of earlier drafts. One percent of the time pays for deeper trials,
so that the statistics of a drafter that does not draft stay up to date.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from recserve.core.acceptance_watch import Average
from recserve.engine.text.step_cost import Cost
from recserve.speculation.draft import Budget, TextDraft

MAX_DEPTH = 16  # at this depth a draft gets its whole budget
STEP_MEMORY = 16  # values that an average of step times remembers
PRIOR_CHANCE, PRIOR_WEIGHT = 0.7, 4  # acceptance before any draft was verified
TRIAL_LEVELS, TRIAL_SHARE = 2, 0.01  # additional levels of a trial; its share of the time
MARGIN = 1.02  # a draft must raise the rate of tokens by this factor
HOLD = 16  # steps between two plans at the same load, once all drafters are known
KNOWN = 32  # drafts after which the statistics of a drafter count as known
PLAIN_EVERY = 128  # steps between two measured steps without drafts


def _levels(value: float, weight: int) -> list[Average]:
    return [Average(value, weight) for _ in range(MAX_DEPTH)]


@dataclass
class AcceptanceStats:
    """Statistics of the drafts of one drafter, over all texts.

    Attributes:
        reached: By level, the share of drafts that reach it, where their budget allows it.
        accepted: By level, the share that is accepted, given that the level above is accepted.
        width: Nodes per level.
        call_ms: Milliseconds of one call, by the bit length of its number of texts, then by depth.
        spare_ms: Milliseconds that the next trial may cost. The first trial is free, so that every
            drafter becomes known.
    """

    reached: list[Average] = field(default_factory=lambda: _levels(1.0, PRIOR_WEIGHT))
    accepted: list[Average] = field(default_factory=lambda: _levels(0.0, 0))
    width: Average = field(default_factory=lambda: Average(1.0, 1))
    call_ms: dict[int, dict[int, Average]] = field(default_factory=dict)
    spare_ms: float = math.inf

    def gains(self) -> list[float]:
        """Returns the expected accepted tokens of drafts with 0 to MAX_DEPTH levels."""
        gains, path, chance = [0.0], 1.0, PRIOR_CHANCE
        for reached, accepted in zip(self.reached, self.accepted, strict=True):
            known = accepted.value * accepted.weight + chance * PRIOR_WEIGHT
            chance = known / (accepted.weight + PRIOR_WEIGHT)
            path *= chance
            gains.append(gains[-1] + path * reached.value)
        return gains

    def nodes(self) -> list[float]:
        """Returns the expected nodes of drafts with 0 to MAX_DEPTH levels."""
        reached = np.array([level.value for level in self.reached])
        return [0.0, *(self.width.value * reached.cumsum()).tolist()]

    def drafting_ms(self, num_texts: int) -> list[float]:
        """Returns the milliseconds of one call for drafts with 0 to MAX_DEPTH levels.

        Times are linear between measured depths. They come from the nearest measured number of
        texts.
        """
        if not self.call_ms:
            return [0.0] * (MAX_DEPTH + 1)
        bits = num_texts.bit_length()
        nearest = min(self.call_ms, key=lambda known: abs(known - bits))
        known = sorted((depth, own.value) for depth, own in self.call_ms[nearest].items())
        depths, times = np.array([(0, 0.0), *known]).T
        wanted = np.arange(MAX_DEPTH + 1)
        beyond = np.maximum(wanted / depths[-1], 1.0)
        scale = math.sqrt(2.0 ** (bits - nearest))
        return (scale * np.interp(wanted, depths, times) * beyond).tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Plan:
    """The plan for one drafter.

    Attributes:
        depth: The depth with the highest rate of tokens.
        trial_depth: The depth of a trial.
        trial_ms: Milliseconds that a trial loses.
    """

    depth: int
    trial_depth: int
    trial_ms: float


@dataclass
class _StepTime:
    """Times of steps at one load.

    Attributes:
        measured: Measured milliseconds.
        stated: Milliseconds by the measured cost of their nodes.
    """

    measured: Average = field(default_factory=lambda: Average(memory=STEP_MEMORY))
    stated: Average = field(default_factory=lambda: Average(memory=STEP_MEMORY))


class DraftAllocation:
    """Chooses the depth of all drafts of one model, given the cost of a step by its number of
    nodes.
    """

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self._stats: dict[str, AcceptanceStats] = {}
        self._times: dict[
            tuple[int, bool], _StepTime
        ] = {}  # by bit length of num_texts, any drafts
        self._load: object = None
        self._plans: dict[str, _Plan] = {}
        self._hold = self._since_plain = 0

    def depths(self, counts: Mapping[str, int], num_texts: int, prefill: int) -> dict[str, int]:
        """Returns the depth of the next drafts by drafter. Depth 0 means no draft.

        Args:
            counts: Number of texts that may draft, by drafter.
            num_texts: Number of texts that step, with or without a draft.
            prefill: Number of prompt tokens in the same forward pass.
        """
        load = (counts, num_texts, prefill)
        if load != self._load or not self._hold:
            self._plan(counts, num_texts, prefill)
            known = all(self._stats[drafter].reached[0].weight >= KNOWN for drafter in counts)
            self._load, self._hold = load, HOLD if known else 1
        self._hold -= 1
        self._since_plain += 1
        unknown = not prefill and (num_texts.bit_length(), False) not in self._times
        if unknown or self._since_plain > PLAIN_EVERY:
            self._hold = self._since_plain = 0
            return dict.fromkeys(counts, 0)
        depths = {}
        for drafter, plan in self._plans.items():
            stats, depths[drafter] = self._stats[drafter], plan.depth
            if plan.trial_depth > plan.depth and stats.spare_ms >= plan.trial_ms:
                stats.spare_ms, depths[drafter] = 0.0, plan.trial_depth
        if not any(depths.values()):
            self._since_plain = 0
        return depths

    def budget(self, drafter: str, depth: int, most: Budget) -> Budget:
        """Returns the budget of a draft of this depth, within the text's budget `most`."""
        if depth >= MAX_DEPTH:
            return most
        nodes = math.ceil(self._stats[drafter].width.value * depth)
        return Budget(min(nodes, most.num_nodes), min(depth, most.depth))

    def drafted(
        self, drafter: str, budgets: Seq[Budget], drafts: Seq[TextDraft], milliseconds: float
    ) -> None:
        """Records one call of a drafter.

        Args:
            drafter: Name of the drafter.
            budgets: Budgets of the texts that could draft.
            drafts: Drafts of the same texts.
            milliseconds: Time of the call.
        """
        stats = self._stats[drafter]
        depth = max(draft.levels for draft in drafts)
        bucket = stats.call_ms.setdefault(len(drafts).bit_length(), {})
        known = bucket.setdefault(max(min(depth, MAX_DEPTH), 1), Average(memory=STEP_MEMORY))
        # Another process interrupted a call that took far longer.
        known.add(min(milliseconds, 2 * known.value) if known.weight else milliseconds)
        for budget, draft in zip(budgets, drafts, strict=True):
            for level, average in enumerate(stats.reached[: budget.depth]):
                average.add(level < draft.levels)
            if draft.levels:
                stats.width.add(draft.num_nodes / draft.levels)

    def verified(self, drafter: str, depth: int, accepted: int) -> None:
        """Records how many levels of a draft of this depth were accepted."""
        for level, average in enumerate(self._stats[drafter].accepted[: min(accepted + 1, depth)]):
            average.add(level < accepted)

    def stepped(self, num_texts: int, nodes: int, milliseconds: float) -> None:
        """Records the time of a step without prefill, without its drafting."""
        key = num_texts.bit_length(), nodes > num_texts
        known = self._times.setdefault(key, _StepTime())
        # Another process interrupted a step that took far longer.
        known.measured.add(min(milliseconds, 2 * known.measured.value or milliseconds))
        known.stated.add(self._cost(nodes))
        for drafter in self._plans:
            self._stats[drafter].spare_ms += TRIAL_SHARE * milliseconds / len(self._plans)

    def _step_ms(self, num_texts: int, stated_ms: float, drafted: bool) -> float:
        """Returns the expected milliseconds of a step whose nodes cost `stated_ms`.

        A step faster than stated lowers the cost of every node. A slower step raises the fixed
        cost.
        """
        bits = num_texts.bit_length()
        plain = self._times.get((bits, False))
        known = self._times.get((bits, drafted), plain)
        if known is None:
            return stated_ms
        scale = 1.0 if plain is None else min(plain.measured.value / plain.stated.value, 1.0)
        return known.measured.value + scale * (stated_ms - known.stated.value)

    def _plan(self, counts: Mapping[str, int], num_texts: int, prefill: int) -> None:
        """Chooses a depth for each drafter in turn, given the choices before it."""
        self._plans = {}
        tokens, nodes, drafting_ms = float(num_texts), float(num_texts + prefill), 0.0
        # Prompt tokens are computed with any draft, and lead to tokens of later steps.
        prefill_ms = self._cost(prefill)
        known = {name: self._stats.setdefault(name, AcceptanceStats()) for name in counts}
        # The drafter with the highest acceptance takes the cheap nodes first.
        for drafter in sorted(counts, key=lambda name: -known[name].gains()[1]):
            stats, count = known[drafter], counts[drafter]
            gains, sizes, calls = stats.gains(), stats.nodes(), stats.drafting_ms(count)
            times, rates = [], []
            for depth in range(MAX_DEPTH + 1):
                stated_ms = self._cost(nodes + count * sizes[depth]) - prefill_ms
                drafted = depth > 0 or nodes > num_texts + prefill
                spent = self._step_ms(num_texts, stated_ms, drafted)
                times.append(max(spent + drafting_ms + calls[depth], 1e-9))
                rates.append((tokens + count * gains[depth]) / times[-1])
            rates[0] *= MARGIN
            best = int(np.argmax(rates))
            deepest = sum(level.value > TRIAL_SHARE for level in stats.reached)
            trial = min(best + TRIAL_LEVELS, deepest or TRIAL_LEVELS)
            lost = times[trial] - (tokens + count * gains[trial]) / rates[best]
            self._plans[drafter] = _Plan(best, trial, max(lost, TRIAL_SHARE * times[best]))
            tokens, nodes = tokens + count * gains[best], nodes + count * sizes[best]
            drafting_ms += calls[best]
