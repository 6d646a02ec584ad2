"""A bundle's model beside popularity and SASRec, on the same users and with the same metrics."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from recserve.bundle.bundle import Bundle
from recserve.models.sasrec import SasRec
from recserve.training.evaluation.evaluation import (
    Evaluation,
    EvaluationOptions,
    evaluate_bundle,
    evaluate_sasrec,
    sasrec_of,
)
from recserve.training.options import TrainOptions
from recserve.training.recommender.sasrec import PLAIN, SasRecRecipe, fit_sasrec


@dataclass(frozen=True)
class BaselineComparison:
    """A model's evaluation beside those of the baselines.

    Attributes:
        model: The evaluated model.
        baselines: Evaluations of the baselines, by label.
        trained: True if SASRec was trained for this comparison.
        seconds: Duration, with training.
    """

    model: Evaluation
    baselines: dict[str, Evaluation]
    trained: bool
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Returns the model's evaluation as a JSON-ready dictionary, with those of the baselines
        under `baselines`.
        """
        baselines = {label: found.to_dict() for label, found in self.baselines.items()}
        return asdict(self.model) | {"baselines": baselines, "seconds": self.seconds}

    def __rich__(self) -> Table:
        model = self.model
        table = Table(title=f"{model.split}, {model.users} users", title_justify="left")
        table.add_column("model")
        table.add_column("seen items")
        rows = {f"{model.model}, {model.strategy}": model} | self.baselines
        names = list(next(iter(model.columns.values())))
        for name in names:
            table.add_column(name, justify="right")
        for label, found in rows.items():
            for column, metrics in found.columns.items():
                table.add_row(label, column, *(f"{metrics[name]:.4f}" for name in names))
        return table

    def __str__(self) -> str:
        console = Console(width=100, color_system=None)
        with console.capture() as capture:
            console.print(self)
            if self.trained:
                console.print(
                    "SASRec was trained for this table and dropped; "
                    "`recserve train sasrec --ids-only` keeps it in the bundle.",
                    soft_wrap=True,
                )
        return capture.get().rstrip()


def compare_with_baselines(
    bundle: Bundle,
    options: EvaluationOptions,
    recipe: SasRecRecipe = PLAIN,
    console: Console | None = None,
) -> BaselineComparison:
    """Evaluates a bundle's model, popularity and SASRec.

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
    baselines: dict[str, Evaluation] = {}
    trained = False
    if model.model != "popularity":
        popularity = EvaluationOptions(
            options.split, "popularity", options.k, options.width, None, options.users
        )
        baselines["popularity"] = evaluate_bundle(bundle, popularity)
    if model.model != "sasrec":
        trained = not bundle.has("sasrec")
        sasrec = (
            _train(bundle, options, recipe, console)
            if trained
            else sasrec_of(bundle, options.device)
        )
        inputs = "ids and item vectors" if sasrec.config.vector_dim else "ids"
        baselines[f"sasrec, {inputs}"] = evaluate_sasrec(sasrec, bundle.events(), options)
    return BaselineComparison(model, baselines, trained, time.monotonic() - began)


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
