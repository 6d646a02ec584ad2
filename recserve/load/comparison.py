"""Treatment against control: criteria, guardrails, effects, a verdict, and when a run may stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from recserve.experiments.statistics import (
    FAILED_REQUESTS,
    FIRST_LOOK,
    MIN_BLOCKS,
    PLANNED_BLOCKS,
    SRM_ALARM,
    STATISTICS,
    UNBOUNDED,
    Effect,
    Floats,
    Guardrail,
    Interval,
    Ints,
    Look,
    Observations,
    Statistic,
    compare,
    confidence_sequence,
    count_blocks,
    difference_time,
    effective_size,
    guard_mean,
    guard_overlap,
    guard_share,
    ndcg,
    overlap,
    quantile_level,
    sample_ratio_p,
    stopping_block,
    stopping_looks,
    time_blocks,
)
from recserve.load.datasets import Sample
from recserve.load.generator import HttpExchange, Mode, Run
from recserve.load.measurements import SampleColumns

Metric = Literal["latency", "ttft", "tpot"]
VerdictKind = Literal["better", "worse", "unclear", "invalid", "do_not_ship"]
METRIC_WORDS: dict[Metric, str] = {
    "latency": "latency",
    "ttft": "time to first token",
    "tpot": "time per output token",
}
CONFIDENCE = 0.95
POWER = 0.9
# A block shorter than this many correlation times is reported.
SHORT_BLOCK = 3
# Fewer requests of an arm than this say nothing about a 99th percentile.
MIN_TAIL = 1000


@dataclass(frozen=True)
class Criteria:
    """What decides an experiment.

    Attributes:
        metric: Which time: latency, time to first token, time per output token.
        statistic: Which statistic of it decides the verdict.
        sequential: Whether the verdict uses the always-valid interval.
        k: Slate length for NDCG; None for the whole slate.
        error_margin: Rise of the share of failed requests that is accepted.
        short_margin: Rise of the share of short slates that is accepted.
        overlap_margin: Loss of mean overlap between the arms' slates that is accepted.
        ndcg_margin: Loss of NDCG that is accepted.
        weights: Planned shares of the arms; None for equal ones.
        planned_shots: Shots of the whole run, where it stops once the arms' difference is sure.
            None means that the run does not stop early.
    """

    metric: Metric = "latency"
    statistic: Statistic = "p99"
    sequential: bool = False
    k: int | None = None
    error_margin: float = 0.005
    short_margin: float = 0.005
    overlap_margin: float = 0.05
    ndcg_margin: float = 0.005
    weights: tuple[float, ...] | None = None
    planned_shots: int | None = None


@dataclass(frozen=True)
class SampleRatio:
    """Whether requests or units were divided as planned.

    Attributes:
        counted: "units" or "requests".
        counts: Per arm.
        p_value: Of the chi-square test.
        alarm: Whether the p-value is below 0.001.
    """

    counted: str
    counts: tuple[int, ...]
    p_value: float
    alarm: bool


def decide(
    control: str,
    treatment: str,
    effect: Effect,
    looks: Sequence[Look],
    guards: Sequence[Guardrail],
    ratio: SampleRatio,
    criteria: Criteria,
) -> tuple[VerdictKind, str]:
    """Returns the kind of the verdict and its sentence."""
    if ratio.alarm:
        return "invalid", (
            f"Not valid: {ratio.counted} were not divided as planned "
            f"(chi-square p = {ratio.p_value:.2g}); find out why before reading on."
        )
    interval = effect.relative
    always = ""
    if criteria.sequential and looks:
        interval = looks[-1].relative
        stop = stopping_block(looks)
        always = ", valid at every look" + (f"; decided after block {stop}" if stop else "")
    where = f"{criteria.statistic} {METRIC_WORDS[criteria.metric]}"
    figures = (
        f"{percent(interval.estimate)} ({effect.confidence * 100:.4g} % interval "
        f"{percent(interval.low)} to "
        f"{percent(interval.high)}{always}), {effect.control:.3g} to {effect.treatment:.3g} ms"
    )
    kind: VerdictKind
    if not interval.excludes_zero:
        kind = "unclear"
        sentence = (
            f"No difference between {treatment} and {control} in {where} is shown: {figures}."
            if interval.high <= UNBOUNDED / 2
            else f"Too few requests to compare {treatment} with {control} in {where}."
        )
    else:
        kind = "better" if interval.high < 0 else "worse"
        word = "faster" if kind == "better" else "slower"
        sentence = f"{treatment} is {word} than {control} in {where}: {figures}."
    if failed := failed_guardrails(guards):
        losses = "; ".join(f"{guard.name} {loss(guard)}" for guard in failed)
        # A latency of which nothing is known would blur the one thing that is.
        shown = "" if kind == "unclear" else f" {sentence}"
        return "do_not_ship", f"Do not ship {treatment}: {causes(failed)}. {losses}.{shown}"
    if open_ := [guard.name for guard in guards if guard.outcome == "unclear"]:
        kind = "unclear" if kind == "better" else kind
        sentence += f" Not enough data for the guardrail on {', '.join(open_)}."
    return kind, sentence


def failed_guardrails(guards: Sequence[Guardrail]) -> list[Guardrail]:
    """Returns the guardrails that surely fail."""
    return [guard for guard in guards if guard.outcome == "fail"]


def causes(guards: Sequence[Guardrail]) -> str:
    """Returns what these guardrails guard: "errors", "quality" or both."""
    return " and ".join(sorted({guard.cause for guard in guards}))


def loss(guard: Guardrail) -> str:
    """Returns the values of a guardrail and the interval of its change."""
    values = (
        f"{guard.treatment:.3g}"
        if guard.control is None
        else f"{guard.control:.3g} to {guard.treatment:.3g}"
    )
    ends = f"{guard.change.low:+.3g} to {guard.change.high:+.3g}".replace("-", "\N{MINUS SIGN}")
    return f"{values} (change {ends}, accepted loss {guard.margin:g})"


def percent(value: float) -> str:
    """Returns "+3.1 %"; a minus sign for negative values, infinity for ends that do not exist."""
    if value > UNBOUNDED / 2:
        return "+\N{INFINITY}"
    return f"{value * 100:+.1f} %".replace("-", "\N{MINUS SIGN}")


def find_guardrails(
    columns: SampleColumns,
    samples: Sequence[Sample],
    treatment: int,
    blocks: NDArray[np.int64],
    criteria: Criteria,
    overlaps: Sequence[float],
    by_unit: bool,
) -> list[Guardrail]:
    """Returns the guardrails that the answers allow.

    Args:
        columns: Requests of all arms.
        samples: What was asked.
        treatment: Number of the treatment arm.
        blocks: [n] time block of each request.
        criteria: Margins.
        overlaps: Overlap of the two arms' slates for the same requests; empty if unknown.
        by_unit: Whether a unit stays in one arm.
    """
    mine = (columns.arm == 0) | (columns.arm == treatment)
    arms = (0, treatment)
    totals = [int((columns.arm == arm).sum()) for arm in arms]
    failed = [int(columns.failed[columns.arm == arm].sum()) for arm in arms]
    found = [
        guard_share(
            FAILED_REQUESTS, (failed[0], failed[1]), (totals[0], totals[1]), criteria.error_margin
        )
    ]
    slates = np.array([one.reply is not None for one in columns.exchanges]) & mine
    items = [one.reply.item_ids if one.reply else () for one in columns.exchanges]
    if not any(items):
        return found
    if criteria.k:
        short = [
            sum(len(items[i]) < criteria.k for i in np.flatnonzero(slates & (columns.arm == arm)))
            for arm in arms
        ]
        answered = [int((slates & (columns.arm == arm)).sum()) for arm in arms]
        if min(answered):
            found.append(
                guard_share(
                    "short slates",
                    (short[0], short[1]),
                    (answered[0], answered[1]),
                    criteria.short_margin,
                )
            )
    if overlaps:
        found.append(guard_overlap(overlaps, criteria.overlap_margin))
    wanted = [samples[one.sample].next_item for one in columns.exchanges]
    judged = slates & np.array([item is not None for item in wanted])
    if judged.any() and len(np.unique(columns.arm[judged])) > 1:
        gains = np.array(
            [
                ndcg(items[i], wanted[i] or "", criteria.k or len(items[i]))
                for i in range(len(items))
            ]
        )
        units = columns.unit[judged] if by_unit else None
        treated = columns.arm[judged] == treatment
        observed = Observations(gains[judged], treated, blocks[judged], units)
        name = f"NDCG@{criteria.k}" if criteria.k else "NDCG"
        found.append(guard_mean(name, observed, criteria.ndcg_margin, "lower"))
    return found


def paired_overlaps(columns: SampleColumns, treatment: int) -> list[float]:
    """Returns the overlap of the slates of each pair in which both arms answered."""
    slates: dict[int, dict[int, tuple[str, ...]]] = {}
    for shot, one in zip(columns.shot, columns.exchanges, strict=True):
        if one.arm in (0, treatment) and one.reply is not None:
            slates.setdefault(int(shot), {})[one.arm] = one.reply.item_ids
    return [overlap(pair[0], pair[treatment]) for pair in slates.values() if len(pair) == 2]


@dataclass(frozen=True)
class Comparison:
    """One treatment against the control.

    Attributes:
        control: Name of the control arm.
        treatment: Name of the treatment arm.
        metric: Which time decides.
        statistic: Which statistic decides.
        sequential: Whether the verdict uses the always-valid interval.
        effects: By metric, one per statistic.
        guardrails: Quality and errors.
        looks: The confidence sequence of the deciding statistic.
        order_effect: Second calls of pairs against first ones, in the median; None without pairs.
        num_blocks: Time blocks.
        block_s: Mean length of a block.
        correlation_time: Consecutive shots over which the arms' difference stays correlated.
        effective_size: Independent requests that say as much about the deciding statistic of one
            arm alone.
        detectable: Relative effect that a run like this finds with power 0.9.
        kind: Whether the treatment is better, worse, or neither is shown; "do_not_ship" if a
            guardrail fails, "invalid" where a check failed.
        verdict: The result in one sentence.
        notes: What limits the result.
    """

    control: str
    treatment: str
    metric: Metric
    statistic: Statistic
    sequential: bool
    effects: dict[Metric, list[Effect]]
    guardrails: list[Guardrail]
    looks: list[Look]
    order_effect: Interval | None
    num_blocks: int
    block_s: float
    correlation_time: float
    effective_size: float
    detectable: float
    kind: VerdictKind
    verdict: str
    notes: list[str]


def check_ratio(
    columns: SampleColumns, num_arms: int, mode: Mode, weights: tuple[float, ...] | None
) -> SampleRatio:
    """Returns whether units (`split`) or requests were divided as planned."""
    counts = []
    for arm in range(num_arms):
        mine = columns.arm == arm
        counts.append(len(np.unique(columns.unit[mine])) if mode == "split" else int(mine.sum()))
    p_value = sample_ratio_p(tuple(counts), weights)
    return SampleRatio(
        counted="units" if mode == "split" else "requests",
        counts=tuple(counts),
        p_value=p_value,
        alarm=p_value < SRM_ALARM,
    )


def metric_values(columns: SampleColumns, metric: Metric) -> tuple[Floats, NDArray[np.bool_]]:
    """Returns [n] values in milliseconds, and [n] whether there is one."""
    if metric == "latency":
        return columns.latency_ms, columns.timed & (columns.latency_ms > 0)
    values = np.array([_text_time(one, metric) for one in columns.exchanges], dtype=np.float64)
    return values, values > 0


def _text_time(one: HttpExchange, metric: Metric) -> float:
    """Time to the first token or per output token; -1 where there is none."""
    if not one.pieces or one.reply is None:
        return -1.0
    if metric == "ttft":
        return (one.pieces[0] - one.scheduled) * 1e3
    written = one.reply.output_tokens or 0
    if written < 2 or len(one.pieces) < 2:
        return -1.0
    return (one.pieces[-1] - one.pieces[0]) * 1e3 / (written - 1)


def compare_arms(
    columns: SampleColumns,
    samples: Sequence[Sample],
    names: Sequence[str],
    treatment: int,
    mode: Mode,
    criteria: Criteria,
    overlaps: Sequence[float] = (),
) -> Comparison:
    """Returns the comparison of one arm with arm 0.

    Args:
        columns: Requests of all arms.
        samples: What was asked.
        names: Of the arms.
        treatment: Number of the treatment arm.
        mode: How arms were drawn.
        criteria: What decides.
        overlaps: Overlap of the two arms' slates, where it was measured apart from the run.

    Raises:
        ValueError: If an arm has no latencies.
    """
    mine = (columns.arm == 0) | (columns.arm == treatment)
    if criteria.metric not in metrics_of(columns):
        raise ValueError(f"{criteria.metric}: the answers give no such time")
    confidence = 1 - (1 - CONFIDENCE) / max(len(names) - 1, 1)
    blocks, tau = _blocks(columns, mine, treatment)
    effects: dict[Metric, list[Effect]] = {}
    looks: list[Look] = []
    size = 0.0
    for metric in metrics_of(columns):
        values, usable = metric_values(columns, metric)
        chosen = mine & usable
        observed = _observations(columns, chosen, values, treatment, blocks, mode)
        effects[metric] = [compare(observed, one, confidence) for one in STATISTICS]
        if metric == criteria.metric:
            looks = confidence_sequence(observed, criteria.statistic, alpha=1 - confidence)
            if criteria.planned_shots:
                looks = early_looks(columns, treatment, mode, criteria, len(names))
            size = _effective_size(observed.values, criteria.statistic)
    decisive = next(e for e in effects[criteria.metric] if e.statistic == criteria.statistic)
    if mode == "paired":
        overlaps = paired_overlaps(columns, treatment)
    guards = find_guardrails(
        columns, samples, treatment, blocks, criteria, overlaps, mode == "split"
    )
    ratio = check_ratio(columns, len(names), mode, criteria.weights)
    kind, verdict = decide(names[0], names[treatment], decisive, looks, guards, ratio, criteria)
    order = _order_effect(columns, mine, blocks) if mode == "paired" else None
    degrees = decisive.num_blocks - 1
    reach = stats.t.ppf((1 + confidence) / 2, degrees) + stats.t.ppf(POWER, degrees)
    return Comparison(
        control=names[0],
        treatment=names[treatment],
        metric=criteria.metric,
        statistic=criteria.statistic,
        sequential=criteria.sequential,
        effects=effects,
        guardrails=guards,
        looks=looks,
        order_effect=order,
        num_blocks=decisive.num_blocks,
        block_s=float(np.ptp(columns.sent_s)) / decisive.num_blocks,
        correlation_time=tau,
        effective_size=size,
        detectable=float(np.expm1(reach * decisive.log_error)),
        kind=kind,
        verdict=verdict,
        notes=find_notes(columns, blocks[mine], treatment, tau, criteria, order),
    )


def early_looks(
    columns: SampleColumns, treatment: int, mode: Mode, criteria: Criteria, num_arms: int
) -> list[Look]:
    """Returns the looks of a run that may stop early, up to the one that decides.

    The length of a block follows from the planned number of shots alone, so that looking at the
    data cannot change it. An unfinished block does not count.
    """
    width = max(1, (criteria.planned_shots or 0) // PLANNED_BLOCKS)
    blocks = columns.shot // width
    complete = (int(columns.shot.max(initial=-1)) + 1) // width
    values, usable = metric_values(columns, criteria.metric)
    mine = (columns.arm == 0) | (columns.arm == treatment)
    chosen = mine & usable & (blocks < complete)
    if not chosen.any():
        return []
    observed = _observations(columns, chosen, values, treatment, blocks, mode)
    alpha = (1 - CONFIDENCE) / max(num_arms - 1, 1)
    return stopping_looks(observed, criteria.statistic, PLANNED_BLOCKS, alpha)


def _blocks(columns: SampleColumns, mine: NDArray[np.bool_], treatment: int) -> tuple[Ints, float]:
    """The time block of each request, 0 for other arms, and how long differences correlate."""
    shots = columns.shot[mine]
    counted = mine & columns.timed & (columns.latency_ms > 0)
    treated = columns.arm[counted] == treatment
    tau = difference_time(columns.latency_ms[counted], treated, columns.shot[counted])
    blocks = np.zeros(len(columns.shot), dtype=np.int64)
    blocks[mine] = time_blocks(shots, count_blocks(len(np.unique(shots)), tau))
    return blocks, tau


def metrics_of(columns: SampleColumns) -> list[Metric]:
    """Returns the times that the answers give: text has two more."""
    streamed = any(one.pieces for one in columns.exchanges)
    found: list[Metric] = ["latency"]
    if streamed:
        for metric in ("ttft", "tpot"):
            if metric_values(columns, metric)[1].mean() > 0.5:
                found.append(metric)
    return found


def _observations(
    columns: SampleColumns,
    chosen: NDArray[np.bool_],
    values: Floats,
    treatment: int,
    blocks: NDArray[np.int64],
    mode: Mode,
) -> Observations:
    return Observations(
        values=values[chosen],
        treated=columns.arm[chosen] == treatment,
        blocks=blocks[chosen],
        units=columns.unit[chosen] if mode == "split" else None,
    )


def _effective_size(values: Floats, statistic: Statistic) -> float:
    if statistic == "mean":
        return effective_size(values)
    above = values > np.quantile(values, quantile_level(statistic))
    return effective_size(above.astype(np.float64))


def _order_effect(
    columns: SampleColumns, mine: NDArray[np.bool_], blocks: NDArray[np.int64]
) -> Interval | None:
    chosen = mine & columns.timed & (columns.latency_ms > 0)
    later = columns.place[chosen] > 0
    if later.all() or not later.any():
        return None
    observed = Observations(columns.latency_ms[chosen], later, blocks[chosen])
    return compare(observed, "p50").relative


def find_notes(
    columns: SampleColumns,
    blocks: Ints,
    treatment: int,
    tau: float,
    criteria: Criteria,
    order: Interval | None,
) -> list[str]:
    """Returns what limits the result, in sentences.

    Args:
        columns: Requests of all arms.
        blocks: [n] time blocks of the requests of the two arms.
        treatment: Number of the treatment arm.
        tau: Consecutive shots over which the difference stays correlated.
        criteria: What decides.
        order: Second calls of pairs against first ones; None without pairs.
    """
    notes = []
    if criteria.planned_shots and columns.shot.max() + 1 < criteria.planned_shots:
        notes.append(
            f"The run stopped after {columns.shot.max() + 1} of {criteria.planned_shots} planned "
            "requests, because the difference was sure. Only the interval of the verdict allows "
            "for that; those of the other statistics are too narrow."
        )
    mine = (columns.arm == 0) | (columns.arm == treatment)
    num_blocks = int(blocks.max()) + 1
    per_block = len(np.unique(columns.shot[mine])) / num_blocks
    if num_blocks < MIN_BLOCKS:
        notes.append(f"Only {num_blocks} time blocks: run longer for at least {MIN_BLOCKS}.")
    elif per_block < SHORT_BLOCK * tau:
        notes.append(
            f"The arms' difference stays correlated over {tau:.0f} requests, and a time block "
            f"holds {per_block:.0f}. Intervals may be too narrow: run longer."
        )
    smallest = min(int((columns.arm == arm).sum()) for arm in (0, treatment))
    if criteria.statistic == "p99" and smallest < MIN_TAIL:
        notes.append(
            f"An arm has {smallest} requests; a 99th percentile needs {MIN_TAIL} and more."
        )
    if order is not None and order.excludes_zero:
        notes.append(
            f"The second request of a pair differs from the first by {percent(order.estimate)} in "
            "the median, because the first one warms caches. Each arm is first equally often, so "
            "the comparison is fair, but live latencies are nearer to those of first requests."
        )
    return notes


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
