"""Comparison of a bundle's strategies: quality, agreement with beam search, work and latency.

recserve evaluate --bundle B --strategy all [--plot F.png]
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from recserve.bundle.bundle import Bundle, BundleError
from recserve.core.request import Slate
from recserve.search.strategy import strategy_classes
from recserve.training.evaluation.accuracy import ranks_of, slate_metrics
from recserve.training.evaluation.bundle_slates import BundleSlates
from recserve.training.evaluation.cases import Cases, leave_one_out_cases
from recserve.training.evaluation.slates import SlateOptions, rows_of

Ints = NDArray[np.int64]
REFERENCE = "beam"
BATCH = 256


@dataclass(frozen=True)
class StrategyFigures:
    """Figures of one strategy. All shares are between 0 and 1.

    Attributes:
        strategy: Name of the strategy.
        metrics: NDCG and recall, with seen items filtered.
        overlap: Share of the items that beam search also returns, at the largest cut-off.
        identical: Share of slates with the same items in the same order as beam search's.
        exact: Share of slates that the strategy reports as exact.
        illegal: Share of returned items that were excluded, repeated or not in the catalogue.
        rounds: Mean number of tree rounds per request.
        forwards: Mean number of forward passes over trees per request.
        nodes: Mean number of tree nodes per request.
        warm_ms: Median time of one request at a time, with its prefix cached.
        warm_p99_ms: 99th percentile of the same.
        cold_ms: Median time of one request at a time, with its prefix not cached.
    """

    strategy: str
    metrics: dict[str, float]
    overlap: float
    identical: float
    exact: float
    illegal: float
    rounds: float
    forwards: float
    nodes: float
    warm_ms: float
    warm_p99_ms: float
    cold_ms: float


@dataclass(frozen=True)
class StrategyRun:
    """What one strategy returned for all cases.

    Attributes:
        strategy: Name of the strategy.
        slates: Slate of each case, in the order of the cases.
        illegal: Share of returned items that the strategy must not return.
        cold_ms: Time of each timed case with an empty prefix cache.
        warm_ms: Time of each timed case with its prefix cached.
    """

    strategy: str
    slates: list[Slate]
    illegal: float
    cold_ms: list[float]
    warm_ms: list[float]


@dataclass(frozen=True)
class StrategyComparison:
    """Figures of all strategies of a bundle on the same users, with seen items excluded.

    Attributes:
        split: `valid` or `test`.
        users: Number of users.
        timed_users: Number of users whose requests were timed one at a time.
        width: Beam width.
        strategies: Figures of each strategy.
        seconds: Duration of the comparison.
    """

    split: str
    users: int
    timed_users: int
    width: int
    strategies: tuple[StrategyFigures, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures as a JSON-ready dictionary."""
        return asdict(self)

    def __rich__(self) -> Table:
        title = f"{self.split}, {self.users} users, beam {self.width}, seen items filtered"
        table = Table(title=title, title_justify="left")
        table.add_column("strategy")
        metrics = list(self.strategies[0].metrics)
        heads = [*metrics, "overlap", "identical", "exact", "illegal", "rounds", "forwards"]
        for name in [*heads, "nodes", "warm ms", "p99", "cold ms"]:
            table.add_column(name, justify="right")
        for s in self.strategies:
            shares = (s.overlap, s.identical, s.exact, s.illegal)
            work = (s.rounds, s.forwards)
            times = (s.warm_ms, s.warm_p99_ms, s.cold_ms)
            table.add_row(
                s.strategy,
                *(f"{s.metrics[name]:.4f}" for name in metrics),
                *(f"{share:.3f}" for share in shares),
                *(f"{value:.2f}" for value in work),
                f"{s.nodes:.0f}",
                *(f"{value:.1f}" for value in times),
            )
        return table

    def __str__(self) -> str:
        console = Console(width=170, color_system=None)
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip()

    def save_plot(self, path: Path) -> None:
        """Writes a PNG of quality over latency, with a warm and a cold point for each strategy."""
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        name = list(self.strategies[0].metrics)[-1]
        for s in self.strategies:
            value = s.metrics[name]
            (line,) = axes.plot([s.warm_ms, s.cold_ms], [value, value], linewidth=1, alpha=0.6)
            color = line.get_color()
            label = f"{s.strategy}: {s.overlap:.0%} of beam's items"
            axes.scatter([s.warm_ms], [value], color=color, zorder=3, label=label)
            axes.scatter([s.cold_ms], [value], edgecolors=color, facecolors="none", zorder=3)
        axes.set(xlabel="ms per request, one at a time (filled: warm, open: cold)", ylabel=name)
        axes.set_xscale("log")
        axes.margins(0.1, 0.2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.legend(fontsize=8, loc="center right")
        axes.set_title(f"{self.split}, {self.users} users, beam {self.width}", fontsize=10)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)


def compare_strategies(
    bundle: Bundle,
    split: Literal["valid", "test"] = "test",
    k: Sequence[int] = (10,),
    *,
    width: int = 50,
    users: int | None = None,
    timed_users: int = 100,
    device: torch.device | str = "cpu",
) -> StrategyComparison:
    """Compares all strategies that the bundle supports, on the same users.

    Args:
        bundle: A bundle with a recommender that supports beam search.
        split: `valid` or `test`.
        k: Cut-offs of the metrics, each between 1 and `width`.
        width: Beam width.
        users: Size of a sample of the users; None takes all.
        timed_users: Number of users whose requests are timed one at a time.
        device: Where the model runs.

    Raises:
        ValueError: If a cut-off is not between 1 and `width`.
        BundleError: If the bundle has no recommender that supports beam search. The other
            strategies are compared with beam search.
    """
    if not k or min(k) < 1 or max(k) > width:
        raise ValueError(f"k is {tuple(k)}; cut-offs lie between 1 and the beam width {width}")
    began = time.monotonic()
    answers = BundleSlates.open(bundle, device)
    there = answers.slates.engine.strategies
    if REFERENCE not in there:
        raise BundleError(f"{bundle.root}: this recommender cannot do beam search")
    cases = leave_one_out_cases(bundle.events(), split)
    cases = cases if users is None else cases.sample(users)
    timed = cases.sample(timed_users)
    found: list[StrategyFigures] = []
    reference: list[Slate] = []
    for name in (n for n in strategy_classes() if n in there):
        options = answers.options(name, width, True)
        slates = _slates(answers, cases, max(k), options, name)
        reference = reference or slates
        cold, warm = _times(answers, timed, max(k), options)
        illegal = illegal_share(cases, rows_of(slates, max(k)), answers.slates.trie.num_items)
        run = StrategyRun(strategy=name, slates=slates, illegal=illegal, cold_ms=cold, warm_ms=warm)
        found.append(_figures(run, reference, cases, k))
    seconds = time.monotonic() - began
    return StrategyComparison(split, len(cases), len(timed), width, tuple(found), seconds)


def _slates(
    answers: BundleSlates, cases: Cases, k: int, options: SlateOptions, shown: str
) -> list[Slate]:
    """Returns one slate per case, in the order of the cases."""
    slates: list[Slate | None] = [None] * len(cases)
    for which in cases.batches(BATCH, shown):
        for case, answer in zip(
            which.tolist(), answers.slates.answers(cases, which, k, options), strict=True
        ):
            slates[case] = answer
    return [slate for slate in slates if slate is not None]


def _times(
    answers: BundleSlates, cases: Cases, k: int, options: SlateOptions
) -> tuple[list[float], list[float]]:
    """Returns the milliseconds of each case alone: with a cold prefix, then with it cached."""
    slates = answers.slates
    times: tuple[list[float], list[float]] = ([], [])
    for case in range(len(cases)):
        which = np.array([case])
        slates.forget(cases, which)
        for part in times:
            (answer,) = slates.answers(cases, which, k, options)
            part.append(answer.timing.total_ms)
    return times


def _figures(
    run: StrategyRun, reference: list[Slate], cases: Cases, k: Sequence[int]
) -> StrategyFigures:
    """Compares a run with the slates of the reference strategy on the same cases."""
    most = max(k)
    rows, best = rows_of(run.slates, most), rows_of(reference, most)
    # Items of the slate that the reference has anywhere in its own: [n, k, 1] against [n, 1, k].
    shared = ((rows[:, :, None] == best[:, None, :]) & (rows >= 0)[:, :, None]).any(-1).sum(1)
    timings = [slate.timing for slate in run.slates]
    return StrategyFigures(
        strategy=run.strategy,
        metrics=slate_metrics(ranks_of(rows, cases.held), k),
        overlap=float((shared / np.maximum((best >= 0).sum(1), 1)).mean()),
        identical=float((rows == best).all(1).mean()),
        exact=float(np.mean([slate.exact for slate in run.slates])),
        illegal=run.illegal,
        rounds=float(np.mean([slate.rounds for slate in run.slates])),
        forwards=float(np.mean([timing.forwards for timing in timings])),
        nodes=float(np.mean([timing.nodes for timing in timings])),
        warm_ms=float(np.median(run.warm_ms)),
        warm_p99_ms=float(np.percentile(run.warm_ms, 99)),
        cold_ms=float(np.median(run.cold_ms)),
    )


def illegal_share(cases: Cases, rows: Ints, num_items: int) -> float:
    """Returns the share of items that are in the history, repeated, or not in the catalogue.

    Args:
        cases: n cases.
        rows: [n, k] returned item rows, -1 after the end of a shorter slate.
        num_items: Number of items in the catalogue.
    """
    returned = illegal = 0
    for case, slate in enumerate(rows):
        items = slate[slate >= 0]
        bad = np.isin(items, cases.history(case)) | (items >= num_items)
        illegal += int(bad.sum()) + len(items) - len(np.unique(items))
        returned += len(items)
    return illegal / max(returned, 1)
