"""The audit card of a bundle: the model beside baselines, by kind of user and of item.

recserve evaluate --bundle B --card [--time-split] [--json F] [--markdown F] [--plot F]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Picture
from numpy.typing import NDArray

from recserve.bundle.bundle import Bundle
from recserve.evaluation.accuracy import ranks_of, user_metrics
from recserve.evaluation.evaluation import COLUMNS, Evaluation, EvaluationData
from recserve.evaluation.intervals import (
    COVERAGE_METHOD,
    DIFFERENCE_METHOD,
    MEAN_METHOD,
    Figure,
    coverage,
    mean_interval,
)
from recserve.features.catalog.catalog import Catalog
from recserve.training.baselines import BaselineComparison, cutoffs_of, model_lead
from recserve.training.time_split import TimeSplit

COLD_EVENTS = 5
# Users, items and events of Amazon Beauty 2014, 5-core, which the published figures are of.
BEAUTY = (22_363, 12_101, 198_502)


@dataclass(frozen=True)
class Published:
    """A published recommender.

    Attributes:
        model: Its name.
        column: `kept`, `filtered` or `not known`: the column that its figures compare with.
        source: How the column is known.
        beauty: NDCG@10 on Amazon Beauty, leave-one-out, all items ranked; None if it is not known.
    """

    model: str
    column: str
    source: str
    beauty: float | None


MASKS_NONE, MASKS = "its code masks no visited items", "its evaluation filters visited items"
PUBLISHED = (
    Published("RPG, OpenAI's item vectors", "kept", MASKS_NONE, 0.0464),
    Published("RPG, public item vectors", "kept", MASKS_NONE, 0.0437),
    Published("ActionPiece, an ensemble of five", "kept", MASKS_NONE, 0.0424),
    Published("GRLM", "kept", MASKS_NONE, None),
    Published("LETTER", "kept", MASKS_NONE, None),
    Published("genrec", "kept", MASKS_NONE, None),
    Published("TIGER, best reproduction on test", "kept", MASKS_NONE, 0.0353),
    Published("TIGER, its paper", "not known", "the paper does not say", 0.0384),
    Published("HSTU, as quoted beside TIGER", "not known", "the paper does not say", 0.0389),
    Published("eSASRec's SASRec with sampled softmax", "filtered", MASKS, 0.0531),
    Published("transformer_benchmark", "filtered", MASKS, None),
)


@dataclass(frozen=True)
class Group:
    """Users that are measured by themselves.

    Attributes:
        definition: Which users they are.
        users: Number of evaluated users.
    """

    definition: str
    users: int


@dataclass(frozen=True)
class CardColumn:
    """Figures of one model and one treatment of seen items.

    Attributes:
        metrics: Recall and NDCG.
        coverage: Share of the catalogue that occurs in a slate.
        model_ahead: How far the card's model is ahead, by metric; empty for the model itself.
        groups: Recall and NDCG at the largest cut-off, by group; empty for a group without users.
        model_ahead_in_groups: How far the card's model is ahead, by group and metric.
    """

    metrics: dict[str, Figure]
    coverage: Figure
    model_ahead: dict[str, Figure]
    groups: dict[str, dict[str, Figure]]
    model_ahead_in_groups: dict[str, dict[str, Figure]]


@dataclass(frozen=True)
class Collisions:
    """Items that share the codes of the quantiser, which a last level tells apart.

    Attributes:
        items: Share of the items. It counts the whole catalogue, so it has no interval.
        largest: Most items on one tuple of codes.
        held_out: Share of the held-out items.
    """

    items: float
    largest: int
    held_out: Figure


@dataclass(frozen=True)
class Card:
    """The audit card.

    Attributes:
        model: Label of the bundle's model, the first of `rows`.
        model_version: Version of the bundle's models.
        catalog_version: Version of the bundle's catalogue.
        split: `valid` or `test`.
        time_split: How the model was trained on the past only; None for leave-one-out.
        items: Number of items.
        cutoffs: Cut-offs of the metrics; the last one is the length of the slates.
        users: Number of evaluated users.
        rows: Figures by label and column.
        omitted: Why a baseline is missing, by label.
        groups: Groups of users by name.
        collisions: Collisions of semantic ids.
        published: Published recommenders, and the column that their figures belong to.
        is_beauty: True if the events have the size of Amazon Beauty.
        methods: How intervals are computed, by kind of figure.
        notes: What a reader must know.
        seconds: Duration.
    """

    model: str
    model_version: str
    catalog_version: str
    split: str
    time_split: TimeSplit | None
    items: int
    cutoffs: tuple[int, ...]
    users: int
    rows: dict[str, dict[str, CardColumn]]
    omitted: dict[str, str]
    groups: dict[str, Group]
    collisions: Collisions
    published: tuple[Published, ...]
    is_beauty: bool
    methods: dict[str, str]
    notes: list[str]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Returns the card as a JSON-ready dictionary."""
        return asdict(self)

    def to_markdown(self) -> str:
        """Returns the card as Markdown."""
        names = list(self.rows[self.model]["kept"].metrics)
        last = self.cutoffs[-1]
        parts = [
            "# Audit card",
            "",
            f"Model {self.model_version} ({self.model}), catalogue {self.catalog_version}: "
            f"{self.items:,} items, {self.users:,} users, split `{self.split}`. All items are "
            "ranked.",
            "",
            str(self.time_split)
            if self.time_split
            else "Leave-one-out: other users' events after "
            "a held-out event are in the training. `--time-split` trains on the past only.",
            "",
            "Slates of **kept** may contain items of the history; slates of **filtered** may not. "
            "Brackets hold 95 % intervals.",
            "",
            _line(["model", "seen items", *names, f"coverage@{last}", f"model ahead, {names[-1]}"]),
            _line(["---"] * (len(names) + 4)),
        ]
        for label, columns in self.rows.items():
            for column, found in columns.items():
                ahead = found.model_ahead.get(names[-1], "")
                cells = [*map(str, found.metrics.values()), str(found.coverage), str(ahead)]
                parts.append(_line([label, column, *cells]))
        parts += [
            "",
            f"## {names[-1]} by user and item",
            "",
            _line(["model", "seen items", *self.groups]),
            _line(["---"] * (len(self.groups) + 2)),
        ]
        for label, columns in self.rows.items():
            for column, found in columns.items():
                cells = [str(found.groups[name].get(names[-1], "no users")) for name in self.groups]
                parts.append(_line([label, column, *cells]))
        parts.append("")
        for name, group in self.groups.items():
            parts.append(f"- {name}: {group.definition}; {group.users:,} users")
        clash = self.collisions
        parts += [
            "",
            "## Collisions",
            "",
            f"{clash.items:.1%} of the items share their codes, at most {clash.largest} on one "
            f"tuple; of the held-out items {clash.held_out}. A last level tells them apart, so "
            "that a hit is the item itself.",
            "",
            "## Published figures",
            "",
            "A published figure compares with one column only."
            + ("" if self.is_beauty else " The values are of Amazon Beauty, not of these events."),
            "",
            _line(["published", "column", "why", "NDCG@10 on Amazon Beauty"]),
            _line(["---"] * 4),
        ]
        for one in self.published:
            value = "" if one.beauty is None else f"{one.beauty:.4f}"
            parts.append(_line([one.model, one.column, one.source, value]))
        parts += ["", "## Notes", ""]
        parts += [f"- {kind}: {method}" for kind, method in self.methods.items()]
        parts += [f"- {note}" for note in self.notes]
        parts += [f"- {label} is left out: {reason}" for label, reason in self.omitted.items()]
        return "\n".join(parts)

    def save_plot(self, path: Path) -> None:
        """Writes a PNG: NDCG of all models, and NDCG by user and item, with intervals."""
        metric = list(self.rows[self.model]["kept"].metrics)[-1]
        labels = list(self.rows)
        picture = Picture(figsize=(13, 0.55 * len(labels) + 1.8), layout="constrained")
        FigureCanvasAgg(picture)
        overall, parts = picture.subplots(1, 2, width_ratios=(2, 3))
        for shift, column in ((-0.2, "kept"), (0.2, "filtered")):
            figures = [self.rows[label][column].metrics[metric] for label in labels]
            places = [place + shift for place in range(len(labels))]
            _draw(overall, figures, places, 0.4, f"seen items {column}")
        shown = [name for name, group in self.groups.items() if group.users]
        height = 0.8 / max(1, len(shown))
        for number, name in enumerate(shown):
            figures = [self.rows[label]["filtered"].groups[name][metric] for label in labels]
            places = [place - 0.4 + height * (number + 0.5) for place in range(len(labels))]
            _draw(parts, figures, places, height, name)
        overall.set_yticks(range(len(labels)), [fill(label, 26) for label in labels], fontsize=8)
        parts.set_yticks(range(len(labels)), [""] * len(labels))
        for axes, title in (
            (overall, f"{self.split}, {self.users:,} users"),
            (parts, "seen items filtered, by user and by held-out item"),
        ):
            axes.invert_yaxis()
            axes.set_xlim(left=0)
            axes.set_title(title, fontsize=10)
            axes.set_xlabel(f"{metric} with its 95 % interval")
            axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=5)
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.savefig(path, dpi=110)


def _draw(axes: Any, figures: list[Figure], places: list[float], height: float, name: str) -> None:
    """Draws horizontal bars with the intervals of their figures."""
    values = [figure.value for figure in figures]
    errors = [
        [max(0.0, figure.value - figure.low) for figure in figures],
        [max(0.0, figure.high - figure.value) for figure in figures],
    ]
    axes.barh(places, values, height, xerr=errors, label=name, error_kw={"elinewidth": 0.8})


def _line(cells: list[str]) -> str:
    """Returns a line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def make_card(
    bundle: Bundle, compared: BaselineComparison, time_split: TimeSplit | None = None
) -> Card:
    """Makes the card of a model from its comparison with the baselines.

    Args:
        bundle: The evaluated bundle.
        compared: The comparison.
        time_split: How the bundle was trained on the past only; None for leave-one-out.
    """
    data = compared.data
    members = group_members(data)
    rows = {
        label: {column: _column(compared, found, column, members) for column in COLUMNS}
        for label, found in ({compared.label: compared.model} | compared.baselines).items()
    }
    sizes = (data.events.num_users, len(data.catalog), data.events.num_events)
    notes = compared.notes()[1 + len(compared.omitted) :]
    return Card(
        model=compared.label,
        model_version=bundle.manifest.model_version,
        catalog_version=bundle.manifest.catalog_version,
        split=compared.model.split,
        time_split=time_split,
        items=len(data.catalog),
        cutoffs=cutoffs_of(compared.model),
        users=len(data.cases),
        rows=rows,
        omitted=compared.omitted,
        groups={
            name: Group(definition, int(inside.sum()))
            for name, (definition, inside) in members.items()
        },
        collisions=count_collisions(data.catalog, data.cases.held),
        published=PUBLISHED,
        is_beauty=sizes == BEAUTY,
        methods={
            "recall and NDCG": f"95 % {MEAN_METHOD}",
            "model ahead": f"95 % {DIFFERENCE_METHOD}",
            "coverage": f"95 % {COVERAGE_METHOD}; it grows with the number of users",
            "all intervals": "they cover other users, not another seed of training",
        },
        notes=notes,
        seconds=compared.seconds,
    )


def _column(
    compared: BaselineComparison,
    found: Evaluation,
    column: str,
    members: Mapping[str, tuple[str, NDArray[np.bool_]]],
) -> CardColumn:
    """Returns the figures of one model in one column."""
    data, model, slates = compared.data, compared.model, found.slates[column]
    last = cutoffs_of(model)[-1:]
    share, bounds = coverage(slates, len(data.catalog))
    ranks = ranks_of(slates, data.cases.held)
    groups: dict[str, dict[str, Figure]] = {}
    ahead: dict[str, dict[str, Figure]] = {}
    for name, (_, inside) in members.items():
        groups[name], ahead[name] = {}, {}
        if not inside.any():
            continue
        values = user_metrics(ranks[inside], last)
        for metric, value in values.items():
            groups[name][metric] = Figure(float(value.mean()), *mean_interval(value))
        if found is not model:
            leads = model_lead(model, found, data, column, inside)
            ahead[name] = {metric: leads[metric] for metric in values}
    return CardColumn(
        metrics={
            name: Figure(value, *found.intervals[column][name])
            for name, value in found.columns[column].items()
        },
        coverage=Figure(share, *bounds),
        model_ahead={} if found is model else model_lead(model, found, data, column),
        groups=groups,
        model_ahead_in_groups=ahead,
    )


def group_members(data: EvaluationData) -> dict[str, tuple[str, NDArray[np.bool_]]]:
    """Returns the definition of each group, and the mask [n] of its cases.

    Items are ordered by training events. Head, torso and tail have about a third of the events
    each.
    """
    cases = data.cases
    lengths = cases.stops - cases.starts
    counts = data.training.train.counts(len(data.catalog)).astype(np.float64)
    order = np.argsort(-counts, kind="stable")
    before = np.empty(len(counts))  # events of the more popular items
    before[order] = np.cumsum(counts[order]) - counts[order]
    part = np.minimum(3 * before / max(counts.sum(), 1.0), 2).astype(np.int64)
    part[counts == 0] = 2
    held = part[cases.held]
    sizes = np.bincount(part, minlength=3)
    unseen = int((counts[cases.held] == 0).sum())
    third = "of the training events"
    return {
        "cold users": (f"a history of at most {COLD_EVENTS} events", lengths <= COLD_EVENTS),
        "warm users": (f"a history of more than {COLD_EVENTS} events", lengths > COLD_EVENTS),
        "head items": (
            f"the held-out item is one of the {sizes[0]:,} most popular, with a third {third}",
            held == 0,
        ),
        "torso items": (
            f"it is one of the next {sizes[1]:,}, with the second third {third}",
            held == 1,
        ),
        "tail items": (
            f"it is one of the other {sizes[2]:,}; {unseen:,} of these users have an item "
            "without a training event",
            held == 2,
        ),
    }


def count_collisions(catalog: Catalog, held: NDArray[np.int64]) -> Collisions:
    """Counts the items that share the codes of the quantiser.

    Args:
        catalog: The catalogue.
        held: [n] held-out item rows.
    """
    index = catalog.semantic_ids
    codes = index.codes[:, :-1] if index.has_disambiguation else index.codes
    _, tuples, sizes = np.unique(codes, axis=0, return_inverse=True, return_counts=True)
    shared = sizes[tuples.reshape(-1)] > 1
    inside = shared[held].astype(np.float64)
    found = Figure(float(inside.mean()), *mean_interval(inside))
    return Collisions(float(shared.mean()), int(sizes.max()), found)
