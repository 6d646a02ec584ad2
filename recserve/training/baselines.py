"""A bundle's model beside the baselines, on the same users and with the same metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from recserve.bundle.bundle import Bundle
from recserve.evaluation.accuracy import ranks_of, user_metrics
from recserve.evaluation.evaluation import (
    COLUMNS,
    Evaluation,
    EvaluationData,
    EvaluationOptions,
    evaluate_bundle,
    evaluate_sasrec,
    evaluate_untrained,
)
from recserve.evaluation.intervals import (
    DIFFERENCE_METHOD,
    MEAN_METHOD,
    Figure,
    difference_interval,
)
from recserve.evaluation.untrained import UNTRAINED, UnsuitableEvents
from recserve.models.sasrec import SasRec, load_sasrec
from recserve.training.options import TrainOptions
from recserve.training.recommender.sasrec import PLAIN, SasRecRecipe, fit_sasrec


def model_lead(
    model: Evaluation,
    other: Evaluation,
    data: EvaluationData,
    column: str,
    inside: NDArray[np.bool_] | None = None,
) -> dict[str, Figure]:
    """Returns how far the model is ahead of another one on the same users, by metric.

    Args:
        model: Evaluation of the model.
        other: Evaluation of the other one.
        data: The cases of both.
        column: `kept` or `filtered`.
        inside: [n] which cases count; None means all.
    """
    cutoffs = cutoffs_of(model)
    users = slice(None) if inside is None else inside
    held = data.cases.held
    ours, theirs = (
        user_metrics(ranks_of(found.slates[column], held)[users], cutoffs)
        for found in (model, other)
    )
    leads = {}
    for name, values in ours.items():
        differences = values - theirs[name]
        leads[name] = Figure(float(differences.mean()), *difference_interval(differences))
    return leads


def cutoffs_of(evaluation: Evaluation) -> tuple[int, ...]:
    """Returns the cut-offs of an evaluation's metrics."""
    names = next(iter(evaluation.columns.values()))
    return tuple(int(name.split("@")[1]) for name in names if name.startswith("recall@"))


@dataclass(frozen=True)
class BaselineComparison:
    """A model's evaluation beside those of the baselines.

    Attributes:
        model: The evaluated model.
        baselines: Evaluations of the baselines, by label.
        omitted: Why a baseline is missing, by label.
        data: The evaluated cases.
        trained: True if SASRec was trained for this comparison.
        seconds: Duration, with training.
    """

    model: Evaluation
    baselines: dict[str, Evaluation]
    omitted: dict[str, str]
    data: EvaluationData
    trained: bool
    seconds: float

    @property
    def label(self) -> str:
        """What tables call the model."""
        model = self.model
        return (
            UNTRAINED[model.model].label
            if model.model in UNTRAINED
            else (
                f"{model.model}, {model.strategy}" if model.model != model.strategy else model.model
            )
        )

    def leads(self, label: str) -> dict[str, dict[str, Figure]]:
        """Returns how far the model is ahead of a baseline, by column and metric."""
        other = self.baselines[label]
        return {column: model_lead(self.model, other, self.data, column) for column in COLUMNS}

    def to_dict(self) -> dict[str, Any]:
        """Returns the model's evaluation as a JSON-ready dictionary, with those of the baselines
        under `baselines`.
        """
        baselines = {
            label: found.to_dict()
            | {
                "model_ahead": {
                    column: {name: vars(lead) for name, lead in leads.items()}
                    for column, leads in self.leads(label).items()
                }
            }
            for label, found in self.baselines.items()
        }
        return self.model.to_dict() | {
            "baselines": baselines,
            "omitted": self.omitted,
            "difference_method": f"95 % {DIFFERENCE_METHOD}",
            "seconds": self.seconds,
        }

    def __rich__(self) -> Table:
        model = self.model
        table = Table(title=f"{model.split}, {model.users} users", title_justify="left")
        table.add_column("model")
        table.add_column("seen items")
        names = list(model.columns[COLUMNS[0]])
        for name in names:
            table.add_column(name, justify="right")
        table.add_column(f"model ahead by\n{names[-1]}", justify="right")
        for label, found in ({self.label: model} | self.baselines).items():
            leads = self.leads(label) if label in self.baselines else None
            for column in found.columns:
                lead = leads[column][names[-1]] if leads else None
                shown = f"{lead.value:+.4f}\n{lead.low:+.4f} to {lead.high:+.4f}" if lead else ""
                table.add_row(label, column, *found.cells(column), shown)
        return table

    def __str__(self) -> str:
        console = Console(width=140, color_system=None)
        with console.capture() as capture:
            console.print(self)
            for line in self.notes():
                console.print(line, soft_wrap=True)
        return capture.get().rstrip()

    def notes(self) -> list[str]:
        """Returns what a reader must know of the table."""
        lines = [
            f"below each figure: its 95 % interval ({MEAN_METHOD}; "
            f"differences: {DIFFERENCE_METHOD})",
            *(f"{label} is left out: {reason}" for label, reason in self.omitted.items()),
        ]
        if self.trained:
            lines.append(
                "SASRec was trained for this table and dropped; "
                "`recserve train sasrec --ids-only` keeps it in the bundle."
            )
        return lines


def compare_with_baselines(
    bundle: Bundle,
    options: EvaluationOptions,
    recipe: SasRecRecipe = PLAIN,
    console: Console | None = None,
) -> BaselineComparison:
    """Evaluates a bundle's model and all baselines.

    SASRec is the bundle's. A bundle without one is not changed: a SASRec of ids alone is trained in
    a temporary folder.

    Args:
        bundle: The bundle with the model and the events.
        options: What is evaluated.
        recipe: Recipe of a SASRec that is trained.
        console: Where the progress of training is printed; None means standard error.

    Raises:
        BundleError: If the model, or what its strategy needs, was not trained.
    """
    began = time.monotonic()
    model = evaluate_bundle(bundle, options)  # fails before minutes of training
    data = EvaluationData.open(bundle, options)
    baselines: dict[str, Evaluation] = {}
    omitted: dict[str, str] = {}
    for name, untrained in UNTRAINED.items():
        if name == model.model:
            continue
        try:
            baselines[untrained.label] = evaluate_untrained(name, data, options)
        except UnsuitableEvents as missing:
            omitted[untrained.label] = str(missing)
    trained = model.model != "sasrec" and not bundle.has("sasrec")
    if model.model != "sasrec":
        sasrec = (
            _train(bundle, options, recipe, console)
            if trained
            else load_sasrec(
                bundle.directory("sasrec"), torch.from_numpy(data.catalog.vectors), options.device
            )
        )
        inputs = "ids and item vectors" if sasrec.config.vector_dim else "ids"
        baselines[f"sasrec, {inputs}"] = evaluate_sasrec(sasrec, data, options)
    seconds = time.monotonic() - began
    return BaselineComparison(model, baselines, omitted, data, trained, seconds)


def _train(
    bundle: Bundle, options: EvaluationOptions, recipe: SasRecRecipe, console: Console | None
) -> SasRec:
    console = console or Console(stderr=True)
    console.print("the bundle has no SASRec; training one for this comparison")
    kind = "cuda" if torch.device(options.device).type == "cuda" else "cpu"
    with TemporaryDirectory() as folder:
        model, _ = fit_sasrec(
            bundle,
            TrainOptions(device=kind),  # type: ignore[arg-type]
            recipe,
            Path(folder) / "sasrec",
            console,
        )
    return model
