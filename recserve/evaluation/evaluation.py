"""Leave-one-out evaluation of a bundle's models over the whole catalogue.

Every metric is computed twice. In column `kept`, slates may contain items of the history; in column
`filtered`, they may not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from recserve.bundle.bundle import Bundle, BundleError
from recserve.evaluation.accuracy import ranks_of, slate_metrics, user_metrics
from recserve.evaluation.bundle_slates import EXHAUSTIVE, BundleSlates
from recserve.evaluation.cases import Cases, leave_one_out_cases
from recserve.evaluation.intervals import MEAN_METHOD, Range, mean_interval
from recserve.evaluation.slates import dense_slates, sasrec_slates
from recserve.evaluation.untrained import UNTRAINED, SlateMaker, TrainingData
from recserve.features.catalog.catalog import Catalog
from recserve.features.catalog.versions import first_version
from recserve.features.tables.events import EventLog
from recserve.features.tables.mapped_arrays import new_array
from recserve.models.imported_model import ImportedConfig
from recserve.models.sasrec import SasRec, load_sasrec
from recserve.models.scoring import Scoring
from recserve.schemas.items import ScoringChoice
from recserve.schemas.validation import to_message
from recserve.search.strategy import strategy_classes
from recserve.service.auto_strategy import AutoSetting, read_auto
from recserve.service.scoring import resolve_scoring
from recserve.service.similar import (
    BY_LINKS,
    NO_LINKS,
    SIMILARITIES,
    ItemSimilarity,
    best_items,
)

Ints = NDArray[np.int64]
COLUMNS = ("kept", "filtered")
BASELINES = (*UNTRAINED, "sasrec")


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation.

    Attributes:
        model: `recommender`, `sasrec`, or the name of an untrained baseline.
        strategy: The strategy that made the slates.
        split: `valid` or `test`.
        users: Number of evaluated users.
        width: Beam width.
        dense_weight: Weight of the dense head in the final ranking.
        scoring: How items were scored; of imported recommenders, and where a scoring was named.
        columns: Metrics by column. Slates of `kept` may contain seen items; slates of `filtered`
            may not.
        intervals: 95 % interval of each metric, by column.
        seconds: Duration of the evaluation.
        slates: [n, k] item rows of the slates, by column; -1 after the end of a shorter slate.
    """

    model: str
    strategy: str
    split: str
    users: int
    width: int
    dense_weight: float
    scoring: dict[str, Any] | None
    columns: dict[str, dict[str, float]]
    intervals: dict[str, dict[str, Range]]
    seconds: float
    slates: Mapping[str, Ints] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Returns the result without the slates as a JSON-ready dictionary."""
        left_out = {"slates", "scoring"} if self.scoring is None else {"slates"}
        shown = {name: value for name, value in vars(self).items() if name not in left_out}
        return shown | {"interval_method": f"95 % {MEAN_METHOD}"}

    def __rich__(self) -> Table:
        title = f"{self.model}, {self.strategy}, {self.split}, {self.users} users"
        if self.scoring is not None:
            title += f", rule {self.scoring['rule']}"
        table = Table(title=title, title_justify="left")
        table.add_column("seen items")
        names = list(next(iter(self.columns.values())))
        for name in names:
            table.add_column(name, justify="right")
        for column in self.columns:
            table.add_row(column, *self.cells(column))
        return table

    def cells(self, column: str) -> list[str]:
        """Returns each metric of a column with its interval below it."""
        ranges = self.intervals[column]
        return [
            f"{value:.4f}\n{ranges[name][0]:.4f}-{ranges[name][1]:.4f}"
            for name, value in self.columns[column].items()
        ]

    def __str__(self) -> str:
        console = Console(width=100, color_system=None)
        with console.capture() as capture:
            console.print(self)
            console.print(f"below each figure: its 95 % interval ({MEAN_METHOD})", soft_wrap=True)
        return capture.get().rstrip()


def make_slates(
    cases: Cases,
    slates: SlateMaker,
    filtered: bool,
    batch: int = 256,
    shown: str | None = None,
) -> Ints:
    """Returns [n, k] item rows of all cases, in their order, on disk if they are many.

    Args:
        cases: n cases.
        slates: Maps case numbers and whether seen items are filtered to item rows.
        filtered: Whether seen items are filtered.
        batch: Number of cases per call of `slates`.
        shown: Label of the progress bar; None means no bar.
    """
    made: Ints | None = None
    for which in cases.batches(batch, shown):
        rows = slates(which, filtered)
        if made is None:
            made = new_array(len(cases) * rows.shape[1], np.int64).reshape(-1, rows.shape[1])
        made[which] = rows
    return np.zeros((0, 0), dtype=np.int64) if made is None else made


def slate_columns(
    cases: Cases,
    slates: SlateMaker,
    cutoffs: Sequence[int],
    columns: Sequence[str] = COLUMNS,
) -> dict[str, dict[str, float]]:
    """Returns the metrics of each column.

    Args:
        cases: The cases to evaluate.
        slates: Maps case numbers and whether seen items are filtered to [n, k] item rows.
        cutoffs: Cut-offs of the metrics.
        columns: Which of `kept` and `filtered` to compute.
    """
    return {
        column: slate_metrics(
            ranks_of(make_slates(cases, slates, column == "filtered"), cases.held), cutoffs
        )
        for column in columns
    }


@dataclass(frozen=True)
class EvaluationOptions:
    """What is evaluated, and on which users.

    Attributes:
        split: `valid` holds out the last event but one of each user, `test` the last.
        strategy: A strategy of the engine, or one of these:

            - `auto`: what `recserve bundle calibrate` chose for it. Without a choice it is beam
              search, or `exhaustive` for a model that is not autoregressive.
            - `exhaustive`: `rpg` on all items.
            - `dense_head`: the recommender's dense head alone.
            - `sasrec`: the SASRec baseline.
            - `popularity`: the most frequent items of the training events.
            - `popularity_week`: the same of the week before the held-out event.
            - `item_knn`: items that the same users had.
            - `similar`, `similar_vectors`, `similar_links`: items that are similar to the last one.
            - `transitions_2`, `transitions_3`: an untrained graph of transitions, two or three
              hops deep.
        k: Cut-offs of the metrics, each between 1 and `width`.
        width: Beam width.
        dense_weight: Weight of the dense head; None takes the bundle's.
        scoring: Another scoring of strategy `beam`, as in requests; None takes the model's.
        users: Size of a sample that is drawn with a fixed seed; None evaluates all users.
        device: Where the model runs.
        since: Time from which a held-out event is evaluated, as in the events; None evaluates all.
        session_s: Longest time between a held-out event and the one before it; None evaluates all.

    Raises:
        ValueError: If a strategy is unknown or a cut-off is out of range.
    """

    split: Literal["valid", "test"] = "test"
    strategy: str = "auto"
    k: Sequence[int] = (5, 10)
    width: int = 50
    dense_weight: float | None = None
    scoring: Mapping[str, Any] | None = None
    users: int | None = None
    device: torch.device | str = "cpu"
    since: int | None = None
    session_s: float | None = None

    def __post_init__(self) -> None:
        strategies = (
            *("auto", *strategy_classes(), EXHAUSTIVE, "dense_head"),
            *(*SIMILARITIES, *BASELINES),
        )
        if self.strategy not in strategies:
            raise ValueError(f"strategy is {self.strategy!r}; choose one of {strategies}")
        if self.scoring is not None:
            to_message(dict(self.scoring), ScoringChoice)
            if self.strategy not in ("auto", "beam"):
                raise ValueError(
                    f"scoring: only strategy 'beam' can be scored otherwise, got {self.strategy!r}"
                )
        if not self.k or min(self.k) < 1 or max(self.k) > self.width:
            raise ValueError(
                f"k is {tuple(self.k)}; cut-offs lie between 1 and the beam width {self.width}"
            )


@dataclass(frozen=True)
class EvaluationData:
    """A bundle's events and the cases that are evaluated.

    Attributes:
        catalog: The bundle's catalogue.
        events: The events of all users.
        cases: The cases.
        training: The training events, for untrained baselines.
    """

    catalog: Catalog
    events: EventLog
    cases: Cases
    training: TrainingData

    @staticmethod
    def open(bundle: Bundle, options: EvaluationOptions) -> EvaluationData:
        """Reads catalogue and events.

        Raises:
            ValueError: If no user has three events, or none has a held-out event since
                `options.since` or within `options.session_s`.
        """
        catalog, events = bundle.catalog(), bundle.events()
        cases = leave_one_out_cases(events, options.split)
        if options.since is not None:
            late = np.flatnonzero(events.times[cases.stops] >= options.since)
            if not late.size:
                raise ValueError("no user has a held-out event after the time of the split")
            cases = cases.take(late)
        if options.session_s is not None:
            cases = _in_session(events, cases, options.session_s)
        if options.users is not None:
            cases = cases.sample(options.users)
        train = events.leave_one_out().train
        held_times = events.times[cases.stops]
        training = TrainingData(train, catalog.vectors, cases, held_times, max(options.k))
        return EvaluationData(catalog, events, cases, training)


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
        ValueError: If the events do not have what a baseline needs.
    """
    options = options or EvaluationOptions()
    if options.strategy in SIMILARITIES:
        return evaluate_similar(bundle, EvaluationData.open(bundle, options), options)
    name = options.strategy if options.strategy in BASELINES else "recommender"
    if name not in UNTRAINED and not bundle.has(name):
        raise BundleError(f"{bundle.root}: no {name} was trained; run `recserve train {name}`")
    data = EvaluationData.open(bundle, options)
    if name in UNTRAINED:
        return evaluate_untrained(name, data, options)
    if name == "sasrec":
        model = load_sasrec(
            bundle.directory("sasrec"), torch.from_numpy(data.catalog.vectors), options.device
        )
        return evaluate_sasrec(model, data, options)
    return evaluate_recommender(bundle, data, options)


def evaluate_recommender(
    bundle: Bundle, data: EvaluationData, options: EvaluationOptions
) -> Evaluation:
    """Evaluates a bundle's recommender with one strategy.

    Raises:
        BundleError: If the model, or what the strategy needs, was not trained.
    """
    began = time.monotonic()
    cases, most, width, strategy = data.cases, max(options.k), options.width, options.strategy
    weight, scoring = 0.0, None
    answers = BundleSlates.open(bundle, options.device)
    config = answers.slates.model.config
    used = config.scoring if isinstance(config, ImportedConfig) else None
    if options.scoring is not None:
        strategy = "beam"
        used = scoring = resolve_scoring(to_message(dict(options.scoring), ScoringChoice), config)
    if strategy == "auto":
        strategy = "beam" if answers.autoregressive else EXHAUSTIVE
        chosen = auto_of_bundle(bundle, answers) if options.dense_weight is None else {}
        if chosen:
            return _evaluate_auto(chosen, answers, data, options, began)
    if strategy == "dense_head":
        model, codes = answers.slates.model, answers.slates.codes

        def slates(which: Ints, filtered: bool) -> Ints:
            return dense_slates(model, codes, cases, which, most, filtered)
    else:
        weight = answers.options(strategy, width, True, options.dense_weight).dense_weight

        def slates(which: Ints, filtered: bool) -> Ints:
            way = answers.options(strategy, width, filtered, options.dense_weight)
            return answers.slates(cases, which, most, replace(way, scoring=scoring))

    return _evaluate("recommender", strategy, weight, slates, data, options, began, used)


def auto_of_bundle(bundle: Bundle, answers: BundleSlates) -> dict[str, AutoSetting]:
    """Returns what a server with this bundle serves for `auto`; empty if nothing was chosen."""
    there = answers.slates.engine.selectable
    found = read_auto(bundle.manifest.recommender)
    return found if all(each.strategy in there for each in found.values()) else {}


def _evaluate_auto(
    chosen: Mapping[str, AutoSetting],
    answers: BundleSlates,
    data: EvaluationData,
    options: EvaluationOptions,
    began: float,
) -> Evaluation:
    """Evaluates what validation chose for `auto`, for each column its own."""

    def slates(which: Ints, filtered: bool) -> Ints:
        setting = chosen["filtered" if filtered else "kept"]
        strategy = answers.as_served(setting.strategy)
        way = answers.options(strategy, options.width, filtered, setting.dense_weight)
        return answers.slates(data.cases, which, max(options.k), way)

    names = [
        f"{column}: {setting.strategy}, dense weight {setting.dense_weight:g}"
        for column, setting in chosen.items()
    ]
    weight = chosen["filtered"].dense_weight
    strategy = f"auto ({'; '.join(names)})"
    return _evaluate("recommender", strategy, weight, slates, data, options, began)


def evaluate_untrained(name: str, data: EvaluationData, options: EvaluationOptions) -> Evaluation:
    """Evaluates a baseline of UNTRAINED.

    Raises:
        UnsuitableEvents: If the events lack what it reads.
    """
    began = time.monotonic()
    slates = UNTRAINED[name].build(data.training)
    return _evaluate(name, name, 0.0, slates, data, options, began)


def evaluate_similar(
    bundle: Bundle, data: EvaluationData, options: EvaluationOptions
) -> Evaluation:
    """Evaluates the items that are similar to the last one of each history.

    Raises:
        BundleError: If the bundle has no links, and `similar_links` is evaluated.
    """
    began = time.monotonic()
    similarity = ItemSimilarity.open(bundle, data.catalog.vectors)
    if similarity.links is None and options.strategy == BY_LINKS:
        raise BundleError(f"{bundle.root}: {NO_LINKS}")
    slates = similar_slates(data.catalog, similarity, options.strategy, data.cases, max(options.k))
    return _evaluate("similar", options.strategy, 0.0, slates, data, options, began)


def similar_slates(
    catalog: Catalog, similarity: ItemSimilarity, strategy: str, cases: Cases, k: int
) -> Callable[[Ints, bool], Ints]:
    """Returns what makes [n, k] rows of the items that are similar to the last item of n cases.

    The last item is never among them, and the whole history is not if seen items are filtered.
    """
    version = first_version(catalog, {})

    def slates(which: Ints, filtered: bool) -> Ints:
        found = np.full((len(which), k), -1, dtype=np.int64)
        for place, case in enumerate(which.tolist()):
            history = cases.history(case)
            scores = similarity.scores(strategy, history[-1:], version)
            allowed = np.ones(len(catalog), dtype=bool)
            allowed[history if filtered else history[-1:]] = False
            rows = best_items(scores, allowed, (), k).rows
            found[place, : rows.size] = rows
        return found

    return slates


def _in_session(events: EventLog, cases: Cases, session_s: float) -> Cases:
    """Returns the cases whose held-out event follows within a time. Raises ValueError."""
    if not events.has_timestamps:
        raise ValueError("the events have positions and no timestamps, so there are no sessions")
    gaps = events.times[cases.stops] - events.times[cases.stops - 1]
    near = np.flatnonzero(gaps <= session_s * 1e6)
    if not near.size:
        raise ValueError(f"no held-out event follows another one within {session_s:g} s")
    return cases.take(near)


def evaluate_sasrec(model: SasRec, data: EvaluationData, options: EvaluationOptions) -> Evaluation:
    """Evaluates a SASRec, in a bundle or not; its item vectors must be bound."""
    began = time.monotonic()

    def slates(which: Ints, filtered: bool) -> Ints:
        return sasrec_slates(model, data.cases, which, max(options.k), filtered)

    return _evaluate("sasrec", "sasrec", 0.0, slates, data, options, began)


def _evaluate(
    model: str,
    strategy: str,
    dense_weight: float,
    slates: Callable[[Ints, bool], Ints],
    data: EvaluationData,
    options: EvaluationOptions,
    began: float,
    scoring: Scoring | None = None,
) -> Evaluation:
    """Makes the slates of both columns and measures them."""
    cases, columns, intervals, made = data.cases, {}, {}, {}
    for column in COLUMNS:
        shown = f"{strategy}, seen items {column}"
        made[column] = make_slates(cases, slates, column == "filtered", data.training.batch, shown)
        values = user_metrics(ranks_of(made[column], cases.held), options.k)
        columns[column] = {name: float(value.mean()) for name, value in values.items()}
        intervals[column] = {name: mean_interval(value) for name, value in values.items()}
    return Evaluation(
        model=model,
        strategy=strategy,
        split=options.split,
        users=len(cases),
        width=options.width,
        dense_weight=dense_weight,
        scoring=None if scoring is None else asdict(scoring),
        columns=columns,
        intervals=intervals,
        seconds=time.monotonic() - began,
        slates=made,
    )
