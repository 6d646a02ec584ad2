"""Decides during a run whether it may stop: the confidence sequence of every treatment is sure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from recserve.experiments.load.datasets import Sample
from recserve.experiments.load.exchanges import HttpExchange
from recserve.experiments.load.generator import Run
from recserve.experiments.load.plan import Mode
from recserve.experiments.report.measurements import SampleColumns
from recserve.experiments.statistics.comparison import early_looks
from recserve.experiments.statistics.criteria import Criteria
from recserve.experiments.statistics.sequential import FIRST_LOOK, PLANNED_BLOCKS


@dataclass
class EarlyStop:
    """A rule for the argument `until` of the load generator.

    Attributes:
        samples: Requests of the run.
        num_arms: Number of arms.
        mode: How arms are drawn.
        criteria: What decides, with the planned number of shots after the warm-up.
        first_shot: Number of shots in the warm-up.
        warmup_s: Length of the warm-up.
        seen: Complete time blocks at the last look.
    """

    samples: Sequence[Sample]
    num_arms: int
    mode: Mode
    criteria: Criteria
    first_shot: int
    warmup_s: float
    seen: int = field(default=FIRST_LOOK - 1)

    def __call__(self, exchanges: Sequence[HttpExchange]) -> bool:
        """Returns whether every treatment differs from the control for sure.

        Args:
            exchanges: Exchanges of all first shots that have ended.
        """
        width = max(1, (self.criteria.planned_shots or 0) // PLANNED_BLOCKS)
        last = max((one.shot for one in exchanges), default=-1)
        blocks = (last + 1 - self.first_shot) // width
        if blocks <= self.seen:
            return False
        self.seen = blocks
        run = Run(tuple(exchanges), seconds=0.0, cpu_seconds=0.0, peak_in_flight=0)
        columns = SampleColumns.of(run, self.samples, self.warmup_s)
        for treatment in range(1, self.num_arms):
            looks = early_looks(columns, treatment, self.mode, self.criteria, self.num_arms)
            if not looks or not looks[-1].relative.excludes_zero:
                return False
        return True
