"""The verification budget of a step: draft nodes where they are expected to buy the most tokens.

While a forward is bound by reading the weights, nodes are nearly free; with many texts each costs
its arithmetic. What a step of n packed nodes costs is measured (costs.py), what a level of a draft
is worth is known from what happened to the drafter's drafts before (chances.py). Levels are bought
in the order of tokens per millisecond, over all texts, and as many of them as make

    tokens expected of the step / milliseconds of the step

largest; so drafts grow shorter as the load rises, then fewer, and end without a threshold. A text
whose own drafts do not pay is left out and tried again later. A drafter that is unknown, or has
fallen silent, is tried on one text, and may lose a hundredth of the time by that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from recserve.core.cost import Cost
from recserve.engine.runtime.step_times import StepTimes
from recserve.engine.text.chances import DEPTHS, Chances
from recserve.speculation.draft import Budget

NOTHING = Budget(0, 0)
TRIAL = 8  # drafts after which a text is judged by itself
CLEARLY = 0.7  # a few drafts say no more than this of a text
PAUSE, LONGEST_PAUSE = 32, 512  # steps that a text is left out, doubled each time
PROBE = 2  # levels that one text drafts for a drafter that has been silent
NO_EXTRA = (0.0,)
PROBE_SHARE = 0.01  # of the time, that probes may lose
MARGIN = 1.02  # that a purchase must gain, being an estimate
# Steps after which the purchase is made anew, even if the same texts ask; nothing new is learnt
# where nothing was bought.
HOLDS, HOLDS_NOTHING = 32, 64


@dataclass(frozen=True)
class Asking:
    """A text that steps. drafter: whose chances are its own; most: what its draft may cost."""

    id: int
    drafter: str
    most: Budget


@dataclass
class _Record:
    """One text. drafts, kept, price: since it was last tried, price in tokens that its drafts' time
    would have bought; left_out: steps still without a draft.
    """

    drafts: int = 0
    kept: float = 0.0
    price: float = 0.0
    left_out: int = 0
    pause: int = PAUSE


@dataclass
class _Silence:
    """Of one drafter whose drafts do not pay. spare_ms: that probes may take; price_ms: of the next
    one; probe: the text that does it, None where no probe is under way.
    """

    spare_ms: float = 0.0
    price_ms: float = 0.0
    probe: int | None = None


@dataclass(frozen=True)
class _Purchase:
    """Levels for every text by drafter. levels: of a full draft. holds: steps to come in which this
    stays as it is, if the same is asked.
    """

    asked: object
    depths: dict[str, list[int]]
    levels: dict[str, int]
    holds: int


@dataclass(frozen=True)
class _Block:
    """Levels that are bought together, for each of some texts. gain: tokens. nodes, extra_ms: what
    they cost in the forward and in the drafter.
    """

    drafter: str
    depth: int
    gain: float
    nodes: float
    extra_ms: float
    density: float
    count: int


class DraftBudget:
    """The budgets of all texts of one model. cost: of a step by its packed nodes."""

    def __init__(self, cost: Cost) -> None:
        self.times = StepTimes(cost)
        self._chances: dict[str, Chances] = {}
        self._records: dict[int, _Record] = {}
        # Of the drafters that asked for the last step and got nothing but perhaps a probe.
        self._silences: dict[str, _Silence] = {}
        self._silent: list[str] = []
        self._full: set[int] = set()
        self._slope = self._rate = 0.0
        self._num_texts = 0
        # By drafter: milliseconds of a draft beside its nodes, by its depth.
        self._extra: dict[str, Seq[float]] = {}
        self._purchase = _Purchase(None, {}, {}, 0)
        # What was asked when nobody got anything, and for how many steps to come; how many it held.
        self._resting: tuple[tuple[int, int, int], int] | None = None
        self._rested = 0

    def spend(self, texts: Seq[Asking], other_nodes: int, num_plain: int = 0) -> list[Budget]:
        """A budget for each text, in order: those named first are served first.

        other_nodes: of the same forward, prefill. num_plain: texts beside them that never draft.
        """
        self._num_texts = len(texts) + num_plain
        passed, self._rested = 1 + self._rested, 0
        asking: dict[str, list[Asking]] = {}
        budgets: dict[int, Budget] = {}
        for text in texts:
            if self._may_draft(text, passed):
                asking.setdefault(text.drafter, []).append(text)
        self._full, self._silent = set(), []
        for drafter in [name for name in asking if not self._of(name).known]:
            first = asking.pop(drafter)[0]
            budgets[first.id] = first.most
            self._full.add(first.id)
        bought = self._bought(asking, self._num_texts, other_nodes)
        for drafter, own in asking.items():
            depths = self._probed(drafter, own, bought.depths[drafter])
            for text, depth in zip(own, depths, strict=True):
                if depth and depth >= bought.levels[drafter]:
                    budgets[text.id] = text.most
                    self._full.add(text.id)
                elif depth:
                    nodes = math.ceil(self._of(drafter).width * depth)
                    most = text.most
                    budgets[text.id] = Budget(min(nodes, most.num_nodes), min(depth, most.depth))
        self._resting = None
        if not budgets:
            pauses = [r.left_out for r in map(self._records.get, (t.id for t in texts)) if r]
            ends = min((steps - 1 for steps in pauses if steps), default=bought.holds)
            self._resting = ((len(texts), other_nodes, num_plain), min(ends, bought.holds))
        return [budgets.get(text.id, NOTHING) for text in texts]

    def rests(self, num_drafting: int, other_nodes: int, num_plain: int) -> bool:
        """Whether `spend` for so many texts would again give nothing to anybody; cheap to ask, and
        to be asked before every step that may be so.
        """
        if self._resting is None or self._resting[0] != (num_drafting, other_nodes, num_plain):
            return False
        left = self._resting[1]
        if not left or any(self._is_due(drafter) for drafter in self._silent):
            return False
        self._resting = (self._resting[0], left - 1)
        self._rested += 1
        return True

    def timed(self, drafter: str, depth: int, texts: int, milliseconds: float) -> None:
        """What one call of a drafter took, for so many texts with a budget of the last `spend`."""
        silence = self._silences.get(drafter)
        if silence is not None and silence.probe is not None:
            # It had to catch up with the text: its price, but not what a draft costs.
            silence.spare_ms -= milliseconds
            if self._of(drafter).is_timed:
                return
        if depth:
            self._of(drafter).timed(depth, texts, milliseconds)

    def proposed(self, text: Asking, budget: Budget, nodes: int, depth: int) -> None:
        """What the drafter made of a budget of the last `spend`."""
        if budget.num_nodes:
            levels = DEPTHS if text.id in self._full else budget.depth
            self._of(text.drafter).proposed(nodes, depth, levels)

    def judged(self, text: Asking, nodes: int, depth: int, kept: int) -> None:
        """What was kept of a draft that was not empty."""
        chances, record = self._of(text.drafter), self._records.setdefault(text.id, _Record())
        chances.judged(depth, kept)
        silence = self._silences.get(text.drafter)
        if silence is not None and silence.probe == text.id:
            silence.probe = None
            surcharge = self.times.surcharge_ms(text.drafter, self._num_texts)
            gained_ms = CLEARLY * kept / max(self._rate, 1e-9)
            silence.spare_ms += gained_ms - self._slope * nodes - surcharge
        record.drafts += 1
        record.kept += kept
        extra = self._extra.get(text.drafter, NO_EXTRA)
        spent_ms = self._slope * nodes + extra[min(depth, len(extra) - 1)]
        record.price += self._rate * spent_ms
        if record.drafts < TRIAL:
            return
        if record.kept < CLEARLY * record.price:
            record.left_out, record.pause = record.pause, min(2 * record.pause, LONGEST_PAUSE)
            record.drafts, record.kept, record.price = 0, 0.0, 0.0
        elif record.drafts >= 4 * TRIAL:
            # Older drafts count less, so that a text that has changed is seen to.
            record.pause = PAUSE
            record.drafts //= 2
            record.kept, record.price = record.kept / 2, record.price / 2

    def stepped(self, nodes: int, drafted: Mapping[str, int], milliseconds: float) -> None:
        """What the step of the last `spend` took from its forward to its end, if it was without
        prefill. nodes: in all; drafted: texts with a draft by drafter.
        """
        self.times.stepped(self._num_texts, nodes, drafted, milliseconds)
        for drafter in self._silent:
            self._silences[drafter].spare_ms += PROBE_SHARE * milliseconds

    def forget(self, text_id: int) -> None:
        """The text ended."""
        self._records.pop(text_id, None)

    def _of(self, drafter: str) -> Chances:
        if drafter not in self._chances:
            self._chances[drafter] = Chances()
        return self._chances[drafter]

    def _may_draft(self, text: Asking, passed: int) -> bool:
        if not text.most.num_nodes or not text.most.depth:
            return False
        record = self._records.setdefault(text.id, _Record())
        record.left_out = max(record.left_out - passed, 0)
        return not record.left_out

    def _is_due(self, drafter: str) -> bool:
        silence = self._silences[drafter]
        return silence.spare_ms > silence.price_ms

    def _bought(
        self, asking: dict[str, list[Asking]], num_texts: int, other_nodes: int
    ) -> _Purchase:
        """Levels for every text; bought anew where others ask, and now and then."""
        asked = (num_texts, other_nodes, {drafter: len(own) for drafter, own in asking.items()})
        old = self._purchase
        if old.asked == asked and old.holds:
            self._purchase = replace(old, holds=old.holds - 1)
        else:
            depths = self._buy(asking, num_texts, other_nodes)
            levels = {drafter: self._of(drafter).levels for drafter in asking}
            nothing = not any(map(any, depths.values()))
            self._purchase = _Purchase(asked, depths, levels, HOLDS_NOTHING if nothing else HOLDS)
        return self._purchase

    def _probed(self, drafter: str, texts: list[Asking], depths: list[int]) -> list[int]:
        """The levels, or where there are none and a probe is due, that of the first text."""
        silence = self._silences.setdefault(drafter, _Silence())
        silence.probe = None
        if any(depths):
            return depths
        self._silent.append(drafter)
        chances = self._of(drafter)
        surcharge = self.times.surcharge_ms(drafter, self._num_texts)
        drafting = float(chances.drafting_ms(PROBE)[-1])
        silence.price_ms = self._slope * chances.width * PROBE + drafting + surcharge
        if not self._is_due(drafter):
            return depths
        silence.probe = texts[0].id
        return [PROBE, *depths[1:]]

    def _buy(
        self, asking: dict[str, list[Asking]], num_texts: int, other_nodes: int
    ) -> dict[str, list[int]]:
        """Levels for every text, by drafter."""
        depths = {drafter: [0] * len(own) for drafter, own in asking.items()}
        base = float(num_texts + other_nodes)
        nodes = sum(
            len(own) * self._of(d).width * self._of(d).filled.sum() for d, own in asking.items()
        )
        start, prefill, full = self.times.of_nodes(
            np.array([base, other_nodes, base + max(nodes, 1.0)])
        )
        self._slope = float((full - start) / max(nodes, 1.0))
        blocks = [b for d, own in asking.items() for b in self._blocks(d, len(own))]
        blocks.sort(key=lambda block: -block.density)
        units = np.repeat(
            np.array([(b.gain, b.nodes, b.extra_ms) for b in blocks]).reshape(-1, 3),
            [block.count for block in blocks],
            axis=0,
        )
        totals = np.concatenate([np.zeros((1, 3)), units.cumsum(0)])
        # What the prefill costs is paid anyway, and buys tokens of other steps.
        spent = self.times.of_nodes(base + totals[:, 1]) - prefill + totals[:, 2]
        spent += self.times.overhead_ms(num_texts)
        rates = (num_texts + totals[:, 0]) / np.maximum(spent, 1e-9)
        rates[0] *= MARGIN
        left = int(rates.argmax())
        self._rate = float(rates[left])
        for block in blocks:
            bought = min(block.count, left)
            depths[block.drafter][:bought] = [block.depth] * bought
            left -= bought
        return depths

    def _blocks(self, drafter: str, count: int) -> list[_Block]:
        """The levels of one drafter's drafts, dearer ones later; those that only pay together are
        one block.
        """
        chances = self._of(drafter)
        levels = chances.levels
        filled = chances.filled
        columns = (chances.survival(levels) * filled, filled * chances.width)
        gains, nodes = (np.append(0.0, column.cumsum()) for column in columns)
        # The surcharge is of those that draft at all.
        surcharge = self.times.surcharge_ms(drafter, self._num_texts) * filled[:1]
        extra = np.append(0.0, chances.drafting_ms(levels, count) + surcharge)
        self._extra[drafter] = extra.tolist()
        spent = nodes * self._slope + extra + 1e-9 * np.arange(levels + 1)
        blocks, low = [], 0
        while low < levels:
            ahead = (gains[low + 1 :] - gains[low]) / (spent[low + 1 :] - spent[low])
            high = low + 1 + int(ahead.argmax())
            gain, cost, more = (float(c[high] - c[low]) for c in (gains, nodes, extra))
            blocks.append(_Block(drafter, high, gain, cost, more, float(ahead.max()), count))
            low = high
        return blocks
