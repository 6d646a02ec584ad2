"""What it costs to decode items on this machine, by beam search and with drafts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recserve.core.cost import Cost
from recserve.core.drafting import Strategy
from recserve.models.drafters.calibration import DraftPlan

MARGIN = 2.0
ROUNDS = 16  # more are not expected


@dataclass(frozen=True)
class StepCosts:
    """Milliseconds of a forward by its nodes; and by the beams of all requests, what comes with it:
    in a round of beam search, in the first of a draft with MARGIN, and in one whose draft was kept
    from an earlier visit, which is what a repair takes too.
    """

    forward: Cost
    round: Cost
    drafted: Cost
    kept: Cost

    def expected_ms(self, plan: DraftPlan, width: int, batch: int, kept: bool = False) -> float:
        """Of a plan for each of `batch` requests that step together and keep `width` beams. kept:
        their drafts were, and need one round.
        """
        again, beams = further_rounds(plan, batch), batch * width
        if not plan.margin:
            return (1 + again) * (
                self.forward(batch * plan.nodes / (1 + again)) + self.round(beams)
            )
        if kept:
            return self.forward(batch * plan.nodes) + self.kept(beams)
        first = self.forward(batch * plan.nodes) + self.drafted(plan.margin / MARGIN * beams)
        return first + again * (self.forward(batch) + self.kept(beams))


def further_rounds(plan: DraftPlan, batch: int) -> float:
    """Expected rounds after the first until the last of `batch` requests is answered: each of them
    needs one with the chance `1 - proved`, and after each another one with a chance such that it
    needs `repairs` on average.
    """
    missed = 1 - plan.proved
    if not missed or not plan.repairs:
        return 0.0
    another = max(1 - missed / plan.repairs, 0.0)
    chances = missed * another ** np.arange(ROUNDS)
    return float((1 - (1 - chances) ** batch).sum())


@dataclass(frozen=True)
class Ways:
    """Beam search; with drafts of MARGIN that are made each time; and with such that are kept."""

    beam: Strategy
    drafted: Strategy
    kept: Strategy
