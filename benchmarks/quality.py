"""Train and evaluate every model of docs/quality.md and write its table and its plot.

    OMP_NUM_THREADS=1 python benchmarks/quality.py --data ../shared/data/amazon-beauty --work
    /tmp/quality

`--data` holds items.parquet and events.parquet; `--work` keeps one bundle per model, so that a
second call evaluates without training again. `--models` names some of them. The figures of all of
them also land in `quality.json`, with machine, versions, seed and minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from recserve.building import BuildOptions, build_bundle
from recserve.bundle import Bundle
from recserve.training.evaluate import evaluate_bundle
from recserve.training.options import TrainOptions, TrainReport
from recserve.training.recommender import CODES, ITEMS, ITEMS_KEPT, train_recommender
from recserve.training.sasrec import PLAIN, VECTORS, train_sasrec

CUTOFFS = (5, 10)
METRICS = ("ndcg@5", "ndcg@10", "recall@5", "recall@10")
PUBLISHED = {"TIGER": 0.0384, "RPG": 0.0464}

Train = Callable[[Bundle, TrainOptions], TrainReport]


@dataclass(frozen=True)
class Entry:
    """A model, how it is trained, and each way its slates are made: name -> (strategy, dense
    weight)."""

    label: str
    train: Train
    ways: dict[str, tuple[str, float | None]]


ENTRIES = {
    "sasrec": Entry(
        "SASRec-CE, ids",
        lambda bundle, options: train_sasrec(bundle, options, PLAIN),
        {"all items": ("sasrec", None)},
    ),
    "sasrec-vectors": Entry(
        "SASRec-CE, cosine, vectors, seen masked",
        lambda bundle, options: train_sasrec(bundle, options, VECTORS),
        {"all items": ("sasrec", None)},
    ),
    "codes": Entry(
        "recommender, `codes`",
        lambda bundle, options: train_recommender(bundle, options, CODES),
        {"beam 50": ("beam", None)},
    ),
    "items": Entry(
        "recommender, `items` (default)",
        lambda bundle, options: train_recommender(bundle, options, ITEMS),
        {
            "beam 50": ("beam", 0.0),
            "beam 50 + dense": ("beam", None),
            "dense head": ("dense", None),
        },
    ),
    "items-kept": Entry(
        "recommender, `items`, seen items kept in training",
        lambda bundle, options: train_recommender(bundle, options, ITEMS_KEPT),
        {
            "beam 50": ("beam", 0.0),
            "beam 50 + dense": ("beam", None),
            "dense head": ("dense", None),
        },
    ),
}


def measure(
    entry: Entry, bundle: Bundle, options: TrainOptions, users: int | None
) -> dict[str, Any]:
    """Train where that is not done, evaluate on the test split, and return what the table needs."""
    name = "sasrec" if "sasrec" in next(iter(entry.ways.values()))[0] else "recommender"
    if not bundle.has(name):
        entry.train(bundle, options)
    trained = bundle.manifest.sections[name]
    ways = {}
    for way, (strategy, weight) in entry.ways.items():
        found = evaluate_bundle(bundle, "test", strategy, CUTOFFS, dense_weight=weight, users=users)
        print(found)
        ways[way] = found.to_dict()
    kept = {key: trained[key] for key in ("seed", "epochs", "best_epoch", "seconds", "validation")}
    return {"label": entry.label, "trained": kept, "ways": ways}


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """The table of docs/quality.md: a row per model and way, both columns."""
    heads = [f"{name.upper()} {column}" for column in ("kept", "filtered") for name in METRICS]
    lines = ["| model | slates | minutes | " + " | ".join(heads) + " |"]
    lines.append("|" + " --- |" * (3 + len(heads)))
    for result in results.values():
        minutes = result["trained"]["seconds"] / 60
        for way, found in result["ways"].items():
            columns = found["columns"]
            cells = [f"{columns[c][m]:.4f}" for c in ("kept", "filtered") for m in METRICS]
            lines.append(
                f"| {result['label']} | {way} | {minutes:.1f} | " + " | ".join(cells) + " |"
            )
    return "\n".join(lines)


def plot(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Bars of NDCG@10 on test, both columns, with the published figures as lines."""
    rows = [
        (f"{result['label'].replace('`', '')}, {way}", found["columns"])
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
        axes.text(value, len(rows) - 0.4, f" {name}", fontsize=8, color="gray")
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    axes.set_xlabel("NDCG@10 on test")
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=110)


def machine() -> dict[str, Any]:
    """What the minutes were measured on."""
    return {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=list(ENTRIES), default=list(ENTRIES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, help="instead of the recipes' own")
    parser.add_argument("--users", type=int, help="evaluate that many users instead of all")
    parser.add_argument("--plot", type=Path, help="where the picture goes")
    given = parser.parse_args()
    built = given.work / "built"
    if not built.exists():
        build_bundle(
            BuildOptions(given.data / "items.parquet", given.data / "events.parquet", built)
        )
    options = TrainOptions(epochs=given.epochs, seed=given.seed)
    results = {}
    for name in given.models:
        folder = given.work / f"{name}-{given.seed}"
        if not folder.exists():
            shutil.copytree(built, folder)
        results[name] = measure(ENTRIES[name], Bundle.open(folder), options, given.users)
        report = {"machine": machine(), "options": asdict(options), "results": results}
        (given.work / "quality.json").write_text(json.dumps(report, indent=1) + "\n")
    print(markdown(results))
    plot(results, given.plot or given.work / "quality.png")


if __name__ == "__main__":
    main()
