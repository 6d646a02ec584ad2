"""What decides an experiment, and the sentence that states its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from recserve.experiments.statistics.intervals import Effect
from recserve.experiments.statistics.quality import Guardrail
from recserve.experiments.statistics.scores import UNBOUNDED, Statistic
from recserve.experiments.statistics.sequential import Look, stopping_block

Metric = Literal["latency", "ttft", "tpot"]
VerdictKind = Literal["better", "worse", "unclear", "invalid", "do_not_ship"]
METRIC_WORDS: dict[Metric, str] = {
    "latency": "latency",
    "ttft": "time to first token",
    "tpot": "time per output token",
}


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
        )
    else:
        kind = "better" if interval.high < 0 else "worse"
        word = "faster" if kind == "better" else "slower"
        sentence = f"{treatment} is {word} than {control} in {where}: {figures}."
    if failed := failed_guardrails(guards):
        losses = "; ".join(f"{guard.name} {loss(guard)}" for guard in failed)
        return "do_not_ship", f"Do not ship {treatment}: {causes(failed)}. {losses}. {sentence}"
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
