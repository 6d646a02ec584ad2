"""How wide to draft, and whether to draft at all: expected from the head's calibration and the
costs of this machine, corrected by what answers took.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from recserve.models.drafters.calibration import Calibration, DraftPlan
from recserve.search.step_costs import MARGIN, StepCosts

NO_DRAFT = DraftPlan(0.0, 0.0, 0.0, 1.0)
NOT_CALIBRATED = DraftPlan(MARGIN, 0.0, 0.0, 1.0)
CLEARLY = 0.9  # costs are estimates: a draft that is expected to save less comes second
HOPELESS = 1.3  # and one that is expected to cost so much is not tried
TRIALS = 4  # of each, before their times are compared
MANY = 16  # of each, where those are not further apart than CLOSE
CLOSE = 0.15
RETRY = 64  # every so many groups the slower one is tried again
NEWEST = 0.1  # weight of the newest time in a running mean
SURELY = 0.97  # times are running means: a draft has to be faster by more than their noise
OUTLIER = 2.0  # a time that is so many times the mean was interrupted by something else


@dataclass(frozen=True)
class Group:
    """Requests that step together: `batch` of them, alike in beam width and k. kept: whether drafts
    were kept with their roots.
    """

    width: int
    k: int
    batch: int
    kept: bool = False

    @property
    def cell(self) -> Group:
        """Groups of one cell differ by less than a doubling, and share their times."""
        width, k, batch = (1 << n.bit_length() >> 1 for n in (self.width, self.k, self.batch))
        return Group(width, k, batch, self.kept)


@dataclass
class _Times:
    """Of one cell: groups that were asked about, and those answered with a draft or without."""

    asked: int = 0
    count: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    mean_ms: dict[bool, float] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """Whether both ways were tried often enough to tell them apart."""
        fewest = min(self.count.values())
        if TRIALS <= fewest < MANY:
            return abs(self.mean_ms[True] / self.mean_ms[False] - 1) > CLOSE
        return fewest >= MANY

    @property
    def drafts_are_faster(self) -> bool:
        """Only where it is known."""
        return self.mean_ms[True] < SURELY * self.mean_ms[False]


class PlanChoice:
    """Beam search or the draft that is expected to end soonest, whichever is faster.

    calibration: None of a head of which nothing is known; it always drafts. costs: None where
    nothing was measured; then a calibrated head drafts nothing.
    """

    def __init__(self, calibration: Calibration | None) -> None:
        self.calibration = calibration
        self.costs: StepCosts | None = None
        self._times: dict[Group, _Times] = {}
        self._best: dict[Group, tuple[DraftPlan, bool]] = {}

    def widest(self, width: int, k: int) -> float:
        """The largest margin that may be chosen."""
        if self.calibration is None:
            return MARGIN
        return max(plan.margin for plan in self.calibration.scaled(width, k))

    def plan(self, group: Group) -> DraftPlan:
        """What the group does next. The first groups of a cell try both, what is expected to be
        faster first, and more of them where the two are close; after that the faster one has it,
        and now and then the other.
        """
        if self.calibration is None:
            return NOT_CALIBRATED
        if self.costs is None:
            return NO_DRAFT
        plan, promising = self._best_of(group)
        if plan is NO_DRAFT:
            return plan
        times = self._times.setdefault(group.cell, _Times())
        times.asked += 1
        tried, other = times.count[promising], times.count[not promising]
        drafting = promising if tried < TRIALS or tried <= other else not promising
        if times.known:
            drafting = times.drafts_are_faster == (times.asked % RETRY > 0)
        return plan if drafting else NO_DRAFT

    def pays(self, group: Group) -> bool:
        """Whether such a group drafts but for trials. Safe from any thread; nothing is noted."""
        if self.calibration is None or self.costs is None:
            return self.calibration is None
        plan, promising = self._best_of(group)
        times = self._times.get(group.cell)
        if plan is NO_DRAFT or times is None or not times.known:
            return promising
        return times.drafts_are_faster

    def took(self, group: Group, drafted: bool, milliseconds: float) -> None:
        """Note what a group's rounds took, all of them, with a draft or without."""
        times = self._times.setdefault(group.cell, _Times())
        times.count[drafted] += 1
        before = times.mean_ms.get(drafted, milliseconds)
        weight = max(NEWEST, 1 / times.count[drafted])
        times.mean_ms[drafted] = before + weight * (min(milliseconds, OUTLIER * before) - before)

    def _best_of(self, group: Group) -> tuple[DraftPlan, bool]:
        """Of the group's cell: as `_expected_best`."""
        assert self.calibration is not None and self.costs is not None
        if group.cell not in self._best:
            self._best[group.cell] = self._expected_best(self.calibration, self.costs, group)
        return self._best[group.cell]

    @staticmethod
    def _expected_best(
        calibration: Calibration, costs: StepCosts, group: Group
    ) -> tuple[DraftPlan, bool]:
        """The draft that is expected to end soonest, NO_DRAFT where none is worth a trial; and
        whether it is expected to be faster than beam search.
        """
        plans = calibration.scaled(group.width, group.k)
        expected = {
            plan: costs.expected_ms(plan, group.width, group.batch, group.kept) for plan in plans
        }
        drafts = [plan for plan in plans if plan.margin]
        beam_ms = min((expected[plan] for plan in plans if not plan.margin), default=float("inf"))
        best = min(drafts, key=expected.__getitem__, default=NO_DRAFT)
        if best is NO_DRAFT or expected[best] > HOPELESS * beam_ms:
            return NO_DRAFT, False
        return best, expected[best] < CLEARLY * beam_ms
