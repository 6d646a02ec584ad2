"""Leave-one-out evaluation of a bundle's models over the whole catalogue.

Every metric is computed twice. In column `kept`, slates may contain items of the history; in column
`filtered`, they may not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from recserve.bundle.bundle import Bundle, BundleError
from recserve.features.tables.events import EventLog
from recserve.models.sasrec import SasRec, load_sasrec
from recserve.search.strategy import strategy_classes
from recserve.training.evaluation.accuracy import ranks_of, slate_metrics
from recserve.training.evaluation.bundle_slates import EXHAUSTIVE, BundleSlates
from recserve.training.evaluation.cases import Cases, leave_one_out_cases
from recserve.training.evaluation.slates import dense_slates, popularity_slates, sasrec_slates

Ints = NDArray[np.int64]
BASELINES = ("popularity", "sasrec")


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation.

    Attributes:
        model: `recommender`, `sasrec` or `popularity`.
        strategy: The strategy that made the slates.
        split: `valid` or `test`.
        users: Number of evaluated users.
        width: Beam width.
        dense_weight: Weight of the dense head in the final ranking.
        columns: Metrics by column. Slates of `kept` may contain seen items; slates of `filtered`
            may not.
        seconds: Duration of the evaluation.
    """

    model: str
    strategy: str
    split: str
    users: int
    width: int
    dense_weight: float
    columns: dict[str, dict[str, float]]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as a JSON-ready dictionary."""
        return asdict(self)

    def __rich__(self) -> Table:
        title = f"{self.model}, {self.strategy}, {self.split}, {self.users} users"
        table = Table(title=title, title_justify="left")
        table.add_column("seen items")
        names = list(next(iter(self.columns.values())))
        for name in names:
            table.add_column(name, justify="right")
        for column, metrics in self.columns.items():
            table.add_row(column, *(f"{metrics[name]:.4f}" for name in names))
        return table

    def __str__(self) -> str:
        console = Console(width=100, color_system=None)
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip()


def slate_columns(
    cases: Cases,
    slates: Callable[[Ints, bool], Ints],
    cutoffs: Sequence[int],
    batch: int = 256,
    columns: Sequence[str] = ("kept", "filtered"),
    shown: str | None = None,
) -> dict[str, dict[str, float]]:
    """Returns the metrics of each column.

    Args:
        cases: The cases to evaluate.
        slates: Maps case numbers and whether seen items are filtered to [n, k] item rows.
        cutoffs: Cut-offs of the metrics.
        batch: Number of cases per call of `slates`.
        columns: Which of `kept` and `filtered` to compute.
        shown: Label of the progress bar; None means no bar.
    """
    metrics: dict[str, dict[str, float]] = {}
    for column in columns:
        ranks = np.empty(len(cases), dtype=np.int64)
        for which in cases.batches(batch, shown and f"{shown}, seen items {column}"):
            ranks[which] = ranks_of(slates(which, column == "filtered"), cases.held[which])
        metrics[column] = slate_metrics(ranks, cutoffs)
    return metrics


@dataclass(frozen=True)
class EvaluationOptions:
    """What is evaluated, and on which users.

    Attributes:
        split: `valid` holds out the last event but one of each user, `test` the last.
        strategy: A strategy of the engine, or one of these:

            - `auto`: beam search, or `exhaustive` for a model that is not autoregressive.
            - `exhaustive`: `rpg` on all items.
            - `dense_head`: the recommender's dense head alone.
            - `sasrec`: the SASRec baseline.
            - `popularity`: the most frequent items of the training events.
        k: Cut-offs of the metrics, each between 1 and `width`.
        width: Beam width.
        dense_weight: Weight of the dense head; None takes the bundle's.
        users: Size of a sample that is drawn with a fixed seed; None evaluates all users.
        device: Where the model runs.

    Raises:
        ValueError: If a strategy is unknown or a cut-off is out of range.
    """

    split: Literal["valid", "test"] = "test"
    strategy: str = "auto"
    k: Sequence[int] = (5, 10)
    width: int = 50
    dense_weight: float | None = None
    users: int | None = None
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        strategies = ("auto", *strategy_classes(), EXHAUSTIVE, "dense_head", *BASELINES)
        if self.strategy not in strategies:
            raise ValueError(f"strategy is {self.strategy!r}; choose one of {strategies}")
        if not self.k or min(self.k) < 1 or max(self.k) > self.width:
            raise ValueError(
                f"k is {tuple(self.k)}; cut-offs lie between 1 and the beam width {self.width}"
            )


def evaluate_bundle(bundle: Bundle, options: EvaluationOptions | None = None) -> Evaluation:
    """Evaluates a trained model of the bundle, with seen items allowed and with them filtered.

    The item graph of `rpg` is built in memory if the bundle has none.

    Args:
        bundle: The bundle with the model and the events.
        options: What is evaluated; None takes the defaults.

    Returns:
        Metrics of both treatments of seen items.

    Raises:
        BundleError: If the model, or what the strategy needs, was not trained.
    """
    options = options or EvaluationOptions()
    k, width = options.k, options.width
    strategy = options.strategy
    name = strategy if strategy in BASELINES else "recommender"
    if name != "popularity" and not bundle.has(name):
        raise BundleError(f"{bundle.root}: no {name} was trained; run `recserve train {name}`")
    if strategy == "sasrec":
        return evaluate_sasrec(sasrec_of(bundle, options.device), bundle.events(), options)
    began = time.monotonic()
    events = bundle.events()
    cases = _cases(events, options)
    most, weight = max(k), 0.0
    if strategy == "popularity":
        counts = events.leave_one_out().train.popularity(len(bundle.catalog()))

        def slates(which: Ints, filtered: bool) -> Ints:
            return popularity_slates(counts, cases, which, most, filtered)
    else:
        answers = BundleSlates.open(bundle, options.device)
        if strategy == "auto":
            strategy = "beam" if answers.autoregressive else EXHAUSTIVE
        if strategy == "dense_head":
            model, codes = answers.slates.model, answers.slates.codes

            def slates(which: Ints, filtered: bool) -> Ints:
                return dense_slates(model, codes, cases, which, most, filtered)
        else:
            weight = answers.options(strategy, width, True, options.dense_weight).dense_weight

            def slates(which: Ints, filtered: bool) -> Ints:
                chosen = answers.options(strategy, width, filtered, options.dense_weight)
                return answers.slates(cases, which, most, chosen)

    columns = slate_columns(cases, slates, k, shown=strategy)
    return Evaluation(
        model=name,
        strategy=strategy,
        split=options.split,
        users=len(cases),
        width=width,
        dense_weight=weight,
        columns=columns,
        seconds=time.monotonic() - began,
    )


def sasrec_of(bundle: Bundle, device: torch.device | str) -> SasRec:
    """Returns the SASRec of a bundle that has one, with its item vectors bound."""
    vectors = torch.from_numpy(bundle.catalog().vectors)
    return load_sasrec(bundle.directory("sasrec"), vectors, device)


def evaluate_sasrec(model: SasRec, events: EventLog, options: EvaluationOptions) -> Evaluation:
    """Evaluates a SASRec, in a bundle or not, as `evaluate_bundle` does.

    Args:
        model: The model, with its item vectors bound.
        events: The events of all users.
        options: What is evaluated; the strategy is not read.
    """
    began = time.monotonic()
    cases = _cases(events, options)

    def slates(which: Ints, filtered: bool) -> Ints:
        return sasrec_slates(model, cases, which, max(options.k), filtered)

    columns = slate_columns(cases, slates, options.k, shown="sasrec")
    return Evaluation(
        model="sasrec",
        strategy="sasrec",
        split=options.split,
        users=len(cases),
        width=options.width,
        dense_weight=0.0,
        columns=columns,
        seconds=time.monotonic() - began,
    )


def _cases(events: EventLog, options: EvaluationOptions) -> Cases:
    cases = leave_one_out_cases(events, options.split)
    return cases if options.users is None else cases.sample(options.users)
