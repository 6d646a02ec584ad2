"""Samples of a finished run in columns, and the summary of each arm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recserve.experiments.statistics import Floats, Ints, autocorrelation_time
from recserve.load.datasets import Sample
from recserve.load.generator import HttpExchange, Run

PERCENTILES = (50, 90, 95, 99, 99.9)
TIMEOUT = "timeout"


@dataclass(frozen=True)
class Spread:
    """Mean, percentiles and extremes of a measured quantity.

    Attributes:
        count: Number of values.
        mean: Mean.
        minimum: Smallest value.
        maximum: Largest value.
        percentiles: By name: p50, p90, p95, p99, p99.9.
    """

    count: int
    mean: float
    minimum: float
    maximum: float
    percentiles: dict[str, float]


@dataclass(frozen=True)
class Drafting:
    """Speculative decoding of one class of prompts.

    Attributes:
        num_requests: Requests that drafted.
        tokens_per_step: Accepted tokens and the bonus token per verification step.
        acceptance_rate: Accepted share of the drafted tokens.
        share_of_time: Share of the summed latency that this class took.
    """

    num_requests: int
    tokens_per_step: float
    acceptance_rate: float
    share_of_time: float


@dataclass(frozen=True)
class TextSummary:
    """Text of one arm. Times in milliseconds.

    Attributes:
        ttft_ms: Time from the scheduled send to the first text.
        tpot_ms: Time per output token after the first, amortised over the tokens of each step.
        gap_ms: Time between two pieces of text, however many tokens a piece holds.
        output_tokens: Tokens per answer.
        tokens_per_s: Output tokens of all requests per second of the run.
        finish_reasons: Choices by why they ended.
        drafting: By category, and "all".
    """

    ttft_ms: Spread | None
    tpot_ms: Spread | None
    gap_ms: Spread | None
    output_tokens: Spread | None
    tokens_per_s: float
    finish_reasons: dict[str, int]
    drafting: dict[str, Drafting]


@dataclass(frozen=True)
class ItemSummary:
    """Slates of one arm.

    Attributes:
        slate_size: Items per answer.
        short_share: Share of answers with fewer items than were asked for.
        duplicate_share: Share of answers that name an item twice.
        illegal_share: Share of answered items that do not exist; None if it was not checked.
        degraded: Answers by the way in which they were less than what was asked.
    """

    slate_size: Spread | None
    short_share: float
    duplicate_share: float
    illegal_share: float | None
    degraded: dict[str, int]


@dataclass(frozen=True)
class ArmSummary:
    """One arm of a run.

    Attributes:
        name: The arm.
        num_requests: Requests after the warm-up.
        num_units: Different units.
        requests_per_s: Answered requests per second.
        errors: Failed requests by kind.
        example: What was said of the first failure; empty without failures.
        latency_ms: From the scheduled send to the last byte, timeouts included.
        service_ms: From the actual send to the last byte.
        server_ms: As the server reports it; None if it does not.
        correlation_time: Consecutive requests that carry the information of one.
        effective_size: Independent requests that would say as much about the mean.
        text: Of text routes.
        items: Of item routes.
        versions: Model and catalogue versions that answered.
    """

    name: str
    num_requests: int
    num_units: int
    requests_per_s: float
    errors: dict[str, int]
    example: str
    latency_ms: Spread | None
    service_ms: Spread | None
    server_ms: Spread | None
    correlation_time: float
    effective_size: float
    text: TextSummary | None
    items: ItemSummary | None
    versions: list[str]


@dataclass(frozen=True)
class SampleColumns:
    """Requests of a run after the warm-up, in the order of their shots.

    Attributes:
        exchanges: [n] the requests.
        shot: [n] number of the shot.
        place: [n] place within the shot.
        arm: [n] number of the arm.
        unit: [n] number of the unit.
        sent_s: [n] scheduled time.
        latency_ms: [n] latency.
        timed: [n] whether the latency counts: answered requests and timeouts.
        failed: [n] whether the request failed.
    """

    exchanges: tuple[HttpExchange, ...]
    shot: Ints
    place: Ints
    arm: Ints
    unit: Ints
    sent_s: Floats
    latency_ms: Floats
    timed: NDArray[np.bool_]
    failed: NDArray[np.bool_]

    @classmethod
    def of(cls, run: Run, samples: Sequence[Sample], warmup_s: float = 0.0) -> SampleColumns:
        """Returns the columns of the shots scheduled after the warm-up.

        A timeout counts as a latency, because leaving it out would hide the slowest requests.
        """
        first = {one.shot: one.scheduled for one in run.exchanges if one.place == 0}
        chosen = [one for one in run.exchanges if first[one.shot] >= warmup_s]
        chosen.sort(key=lambda one: (first[one.shot], one.shot, one.place))
        ranks = {shot: n for n, shot in enumerate(dict.fromkeys(one.shot for one in chosen))}
        units: dict[str, int] = {}
        for one in chosen:
            units.setdefault(samples[one.sample].unit, len(units))
        return cls(
            exchanges=tuple(chosen),
            shot=np.array([ranks[one.shot] for one in chosen], dtype=np.int64),
            place=np.array([one.place for one in chosen], dtype=np.int64),
            arm=np.array([one.arm for one in chosen], dtype=np.int64),
            unit=np.array([units[samples[one.sample].unit] for one in chosen], dtype=np.int64),
            sent_s=np.array([one.scheduled for one in chosen], dtype=np.float64),
            latency_ms=np.array([one.latency_ms for one in chosen], dtype=np.float64),
            timed=np.array([one.error in (None, TIMEOUT) for one in chosen], dtype=np.bool_),
            failed=np.array([one.error is not None for one in chosen], dtype=np.bool_),
        )


def spread(values: Sequence[float] | Floats) -> Spread | None:
    """Returns mean and percentiles; None without values."""
    array = np.asarray(values, dtype=np.float64)
    if not len(array):
        return None
    found = np.percentile(array, PERCENTILES)
    return Spread(
        count=len(array),
        mean=float(array.mean()),
        minimum=float(array.min()),
        maximum=float(array.max()),
        percentiles={f"p{p:g}": float(v) for p, v in zip(PERCENTILES, found, strict=True)},
    )


def summarise(
    columns: SampleColumns,
    arms: Sequence[str],
    samples: Sequence[Sample],
    kind: str,
    known_items: frozenset[str] | None = None,
    k: int | None = None,
) -> list[ArmSummary]:
    """Returns one summary per arm.

    Args:
        columns: The requests.
        arms: Names.
        samples: For categories.
        kind: "items" or "text".
        known_items: Every item that exists; None leaves the illegal share out.
        k: Items asked for; None if unknown.
    """
    seconds = float(np.ptp(columns.sent_s)) if len(columns.sent_s) > 1 else 0.0
    result = []
    for number, name in enumerate(arms):
        mine = np.flatnonzero(columns.arm == number)
        exchanges = [columns.exchanges[i] for i in mine]
        answered = [one for one in exchanges if one.reply is not None]
        latencies = columns.latency_ms[mine][columns.timed[mine]]
        tau = autocorrelation_time(latencies)
        replies = [one.reply for one in answered if one.reply is not None]
        reported = [reply.server_ms for reply in replies if reply.server_ms is not None]
        result.append(
            ArmSummary(
                name=name,
                num_requests=len(exchanges),
                num_units=len(np.unique(columns.unit[mine])),
                requests_per_s=len(answered) / seconds if seconds else 0.0,
                errors=dict(Counter(one.error for one in exchanges if one.error is not None)),
                example=next((one.detail for one in exchanges if one.detail), ""),
                latency_ms=spread(latencies),
                service_ms=spread([(one.done - one.sent) * 1e3 for one in answered]),
                server_ms=spread(reported),
                correlation_time=tau,
                effective_size=len(latencies) / tau,
                text=_text(answered, samples, seconds) if kind == "text" else None,
                items=_items(answered, known_items, k) if kind == "items" else None,
                versions=sorted({version for reply in replies for version in reply.versions}),
            )
        )
    return result


def _items(
    answered: Sequence[HttpExchange], known: frozenset[str] | None, k: int | None
) -> ItemSummary:
    slates = [one.reply.item_ids for one in answered if one.reply is not None]
    count = max(len(slates), 1)
    total = sum(len(slate) for slate in slates)
    degraded = Counter(why for one in answered if one.reply for why in one.reply.degraded)
    illegal = None
    if known is not None and total:
        illegal = sum(item not in known for slate in slates for item in slate) / total
    return ItemSummary(
        slate_size=spread([len(slate) for slate in slates]),
        short_share=sum(len(slate) < k for slate in slates) / count if k else 0.0,
        duplicate_share=sum(len(set(slate)) < len(slate) for slate in slates) / count,
        illegal_share=illegal,
        degraded=dict(degraded),
    )


def _text(
    answered: Sequence[HttpExchange], samples: Sequence[Sample], seconds: float
) -> TextSummary:
    first: list[float] = []
    per_token: list[float] = []
    gaps: list[float] = []
    tokens: list[float] = []
    classes: dict[str, list[HttpExchange]] = {}
    for one in answered:
        written = one.reply.output_tokens if one.reply else None
        if written is not None:
            tokens.append(float(written))
        if one.pieces:
            first.append((one.pieces[0] - one.scheduled) * 1e3)
            gaps.extend(np.diff(one.pieces) * 1e3)
            if written and written > 1 and len(one.pieces) > 1:
                per_token.append((one.pieces[-1] - one.pieces[0]) * 1e3 / (written - 1))
        classes.setdefault(samples[one.sample].category or "none", []).append(one)
    total_ms = sum(one.latency_ms for one in answered)
    groups = {**classes, "all": list(answered)} if set(classes) != {"none"} else {"all": answered}
    drafting = {name: _drafting(group, total_ms) for name, group in groups.items()}
    reasons = Counter(why for one in answered if one.reply for why in one.reply.finish_reasons)
    return TextSummary(
        ttft_ms=spread(first),
        tpot_ms=spread(per_token),
        gap_ms=spread(gaps),
        output_tokens=spread(tokens),
        tokens_per_s=sum(tokens) / seconds if seconds else 0.0,
        finish_reasons=dict(reasons),
        drafting={name: one for name, one in drafting.items() if one is not None},
    )


def _drafting(group: Sequence[HttpExchange], total_ms: float) -> Drafting | None:
    replies = [one.reply for one in group if one.reply is not None and one.reply.num_drafts]
    if not replies:
        return None
    steps = sum(reply.num_drafts for reply in replies)
    drafted = sum(reply.num_draft_tokens for reply in replies)
    accepted = sum(reply.num_accepted_tokens for reply in replies)
    return Drafting(
        num_requests=len(replies),
        tokens_per_step=1 + accepted / steps,
        acceptance_rate=accepted / drafted if drafted else 0.0,
        share_of_time=sum(one.latency_ms for one in group) / total_ms if total_ms else 0.0,
    )


def write_records(path: Path, columns: SampleColumns, arms: Sequence[str]) -> None:
    """Writes one row per request as Parquet: times, arm, status, tokens."""
    replies = [one.reply for one in columns.exchanges]
    table = pa.table(
        {
            "shot": columns.shot,
            "place": columns.place,
            "arm": [arms[arm] for arm in columns.arm],
            "unit": columns.unit,
            "scheduled_s": columns.sent_s,
            "latency_ms": columns.latency_ms,
            "lateness_ms": [(one.sent - one.scheduled) * 1e3 for one in columns.exchanges],
            "status": [one.status for one in columns.exchanges],
            "error": [one.error for one in columns.exchanges],
            "output_tokens": [reply.output_tokens if reply else None for reply in replies],
            "server_ms": [reply.server_ms if reply else None for reply in replies],
        }
    )
    pq.write_table(table, path)
