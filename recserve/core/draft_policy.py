"""How much to draft: what drafts cost and bring, the choice between them, and an alarm.

Drafts change no text and no slate. (Where a rule lets them shape a text, nothing is chosen.) So a
choice concerns speed only, and it is always the same one: among options of a size, an expected gain
and a cost, the one with the most results for its cost.

`DraftPolicy` is what all drafters share: a record of each, its alarm and its pause. Two policies
derive from it.

- Items, `PlanPolicy` (search/strategies/speculative.py): the options are the plans of a draft
  head's calibration. A plan costs its nodes, and the nodes that a round is worth.
- Texts, `DepthPolicy`: the options are depths. While a forward pass is bound by reading the
  weights, draft nodes are nearly free. With many texts each node costs its arithmetic. Before a
  step, every drafter gets the depth that maximises the expected tokens per millisecond. The
  milliseconds come from a measured cost per number of nodes, corrected by completed steps. The
  tokens come from the acceptance of earlier drafts. One percent of the time pays for deeper trials,
  so that the statistics of a drafter that does not draft stay up to date.

Without a cost, a draft is taken to be free. It is made unless it brings less than its break-even.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

log = logging.getLogger(__name__)

MEMORY = 128  # values that an average remembers
LONG_MEMORY = 8192  # drafts of the long-run average, the expectation without a calibration
STEP_MEMORY = 16  # values that an average of step times remembers
MAX_DEPTH = 16  # at this depth a draft gets its whole budget; deeper levels are not counted

# The alarm and the pause.
KNOWN_DRAFTS = 128  # drafts before the first judgement
ALARM_SHARE, CLEAR_SHARE = 0.5, 0.75  # shares of the expectation: below, alarm; above, none
PROBE_EVERY, PROBE_LENGTH = 1024, 16  # of so many chances to draft, a paused drafter uses so many
RESUME_MARGIN = 0.05  # gain above the break-even that ends a pause
# Fewer accepted tokens per draft pay for no draft: even a free one makes the step's tree larger.
BREAK_EVEN = 0.05

# The choice of depths.
PRIOR_CHANCE, PRIOR_WEIGHT = 0.7, 4  # acceptance before any draft was verified
TRIAL_LEVELS, TRIAL_SHARE = 2, 0.01  # additional levels of a trial; its share of the time
MARGIN = 1.02  # a draft must raise the rate of tokens by this factor
HOLD = 16  # steps between two plans at the same load, once all drafters are known
KNOWN = 32  # drafts after which the statistics of a drafter count as known
PLAIN_EVERY = 128  # steps between two measured steps without drafts


def best_option(gains: Seq[float], costs: Seq[float], margin: float, base: float = 1.0) -> int:
    """Returns the number of the option with the most results for its cost.

    Args:
        gains: Expected results that each option adds. The first option drafts nothing.
        costs: Expected cost of each, above 0.
        margin: The others have to be better than the first by this factor.
        base: Results without a draft.
    """
    rates = [(base + gain) / cost for gain, cost in zip(gains, costs, strict=True)]
    rates[0] *= margin
    return rates.index(max(rates))


@dataclass(frozen=True)
class Cost:
    """A piecewise linear cost.

    Attributes:
        sizes: Two or more sizes, ascending.
        milliseconds: The cost at each size.
    """

    sizes: tuple[int, ...]
    milliseconds: tuple[float, ...]

    def __call__(self, size: float) -> float:
        """Returns milliseconds: 0 for size 0, linear between the sizes and after the last."""
        if size <= 0:
            return 0.0
        last = max(sum(known <= size for known in self.sizes[:-1]), 1)
        low, high = self.sizes[last - 1 : last + 1]
        before, after = self.milliseconds[last - 1 : last + 1]
        slope = max(after - before, 0.0) / (high - low)
        return max(before + (size - low) * slope, 0.0)


@dataclass
class Average:
    """A running average.

    Attributes:
        value: The average.
        weight: Number of values so far, at most `memory`.
        memory: Number of values that the average remembers.
    """

    value: float = 0.0
    weight: int = 0
    memory: int = MEMORY

    def add(self, value: float) -> None:
        """Adds a value. Older values lose weight once the memory is full."""
        self.weight = min(self.weight + 1, self.memory)
        self.value += (value - self.value) / self.weight


@dataclass(frozen=True)
class DraftHealth:
    """What is known of a drafter at one moment.

    Attributes:
        acceptance: By depth, the share of drafted levels that is accepted if the level above is.
        recent: Mean gain of recent drafts.
        expected: Gain that the recent one is compared with.
        alarm: Whether recent drafts are far below the expectation, or paused.
        paused: Whether requests decode without drafts.
    """

    acceptance: tuple[float, ...] = ()
    recent: float = 0.0
    expected: float = 0.0
    alarm: bool = False
    paused: bool = False


def _levels(value: float, weight: int) -> list[Average]:
    return [Average(value, weight) for _ in range(MAX_DEPTH)]


@dataclass
class DraftRecord:
    """What is known of one drafter's drafts, over all requests.

    Its recent gain is compared with an expectation and with its break-even.

    The gain of a text draft is its number of accepted tokens. The gain of an item draft is the
    number of rounds that it saves.

    Attributes:
        name: Name of the drafter, for the log.
        break_even: Mean gain below which drafts do not pay.
        pauses: Whether drafts that do not pay are paused.
        alarm: Whether recent drafts are far below the expectation, or paused.
        paused: Whether only probes draft.
        accepted: By level, the share that is accepted, given that the level above is accepted.
    """

    name: str
    break_even: float
    pauses: bool = True
    alarm: bool = False
    paused: bool = False
    accepted: list[Average] = field(default_factory=lambda: _levels(0.0, 0))
    _recent: Average = field(default_factory=Average)
    _calibrated: Average = field(default_factory=Average)
    _long_run: Average = field(default_factory=lambda: Average(memory=LONG_MEMORY))
    _chances: int = 0
    _judged: float = 0.0

    def allows(self) -> bool:
        """Returns whether the next draft may run; while paused, only probes may."""
        if not self.paused:
            return True
        self._chances += 1
        return self._chances % PROBE_EVERY >= PROBE_EVERY - PROBE_LENGTH

    def add(self, gain: float, depth: int, accepted: int, calibrated: float | None = None) -> None:
        """Records a verified draft.

        Args:
            gain: Accepted tokens or saved rounds.
            depth: Levels of the draft.
            accepted: Accepted levels.
            calibrated: Gain by the drafter's calibration. None compares with the long-run average.
        """
        for level, average in enumerate(self.accepted[: min(accepted + 1, depth)]):
            average.add(level < accepted)
        self._recent.add(gain)
        self._long_run.add(gain)
        if calibrated is not None:
            self._calibrated.add(calibrated)
        self._judge()

    @property
    def expected(self) -> float:
        """The calibrated gain of recent requests; the long-run average without a calibration."""
        return self._calibrated.value if self._calibrated.weight else self._long_run.value

    def health(self) -> DraftHealth:
        """Returns the state for statistics. It is safe to call from any thread."""
        seen = [level.value for level in self.accepted if level.weight]
        known = self._recent.value if self._recent.weight and not self.paused else self._judged
        return DraftHealth(tuple(seen), known, self.expected, self.alarm, self.paused)

    def _judge(self) -> None:
        """Updates alarm and pause, and logs one line per change."""
        gain, enough = self._recent.value, PROBE_LENGTH if self.paused else KNOWN_DRAFTS
        if self._recent.weight < enough:
            return
        before = self.alarm, self.paused
        self._judged = gain
        if self.paused:
            self.paused = gain < self.break_even + RESUME_MARGIN
            self._recent = Average()
        elif self.pauses and gain < self.break_even:
            self.paused, self._chances, self._recent = True, 0, Average()
        pays = not self.paused and gain >= self.break_even
        share = CLEAR_SHARE if self.alarm else ALARM_SHARE
        self.alarm = not pays or gain < share * self.expected
        if before != (self.alarm, self.paused):
            log.log(
                logging.WARNING if self.alarm else logging.INFO,
                "drafter %s: acceptance alarm %s, drafts %s: gain %.3f per draft, expected %.3f",
                self.name,
                "on" if self.alarm else "off",
                "paused" if self.paused else "on",
                gain,
                self.expected,
            )


class DraftPolicy:
    """Keeps a record of each drafter, and pauses those whose drafts save nothing.

    Attributes:
        records: What is known of each drafter, by name.
    """

    def __init__(self, break_even: float, pauses: bool) -> None:
        """Knows no drafter yet.

        Args:
            break_even: Mean gain below which drafts do not pay.
            pauses: Whether drafts that do not pay are paused.
        """
        self.records: dict[str, DraftRecord] = {}
        self._break_even, self._pauses = break_even, pauses

    def record(self, drafter: str) -> DraftRecord:
        """Returns what is known of a drafter."""
        known = self.records.get(drafter)
        if known is None:
            known = self.records[drafter] = DraftRecord(drafter, self._break_even, self._pauses)
        return known

    def health(self) -> dict[str, DraftHealth]:
        """Returns the state of each drafter. It is safe to call from any thread."""
        return {name: record.health() for name, record in list(self.records.items())}


@dataclass
class DepthRecord:
    """What is known of the depth and the time of one drafter's drafts for texts.

    Attributes:
        accepted: By level, the share that is accepted (`DraftRecord.accepted`).
        reached: By level, the share of drafts that reach it, where their budget allows it.
        width: Nodes per level.
        call_ms: Milliseconds of one call, by the bit length of its number of texts, then by depth.
        spare_ms: Milliseconds that the next trial may cost. The first trial is free, so that every
            drafter becomes known.
    """

    accepted: Seq[Average]
    reached: list[Average] = field(default_factory=lambda: _levels(1.0, PRIOR_WEIGHT))
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


class DepthPolicy(DraftPolicy):
    """Chooses how deep each drafter of a language model drafts.

    Attributes:
        has_cost: Whether the cost of a step counts.
    """

    def __init__(self, cost: Cost | None = None) -> None:
        """Knows no drafter yet.

        Args:
            cost: Cost of a text step by its number of nodes. None: drafts are taken to be free, and
                drafters below the break-even are paused.
        """
        super().__init__(BREAK_EVEN, pauses=cost is None)
        self._cost = cost
        self.has_cost = cost is not None
        self._depths: dict[str, DepthRecord] = {}
        # By the bit length of the number of texts, and whether any of them drafts.
        self._times: dict[tuple[int, bool], _StepTime] = {}
        self._load: object = None
        self._plans: dict[str, _Plan] = {}
        self._hold = self._since_plain = 0

    def depth_record(self, drafter: str) -> DepthRecord:
        """Returns what is known of the depth and the time of a drafter's drafts."""
        known = self._depths.get(drafter)
        if known is None:
            known = self._depths[drafter] = DepthRecord(self.record(drafter).accepted)
        return known

    def depths(self, counts: Mapping[str, int], num_texts: int, prefill: int) -> dict[str, int]:
        """Returns the depth of the next drafts by drafter, if there is a cost. Depth 0 means no
        draft.

        Args:
            counts: Number of texts that may draft, by drafter.
            num_texts: Number of texts that step, with or without a draft.
            prefill: Number of prompt tokens in the same forward pass.
        """
        if self._cost is None or not counts:
            return {}
        load = (counts, num_texts, prefill)
        if load != self._load or not self._hold:
            self._plan(self._cost, counts, num_texts, prefill)
            known = all(self._depths[drafter].reached[0].weight >= KNOWN for drafter in counts)
            self._load, self._hold = load, HOLD if known else 1
        self._hold -= 1
        self._since_plain += 1
        unknown = not prefill and (num_texts.bit_length(), False) not in self._times
        if unknown or self._since_plain > PLAIN_EVERY:
            self._hold = self._since_plain = 0
            return dict.fromkeys(counts, 0)
        depths = {}
        for drafter, plan in self._plans.items():
            record, depths[drafter] = self._depths[drafter], plan.depth
            if plan.trial_depth > plan.depth and record.spare_ms >= plan.trial_ms:
                record.spare_ms, depths[drafter] = 0.0, plan.trial_depth
        if not any(depths.values()):
            self._since_plain = 0
        return depths

    def num_nodes(self, drafter: str, depth: int) -> float:
        """Returns the most nodes of a draft of this depth; infinite at MAX_DEPTH."""
        if depth >= MAX_DEPTH:
            return math.inf
        return math.ceil(self._depths[drafter].width.value * depth)

    def record_drafts(
        self, drafter: str, drafts: Iterable[tuple[int, int, int]], milliseconds: float
    ) -> None:
        """Records one call of a drafter. It costs something, so it is recorded if costs count.

        Args:
            drafter: Name of the drafter.
            drafts: For each text that could draft: the depth of its budget, then the nodes and
                levels of its draft.
            milliseconds: Time of the call.
        """
        drafts = list(drafts)
        if self._cost is None or not any(budget for budget, _, _ in drafts):
            return
        record = self.depth_record(drafter)
        depth = max(levels for _, _, levels in drafts)
        bucket = record.call_ms.setdefault(len(drafts).bit_length(), {})
        known = bucket.setdefault(max(min(depth, MAX_DEPTH), 1), Average(memory=STEP_MEMORY))
        # Another process interrupted a call that took far longer.
        known.add(min(milliseconds, 2 * known.value) if known.weight else milliseconds)
        for budget, nodes, levels in drafts:
            for level, average in enumerate(record.reached[:budget]):
                average.add(level < levels)
            if levels:
                record.width.add(nodes / levels)

    def record_step(self, num_texts: int, nodes: int, milliseconds: float) -> None:
        """Records the time of a step without prefill, without its drafting."""
        if self._cost is None:
            return
        key = num_texts.bit_length(), nodes > num_texts
        known = self._times.setdefault(key, _StepTime())
        # Another process interrupted a step that took far longer.
        known.measured.add(min(milliseconds, 2 * known.measured.value or milliseconds))
        known.stated.add(self._cost(nodes))
        for drafter in self._plans:
            self._depths[drafter].spare_ms += TRIAL_SHARE * milliseconds / len(self._plans)

    def _step_ms(self, num_texts: int, drafted: bool) -> tuple[float, float]:
        """Returns slope and shift: a step whose nodes cost `c` is expected to take
        `shift + slope * c` milliseconds.

        A step faster than stated lowers the cost of every node. A slower step raises the fixed
        cost.
        """
        bits = num_texts.bit_length()
        plain = self._times.get((bits, False))
        known = self._times.get((bits, drafted), plain)
        if known is None:
            return 1.0, 0.0
        scale = 1.0 if plain is None else min(plain.measured.value / plain.stated.value, 1.0)
        return scale, known.measured.value - scale * known.stated.value

    def _plan(self, cost: Cost, counts: Mapping[str, int], num_texts: int, prefill: int) -> None:
        """Chooses a depth for each drafter in turn, given the choices before it."""
        self._plans = {}
        tokens, nodes, drafting_ms = float(num_texts), float(num_texts + prefill), 0.0
        # Prompt tokens are computed with any draft, and lead to tokens of later steps.
        prefill_ms = cost(prefill)
        known = {name: self.depth_record(name) for name in counts}
        # The drafter with the highest acceptance takes the cheap nodes first.
        for drafter in sorted(counts, key=lambda name: -known[name].gains()[1]):
            record, count = known[drafter], counts[drafter]
            gains, sizes, calls = record.gains(), record.nodes(), record.drafting_ms(count)
            others = nodes > num_texts + prefill  # of other drafters
            stated_ms = [cost(nodes + count * size) - prefill_ms for size in sizes]
            slope, shift = self._step_ms(num_texts, True)
            spent = [shift + slope * ms for ms in stated_ms]
            if not others:
                slope, shift = self._step_ms(num_texts, False)
                spent[0] = shift + slope * stated_ms[0]
            added = [count * gain for gain in gains]
            costs = [
                max(ms + drafting_ms + call, 1e-9) for ms, call in zip(spent, calls, strict=True)
            ]
            best = best_option(added, costs, MARGIN, base=tokens)
            deepest = len([level for level in record.reached if level.value > TRIAL_SHARE])
            trial = min(best + TRIAL_LEVELS, deepest or TRIAL_LEVELS)
            rate = (tokens + added[best]) / costs[best] * (1.0 if best else MARGIN)
            lost = costs[trial] - (tokens + added[trial]) / rate
            self._plans[drafter] = _Plan(best, trial, max(lost, TRIAL_SHARE * costs[best]))
            tokens, nodes = tokens + added[best], nodes + count * sizes[best]
            drafting_ms += calls[best]
