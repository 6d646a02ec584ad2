"""Trains and evaluates every model of docs/results/quality.md, and writes its table and plot.

    OMP_NUM_THREADS=1 python -m benchmarks.recommend.quality --data DIR --work /tmp/quality

`--data` is a folder with items.parquet and events.parquet. `--work` receives one bundle per model,
so that a second call evaluates without training again. `--models` selects some of the models.
Prints the table in Markdown. Writes the figures to `quality.json`, with machine, versions, seed and
minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from recserve.bundle.building import BuildOptions, build_bundle
from recserve.bundle.bundle import Bundle
from recserve.evaluation.evaluation import (
    BASELINES,
    EvaluationOptions,
    evaluate_bundle,
)
from recserve.evaluation.untrained import UNTRAINED
from recserve.kernels.native.processor import processor
from recserve.training.options import TrainOptions, TrainReport
from recserve.training.recommender.recommender import CODES, ITEMS, ITEMS_MASKED, train_recommender
from recserve.training.recommender.sasrec import PLAIN, VECTORS, train_sasrec

CUTOFFS = (5, 10)
WIDTH = 50
METRICS = ("ndcg@5", "ndcg@10", "recall@5", "recall@10")
# NDCG@10 with seen items kept.
PUBLISHED = {"TIGER, reproduced": 0.0353, "RPG": 0.0437}

Columns = dict[str, dict[str, float]]
Train = Callable[[Bundle, TrainOptions], TrainReport]


@dataclass(frozen=True)
class Entry:
    """A model and how it is trained; `dense` is True if it has a dense head to rerank with.

    An untrained baseline has its strategy as section, and None as training.
    """

    label: str
    section: str
    train: Train | None
    dense: bool = False


ENTRIES = {
    name: Entry(UNTRAINED[name].label, name, None)
    for name in ("popularity", "item_knn", "transitions_2", "transitions_3")
} | {
    "sasrec": Entry(
        "SASRec, ids", "sasrec", lambda bundle, options: train_sasrec(bundle, options, PLAIN)
    ),
    "sasrec-vectors": Entry(
        "SASRec-CE, cosine, vectors, seen masked",
        "sasrec",
        lambda bundle, options: train_sasrec(bundle, options, VECTORS),
    ),
    "codes": Entry(
        "recommender, `codes`",
        "recommender",
        lambda bundle, options: train_recommender(bundle, options, CODES),
    ),
    "items": Entry(
        "recommender, `items` (default)",
        "recommender",
        lambda bundle, options: train_recommender(bundle, options, ITEMS),
        dense=True,
    ),
    "items-tied": Entry(
        "recommender, `items`, tied head, input not scaled",
        "recommender",
        lambda bundle, options: train_recommender(
            bundle, options, replace(ITEMS, tied=True, scale_input=False)
        ),
        dense=True,
    ),
    "items-masked": Entry(
        "recommender, `items`, seen items masked in training",
        "recommender",
        lambda bundle, options: train_recommender(bundle, options, ITEMS_MASKED),
        dense=True,
    ),
}


def measure(
    entry: Entry, bundle: Bundle, options: TrainOptions, users: int | None
) -> dict[str, Any]:
    """Trains a model unless it is trained, evaluates it on test, and returns its data."""
    if entry.train is not None and not bundle.has(entry.section):
        entry.train(bundle, options)
    recorded = bundle.manifest.sections.get(entry.section, {"seconds": 0.0})
    began = time.monotonic()
    if entry.section in BASELINES:
        all_items = EvaluationOptions(strategy=entry.section, k=CUTOFFS, users=users)
        ways = {"all items": evaluate_bundle(bundle, all_items).columns}
    else:
        ways = beam_ways(bundle, users)
        if entry.dense:
            dense_head = EvaluationOptions(strategy="dense_head", k=CUTOFFS, users=users)
            ways["dense head, all items"] = evaluate_bundle(bundle, dense_head).columns
    keys = ("seed", "epochs", "best_epoch", "seconds", "validation")
    kept = {key: recorded[key] for key in keys if key in recorded}
    evaluated_s = round(time.monotonic() - began, 1)
    return {"label": entry.label, "trained": kept, "evaluation_s": evaluated_s, "ways": ways}


def beam_ways(bundle: Bundle, users: int | None) -> dict[str, Columns]:
    """Returns metrics of beam search alone, and of what validation chose for `auto`."""
    alone = EvaluationOptions("test", "beam", CUTOFFS, WIDTH, dense_weight=0.0, users=users)
    ways = {f"beam {WIDTH}": evaluate_bundle(bundle, alone).columns}
    if "auto" in bundle.manifest.recommender:
        auto = EvaluationOptions("test", "auto", CUTOFFS, WIDTH, users=users)
        ways["auto"] = evaluate_bundle(bundle, auto).columns
    return ways


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """Returns the table of docs/results/quality.md, with a row per model and kind of slates."""
    heads = [f"{name.upper()} {column}" for column in ("kept", "filtered") for name in METRICS]
    lines = ["| model | slates | minutes | " + " | ".join(heads) + " |"]
    lines.append("|" + " --- |" * (3 + len(heads)))
    for result in results.values():
        minutes = result["trained"]["seconds"] / 60
        for way, found in result["ways"].items():
            cells = [f"{found[c][m]:.4f}" for c in ("kept", "filtered") for m in METRICS]
            lines.append(
                f"| {result['label']} | {way} | {minutes:.1f} | " + " | ".join(cells) + " |"
            )
    return "\n".join(lines)


def plot(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Draws bars of NDCG@10 on test for both columns, with the published figures as lines."""
    rows = [
        (f"{result['label'].replace('`', '')}, {way}", found)
        for result in results.values()
        for way, found in result["ways"].items()
    ][::-1]
    figure = Figure(figsize=(9, 0.5 * len(rows) + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for shift, column in ((0.2, "kept"), (-0.2, "filtered")):
        heights = [columns[column]["ndcg@10"] for _, columns in rows]
        axes.barh([y + shift for y in range(len(rows))], heights, 0.4, label=f"seen items {column}")
    for name, value in PUBLISHED.items():
        axes.axvline(value, color="gray", linestyle=":")
        axes.text(
            value,
            len(rows) - 0.4,
            f" {name} ",
            fontsize=8,
            color="gray",
            ha="right" if name.startswith("TIGER") else "left",
        )
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    axes.set_xlabel("NDCG@10 on test")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, fontsize=8)
    figure.savefig(path, dpi=110)


def machine() -> dict[str, Any]:
    """Returns the machine on which the minutes were measured."""
    return {
        "processor": processor().name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with items.parquet and events.parquet"
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for bundles and results")
    parser.add_argument(
        "--models",
        nargs="+",
        choices=list(ENTRIES),
        default=list(ENTRIES),
        help="models to train and evaluate",
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument("--epochs", type=int, help="epochs instead of each recipe's own")
    parser.add_argument(
        "--users", type=int, help="evaluate a sample of this size instead of all users"
    )
    parser.add_argument("--plot", type=Path, help="path of the plot")
    given = parser.parse_args()
    built = given.work / "built"
    if not built.exists():
        build_bundle(
            BuildOptions(given.data / "items.parquet", given.data / "events.parquet", built)
        )
    options = TrainOptions(epochs=given.epochs, seed=given.seed)
    results = {}
    for name in given.models:
        folder = built if name in UNTRAINED else given.work / f"{name}-{given.seed}"
        if not folder.exists():
            shutil.copytree(built, folder)
        results[name] = measure(ENTRIES[name], Bundle.open(folder), options, given.users)
        report = {"machine": machine(), "options": asdict(options), "results": results}
        (given.work / "quality.json").write_text(json.dumps(report, indent=1) + "\n")
    print(markdown(results))
    plot(results, given.plot or given.work / "quality.png")


if __name__ == "__main__":
    main()
