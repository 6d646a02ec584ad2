"""The verification budget of a step: draft nodes where they are expected to buy the most tokens.

While a forward is bound by reading the weights, nodes are nearly free; with many texts each costs
its arithmetic. What a step of n packed nodes costs is measured (costs.py), what a level of a draft
is worth is known from what happened to the drafter's drafts before (chances.py). Levels are bought
in the order of tokens per millisecond, over all texts, and as many of them as make

    tokens expected of the step / milliseconds of the step

largest; so drafts grow shorter as the load rises, then fewer, and end without a threshold. A text
whose own drafts do not pay is left out and tried again later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from recserve.core.text import Budget
from recserve.engine.chances import Chances
from recserve.engine.costs import Cost

NOTHING = Budget(0, 0)
TRIAL = 8  # drafts after which a text is judged by itself
PAUSE, LONGEST_PAUSE = 32, 512  # steps that a text is left out, doubled each time
PROBE = 2  # levels that one text drafts for a drafter that has been silent
PROBE_AFTER, LONGEST_SILENCE = 32, 512  # steps of silence, doubled where a probe was not kept
HOLDS = 16  # steps after which the purchase is made anew, even if the same texts ask


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
    """Of one drafter. steps: without a draft; most: before it is probed; probe: the text that does
    it, None where no probe is under way.
    """

    steps: int = 0
    most: int = PROBE_AFTER
    probe: int | None = None

    def ended(self, kept: bool) -> None:
        """The probe was judged. One that was kept is followed by the next at once."""
        self.probe = None
        self.most = 1 if kept else min(2 * self.most, LONGEST_SILENCE)


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
        self._sizes = np.array([0.0, *cost.sizes, 1e9])
        measured = [0.0, *(cost(size) for size in cost.sizes), cost(1e9)]
        self._milliseconds = np.maximum.accumulate(np.array(measured))
        self._chances: dict[str, Chances] = {}
        self._records: dict[int, _Record] = {}
        self._silences: dict[str, _Silence] = {}
        self._full: set[int] = set()
        self._slope = self._rate = 0.0
        # Milliseconds of a step beside the network, and what any draft adds to them.
        self._overhead = self._surcharge = 0.0
        self._purchase = _Purchase(None, {}, {}, 0)

    def spend(self, texts: Seq[Asking], other_nodes: int, num_plain: int = 0) -> list[Budget]:
        """A budget for each text, in order: those named first are served first.

        other_nodes: of the same forward, prefill. num_plain: texts beside them that never draft.
        """
        asking: dict[str, list[Asking]] = {}
        budgets: dict[int, Budget] = {}
        for text in texts:
            if self._may_draft(text):
                asking.setdefault(text.drafter, []).append(text)
        self._full = set()
        for drafter in [name for name in asking if not self._of(name).known]:
            for text in asking.pop(drafter):
                budgets[text.id] = text.most
                self._full.add(text.id)
        bought = self._bought(asking, len(texts) + num_plain, other_nodes)
        for drafter, own in asking.items():
            depths = self._probed(drafter, own, bought.depths[drafter])
            for text, depth in zip(own, depths, strict=True):
                if depth >= bought.levels[drafter]:
                    budgets[text.id] = text.most
                    self._full.add(text.id)
                elif depth:
                    nodes = math.ceil(self._of(drafter).width * depth)
                    most = text.most
                    budgets[text.id] = Budget(min(nodes, most.num_nodes), min(depth, most.depth))
        return [budgets.get(text.id, NOTHING) for text in texts]

    def proposed(self, text: Asking, nodes: int, depth: int, milliseconds: float) -> None:
        """What the drafter made of a budget of the last `spend`, and its time for this text."""
        if depth:
            self._of(text.drafter).timed(depth, milliseconds)
        if text.id in self._full and text.most.num_nodes:
            self._of(text.drafter).proposed(nodes, depth)

    def judged(self, text: Asking, nodes: int, depth: int, kept: int) -> None:
        """What was kept of a draft that was not empty."""
        chances, record = self._of(text.drafter), self._records.setdefault(text.id, _Record())
        chances.judged(depth, kept)
        silence = self._silences.get(text.drafter)
        if silence is not None and silence.probe == text.id:
            silence.ended(kept > 0)
        record.drafts += 1
        record.kept += kept
        drafting_ms = float(chances.drafting_ms(depth)[-1])
        record.price += self._rate * (self._slope * nodes + drafting_ms)
        if record.drafts < TRIAL:
            return
        if record.kept < record.price:
            record.left_out, record.pause = record.pause, min(2 * record.pause, LONGEST_PAUSE)
            record.drafts, record.kept, record.price = 0, 0.0, 0.0
        elif record.drafts >= 4 * TRIAL:
            # Older drafts count less, so that a text that has changed is seen to.
            record.pause = PAUSE
            record.drafts //= 2
            record.kept, record.price = record.kept / 2, record.price / 2

    def stepped(self, nodes: int, drafted: bool, milliseconds: float) -> None:
        """What a step of so many nodes, none of them prefill, took from its forward to its end."""
        known = float(self._cost(np.array(float(nodes)))) + self._overhead
        known += self._surcharge if drafted else 0.0
        # A step that took far longer was interrupted by something else.
        error = min(milliseconds, 2 * known) - known
        self._overhead += error / 16
        if drafted:
            self._surcharge += error / 64

    def forget(self, text_id: int) -> None:
        """The text ended."""
        self._records.pop(text_id, None)

    def _of(self, drafter: str) -> Chances:
        if drafter not in self._chances:
            self._chances[drafter] = Chances()
        return self._chances[drafter]

    def _may_draft(self, text: Asking) -> bool:
        if not text.most.num_nodes or not text.most.depth:
            return False
        record = self._records.setdefault(text.id, _Record())
        record.left_out = max(record.left_out - 1, 0)
        return not record.left_out

    def _cost(self, nodes: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.interp(nodes, self._sizes, self._milliseconds)

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
            self._purchase = _Purchase(asked, depths, levels, HOLDS)
        return self._purchase

    def _probed(self, drafter: str, texts: list[Asking], depths: list[int]) -> list[int]:
        """The levels, or a probe by the first text where the drafter has long been silent."""
        silence = self._silences.setdefault(drafter, _Silence())
        if any(depths):
            silence.steps, silence.most, silence.probe = 0, PROBE_AFTER, None
            return depths
        silence.steps += 1
        if silence.steps < silence.most:
            return depths
        silence.steps, silence.probe = 0, texts[0].id
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
        start, prefill, full = self._cost(np.array([base, other_nodes, base + max(nodes, 1.0)]))
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
        spent = self._cost(base + totals[:, 1]) - prefill + totals[:, 2] + self._overhead
        spent[1:] += self._surcharge
        rates = (num_texts + totals[:, 0]) / np.maximum(spent, 1e-9)
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
        filled = chances.filled[:levels]
        columns = (chances.survival(levels) * filled, filled * chances.width)
        gains, nodes = (np.append(0.0, column.cumsum()) for column in columns)
        extra = np.append(0.0, chances.drafting_ms(levels))
        spent = nodes * self._slope + extra + 1e-9 * np.arange(levels + 1)
        blocks, low = [], 0
        while low < levels:
            ahead = (gains[low + 1 :] - gains[low]) / (spent[low + 1 :] - spent[low])
            high = low + 1 + int(ahead.argmax())
            gain, cost, more = (float(c[high] - c[low]) for c in (gains, nodes, extra))
            blocks.append(_Block(drafter, high, gain, cost, more, float(ahead.max()), count))
            low = high
        return blocks
