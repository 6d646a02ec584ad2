"""Measures the ranker's quality on real events: AUC and GAUC against baselines, and ablations.

    python -m benchmarks.rank.quality --data amazon-beauty --variants default

Leave-one-out: the last event of each user is ranked against 99 sampled items that the user never
had. The items are sampled uniformly, and again by popularity to the power 0.75, where popularity
alone predicts little. Item vectors are those of `recserve build`: text joined with collaborative
vectors of the training events. Prints training time, AUC and GAUC for each variant.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from rich.console import Console

from recserve.features.ranking.cross_features import CROSS_COLUMNS
from recserve.features.ranking.ranking_tables import RankingTables
from recserve.features.tables.event_table import read_events
from recserve.features.tables.events import EventLog
from recserve.features.tables.items import ItemTable, read_items
from recserve.features.vectors.text_encoder import unit
from recserve.features.vectors.vectors import collaborative_vectors, fit_text_encoder, join_vectors
from recserve.kernels.native.processor import processor
from recserve.models.ranker import load_ranker
from recserve.training.options import TrainOptions
from recserve.training.ranker.ranker import RankerRecipe, RankerSource, fit_ranker
from recserve.training.ranker.ranking_data import HeldOut, cross_fitted_vectors
from recserve.training.ranker.ranking_quality import conversion_words, ranking_quality

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "no cross features": {"ignored": CROSS_COLUMNS},
    "no attention": {"normalizer": 1e9},
    "no item ids": {"id_dropout": 0.999999},
    "all item ids": {"id_dropout": 0.0},
    "one layer": {"num_layers": 1},
    "wide": {"hidden_size": 128},
    "eight negatives": {"negatives": 8},
    "text vectors": {},
    "vectors know the answers": {},
}


def read(folder: Path) -> tuple[ItemTable, EventLog]:
    """Returns items and events; a column `rating` becomes the event's value."""
    items, _ = read_items(folder / "items.parquet")
    table = pq.read_table(folder / "events.parquet")
    names = ["value" if name == "rating" else name for name in table.column_names]
    with tempfile.TemporaryDirectory() as scratch:
        pq.write_table(table.rename_columns(names), Path(scratch) / "events.parquet")
        log, _ = read_events(Path(scratch) / "events.parquet", items, "skip")
    return items, log


def measure(
    name: str, items: ItemTable, log: EventLog, options: TrainOptions, max_users: int
) -> dict[str, Any]:
    """Trains one variant and ranks the test events."""
    vectors = fit_text_encoder(items, 128, options.seed).encode(items)
    fold_vectors: list[np.ndarray] = []
    if name != "text vectors":
        train = log.leave_one_out().train
        together = collaborative_vectors(train, len(items), 128, options.seed)
        vectors = join_vectors(unit(vectors), together, 1.0)
        if name != "vectors know the answers":
            fold_vectors = cross_fitted_vectors(vectors, train, 128, 1.0, options.seed)
    recipe = replace(RankerRecipe(), **VARIANTS[name])
    with tempfile.TemporaryDirectory() as folder:
        source = RankerSource(log, items, vectors, fold_vectors)
        report = fit_ranker(source, Path(folder), options, recipe, Console())
        tables = RankingTables.load(folder, items, vectors)
        model = load_ranker(folder, vectors)
    users = np.flatnonzero(log.leave_one_out().test_rows >= 0)
    users = np.sort(np.random.default_rng(1).permutation(users)[:max_users])
    began = time.monotonic()
    found = {
        kind: asdict(
            ranking_quality(model, tables, log, users, HeldOut(1, seed=1, popular_share=share))
        )
        for kind, share in (("uniform", 0.0), ("popular", 1.0))
    }
    return found | {
        "variant": name,
        "conversion": conversion_words(tables.settings),
        "train_s": round(report.seconds, 1),
        "best_epoch": report.best_epoch,
        "evaluate_s": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with items.parquet and events.parquet"
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        default=["default"],
        choices=list(VARIANTS),
        help="variants of the ranker to train",
    )
    parser.add_argument("--epochs", type=int, help="training epochs; default: the recipe's own")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument("--users", type=int, default=1_000_000, help="maximum number of test users")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    items, log = read(given.data)
    options = TrainOptions(epochs=given.epochs, seed=given.seed)
    print(
        f"{given.data.name}: {log.num_users} users, {len(items)} items, {log.num_events} events; "
        f"torch {torch.__version__}, {processor().name}, "
        f"{given.threads} threads, device {options.torch_device()}, seed {given.seed}"
    )
    results = []
    for name in given.variants:
        results.append(measure(name, items, log, options, given.users))
        show(results[-1])
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))


def show(result: dict[str, Any]) -> None:
    print(f"{result['variant']}: {result['train_s']} s, best epoch {result['best_epoch']}")
    for kind in ("uniform", "popular"):
        values = result[kind]["metrics"] | result[kind]["baselines"]
        print(f"  {kind:8}" + "".join(f" {name} {value:.4f}" for name, value in values.items()))


if __name__ == "__main__":
    main()
