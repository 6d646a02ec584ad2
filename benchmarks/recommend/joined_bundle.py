"""Makes a bundle with long histories, by joining users, and trains a recommender on it.

    recserve build --items items.parquet --events events.parquet --out shop.bundle
    python -m benchmarks.recommend.joined_bundle --bundle shop.bundle --out joined.bundle
    recserve train drafter --bundle joined.bundle
    python -m benchmarks.recommend.speculative --bundle joined.bundle

Amazon Beauty has nine events per user. Two thirds of the users stay unchanged, and the others are
joined in groups of 22, with about 200 events each. The joined tastes are artificial. The shapes,
the trie and the trained weights (256 x 4) are those of a real catalogue, and the draft head is
trained on this model. Training takes about a quarter of an hour on two cores, the head ten minutes.
The script writes a bundle and prints the progress of the training.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from recserve.bundle.bundle import EVENTS, Bundle, BundleError
from recserve.features.tables.events import EventLog
from recserve.training.options import TrainOptions
from recserve.training.recommender.recommender import ITEMS, train_recommender

JOINED = 22
RECIPE = replace(
    ITEMS,
    hidden_size=256,
    num_layers=4,
    num_heads=4,
    intermediate_size=1024,
    dropout=0.2,
    max_history_items=200,
    rerank_weight=0.0,
    objective=replace(ITEMS.objective, dense_weight=0.0, heads_weight=0.0),
    schedule=replace(ITEMS.schedule, epochs=4, learning_rate=1.5e-3),
    validation_users=300,
)


def joined(events: EventLog, size: int = JOINED) -> EventLog:
    """Joins the last third of the users in groups of `size`, with their events in order."""
    users = events.num_users
    alone = 2 * users // 3
    edges = np.unique(np.concatenate([events.offsets[: alone + 1], events.offsets[alone::size]]))
    offsets = np.unique(np.append(edges, events.offsets[-1]))
    lengths = np.diff(offsets)
    return replace(
        events,
        user_ids=[f"c{number:06}" for number in range(len(lengths))],
        offsets=offsets,
        times=np.arange(events.num_events) - np.repeat(offsets[:-1], lengths),
        has_timestamps=False,
    )


def rewrite(bundle: Bundle) -> None:
    """Replaces the bundle's events by joined ones."""
    events = joined(bundle.events())
    table = events.to_arrow(bundle.catalog().items.ids)
    pq.write_table(table, bundle.path(EVENTS), compression="zstd")
    bundle.commit("build", bundle.manifest.build | {"num_users": events.num_users})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--bundle", type=Path, required=True, help="a built bundle without trained models"
    )
    parser.add_argument("--out", type=Path, required=True, help="path of the new bundle")
    parser.add_argument(
        "--max-minutes", type=float, help="time limit of the recommender's training"
    )
    options = parser.parse_args()
    source = Bundle.open(options.bundle)
    if trained := sorted(set(source.manifest.sections) - {"build"}):
        raise BundleError(f"{source.root} holds {', '.join(trained)}; expected a bundle just built")
    shutil.copytree(source.root, options.out)
    bundle = Bundle.open(options.out)
    rewrite(bundle)
    train_recommender(bundle, TrainOptions(max_minutes=options.max_minutes), RECIPE)


if __name__ == "__main__":
    main()
