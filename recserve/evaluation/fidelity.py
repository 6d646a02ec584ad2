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
from recserve.evaluation.accuracy import ranks_of, user_metrics
from recserve.evaluation.bundle_slates import BundleSlates
from recserve.evaluation.cases import Cases, leave_one_out_cases
from recserve.evaluation.intervals import (
    COUNT_METHOD,
    MEAN_METHOD,
    QUANTILE_METHOD,
    Range,
    count_interval,
    mean_interval,
    quantile_interval,
)
from recserve.evaluation.slates import SlateOptions, rows_of
from recserve.search.strategy import strategy_classes

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
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
        illegal: Share of a slate's items that were excluded, repeated or not in the catalogue.
        rounds: Mean number of tree rounds per request.
        forwards: Mean number of forward passes over trees per request.
        nodes: Mean number of tree nodes per request.
        warm_ms: Median time of one request at a time, with its prefix cached.
        warm_p99_ms: 99th percentile of the same.
        cold_ms: Median time of one request at a time, with its prefix not cached.
        intervals: 95 % interval of each figure and metric, by name.
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
    intervals: dict[str, Range]

    def cell(self, name: str, digits: int) -> str:
        """Returns a figure with its interval below it."""
        value = self.metrics[name] if name in self.metrics else getattr(self, name)
        low, high = self.intervals[name]
        return f"{value:.{digits}f}\n{low:.{digits}f}-{high:.{digits}f}"


@dataclass(frozen=True)
class StrategyRun:
    """What one strategy returned for all cases.

    Attributes:
        strategy: Name of the strategy.
        slates: Slate of each case, in the order of the cases.
        illegal: [n] share of each slate's items that the strategy must not return.
        cold_ms: Time of each timed case with an empty prefix cache.
        warm_ms: Time of each timed case with its prefix cached.
    """

    strategy: str
    slates: list[Slate]
    illegal: Floats
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
        return asdict(self) | {
            "interval_methods": {
                "metrics and shares": f"95 % {MEAN_METHOD}",
                "rounds, forwards, nodes": f"95 % {COUNT_METHOD}",
                "times": f"95 % {QUANTILE_METHOD}",
            }
        }

    def __rich__(self) -> Table:
        title = f"{self.split}, {self.users} users, beam {self.width}, seen items filtered"
        table = Table(title=title, title_justify="left")
        table.add_column("strategy")
        metrics = list(self.strategies[0].metrics)
        heads = [*metrics, "overlap", "identical", "exact", "illegal", "rounds", "forwards"]
        for name in [*heads, "nodes", "warm ms", "p99", "cold ms"]:
            table.add_column(name, justify="right")
        for s in self.strategies:
            table.add_row(
                s.strategy,
                *(s.cell(name, 4) for name in metrics),
                *(s.cell(name, 3) for name in ("overlap", "identical", "exact", "illegal")),
                *(s.cell(name, 2) for name in ("rounds", "forwards")),
                s.cell("nodes", 0),
                *(s.cell(name, 1) for name in ("warm_ms", "warm_p99_ms", "cold_ms")),
            )
        return table

    def __str__(self) -> str:
        console = Console(width=220, color_system=None)
        with console.capture() as capture:
            console.print(self)
            console.print(
                f"below each figure: its 95 % interval (metrics and shares: {MEAN_METHOD}; rounds, "
                f"forwards and nodes: {COUNT_METHOD}; times: {QUANTILE_METHOD})",
                soft_wrap=True,
            )
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
    there = answers.slates.engine.selectable
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
        cold, warm = measure_times(answers, timed, max(k), options)
        illegal = illegal_shares(cases, rows_of(slates, max(k)), answers.slates.trie.num_items)
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


def measure_times(
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
    shared = shared / np.maximum((best >= 0).sum(1), 1)
    timings = [slate.timing for slate in run.slates]
    metrics = user_metrics(ranks_of(rows, cases.held), k)
    shares = {
        "overlap": shared,
        "identical": (rows == best).all(1),
        "exact": np.array([slate.exact for slate in run.slates]),
        "illegal": run.illegal,
    }
    counts = {
        "rounds": [slate.rounds for slate in run.slates],
        "forwards": [timing.forwards for timing in timings],
        "nodes": [timing.nodes for timing in timings],
    }
    times = {
        "warm_ms": (run.warm_ms, 0.5),
        "warm_p99_ms": (run.warm_ms, 0.99),
        "cold_ms": (run.cold_ms, 0.5),
    }
    return StrategyFigures(
        strategy=run.strategy,
        metrics={name: float(values.mean()) for name, values in metrics.items()},
        **{name: float(np.mean(values)) for name, values in (shares | counts).items()},
        **{name: float(np.quantile(values, share)) for name, (values, share) in times.items()},
        intervals={
            **{name: mean_interval(values) for name, values in (metrics | shares).items()},
            **{name: count_interval(values) for name, values in counts.items()},
            **{name: quantile_interval(values, share) for name, (values, share) in times.items()},
        },
    )


def illegal_shares(cases: Cases, rows: Ints, num_items: int) -> Floats:
    """Returns each slate's share of items that are in the history, repeated, or not in the
    catalogue.

    Args:
        cases: n cases.
        rows: [n, k] returned item rows, -1 after the end of a shorter slate.
        num_items: Number of items in the catalogue.

    Returns:
        [n] shares; 0 for an empty slate.
    """
    shares = np.zeros(len(rows))
    for case, slate in enumerate(rows):
        items = slate[slate >= 0]
        bad = np.isin(items, cases.history(case)) | (items >= num_items)
        illegal = int(bad.sum()) + len(items) - len(np.unique(items))
        shares[case] = illegal / max(len(items), 1)
    return shares
