"""Memory and processor time of the recommender's training steps by the number of items.

    python -m benchmarks.scale.large_catalogue --items 1_000_000 --steps 3

Takes random semantic ids, vectors and histories, because none of them changes what a step costs.
Prints the bytes that the formula of docs/scale.md counts, the peak of the process, and the
processor time of a step. The copy of the best epoch is not made, so it is not in the peak.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import replace

import numpy as np
import pyarrow as pa
import torch

from recserve.features.catalog.catalog import Catalog
from recserve.features.catalog.semantic_ids import SemanticIds
from recserve.features.tables.events import EventLog
from recserve.features.tables.items import ItemTable
from recserve.training.optimizers import build_optimizers
from recserve.training.recommender.recommender import ITEMS, RecommenderTrainee

GB = 1e9
SIZES = (4096, 256, 256, 256)
VECTOR_SIZE = 256
USERS, EVENTS = 2000, 50
COPIES = 5  # weights, gradient, two moments, average


def peak_bytes() -> int:
    """Returns the largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def make_trainee(num_items: int, rng: np.random.Generator) -> RecommenderTrainee:
    """Returns the default recommender with its data."""
    places = np.sort(rng.choice(np.prod(SIZES[:3]), num_items, replace=False))
    codes = np.stack([*np.unravel_index(places, SIZES[:3]), np.zeros(num_items)], 1)
    ids = [f"i{n}" for n in range(num_items)]
    vectors = rng.standard_normal((num_items, VECTOR_SIZE), np.float32)
    blank = ItemTable(ids, [""] * num_items, [[]] * num_items, pa.table({}))
    index = SemanticIds(ids, codes.astype(np.uint16), SIZES, True)
    catalog = Catalog("", blank, index, np.zeros(num_items, np.float32), vectors)
    total = USERS * EVENTS
    log = EventLog(
        [str(user) for user in range(USERS)],
        np.arange(0, total + 1, EVENTS),
        rng.integers(0, num_items, total).astype(np.int32),
        np.arange(total),
        np.zeros(total, np.int16),
        ("event",),
        np.ones(total, np.float32),
        True,
    )
    recipe = replace(ITEMS, validation_users=100)
    return RecommenderTrainee(recipe, catalog, log, 0, torch.device("cpu"))


def main() -> None:
    """Trains a few steps and prints what they took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    trainee = make_trainee(args.items, np.random.default_rng(0))
    loaded = peak_bytes()
    model = trainee.model
    optimizers = build_optimizers(model, trainee.recipe.schedule)
    averaged = [parameter.detach().clone() for parameter in model.parameters()]
    weights = sum(parameter.numel() for parameter in model.parameters())
    counted = 4 * (COPIES * weights + args.items * VECTOR_SIZE)
    times = []
    model.train()
    for batch in trainee.plan(0)[: args.steps]:
        began = time.process_time()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        trainee.loss(batch).total.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(averaged, list(model.parameters()), 0.1)
        times.append(time.process_time() - began)
    print(
        f"{args.items:,} items, {weights:,} weights: {counted / GB:.2f} GB counted for the tables, "
        f"peak {peak_bytes() / GB:.2f} GB ({loaded / GB:.2f} before the first step), "
        f"{np.median(times):.1f} processor s for a step"
    )


if __name__ == "__main__":
    main()
