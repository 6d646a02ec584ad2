"""What weights of events gain: the same events and users, without and with weights.

    OMP_NUM_THREADS=1 python -m benchmarks.recommend.event_weights --data DIR --work /tmp/weights

`--data` is a folder with items.parquet and events.parquet whose events have ratings as values, such
as MovieLens. Ratings below 2.5 are negative in all bundles, so the held-out events are the same:
each user's last event of 2.5 or more. `--work` receives one bundle per seed and variant, so that a
second call evaluates without training again.

Printed are NDCG@10 and recall@10 on the test events, and on those of users with a negative event
the gain of lowering similar items, by the weight that validation chose and by all others.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.support.runs import machine
from recserve.bundle.building import BuildOptions, build_bundle
from recserve.bundle.bundle import Bundle
from recserve.evaluation.accuracy import user_metrics
from recserve.evaluation.bundle_slates import BundleSlates
from recserve.evaluation.cases import leave_one_out_cases
from recserve.evaluation.evaluation import EvaluationOptions, evaluate_bundle
from recserve.evaluation.slates import dense_log_p, model_window
from recserve.evaluation.untrained import hide
from recserve.features.history.event_kinds import EventKinds
from recserve.features.history.event_weights import EventWeights
from recserve.training.options import TrainOptions
from recserve.training.recommender.fit_negative_weight import WEIGHTS, disliked_before, sum_gains
from recserve.training.recommender.recommender import train_recommender

KINDS = EventKinds(negative=("event<2.5",))
VARIANTS = {
    "none": EventWeights(),
    "mild": EventWeights(("event<2.5=1", "event<3.5=0.5")),
    "graded": EventWeights(("event<2.5=1", "event<3.5=0.5", "event<4.5=1", "event=2")),
}
LIKED = 4.0
K = 10
BATCH = 64


def trained(data: Path, out: Path, weights: EventWeights, seed: int) -> Bundle:
    """Builds and trains a bundle, or opens it if it exists."""
    if not out.exists():
        tables = data / "items.parquet", data / "events.parquet"
        options = BuildOptions(
            *tables,
            out,
            columns={"value": "rating"},
            event_kinds=KINDS,
            event_weights=weights,
            seed=seed,
        )
        build_bundle(options)
    if not Bundle.open(out).has("recommender"):
        train_recommender(Bundle.open(out), TrainOptions(seed=seed, device="cpu"))
    return Bundle.open(out)


def figures(bundle: Bundle) -> dict[str, Any]:
    """Returns the figures of a bundle on the test events."""
    found: dict[str, Any] = {}
    for strategy in ("popularity", "auto"):
        columns = evaluate_bundle(bundle, EvaluationOptions("test", strategy, (K,))).columns
        found[strategy] = {name: columns["filtered"][name] for name in (f"ndcg@{K}", f"recall@{K}")}
    model, catalog = BundleSlates.open(bundle).slates.model, bundle.catalog()
    bonus = None if model.items is None else model.items.history_bonus
    events = bundle.events()
    cases, codes = leave_one_out_cases(events, "test"), catalog.semantic_ids.codes
    ranks = np.zeros(len(cases), np.int64)
    for which in cases.batches(BATCH):
        scores = torch.from_numpy(dense_log_p(model, codes, cases, which))
        if bonus is not None:
            windows = [model_window(cases.history(c), model.template) for c in which.tolist()]
            bonus.add_to(scores, windows)
        hide(scores, cases.histories(which))
        held = torch.from_numpy(cases.held[which])[:, None]
        ranks[which] = (scores > scores.gather(1, held)).sum(1).numpy()
    each = user_metrics(ranks, (K,))
    liked = events.values[cases.stops] >= LIKED
    for name, group in (("dense head", liked | True), ("dense head, liked", liked)):
        found[name] = {m: float(v[group].mean()) for m, v in each.items() if m.endswith(f"@{K}")}
        found[name]["users"] = int(group.sum())
    if bundle.manifest.event_weights:
        disliked = disliked_before(bundle, "test")
        every = np.arange(len(disliked.cases))
        ndcg, recall = sum_gains(model, catalog, bonus, disliked, every, WEIGHTS)
        found["lowering"] = {
            "chosen": bundle.manifest.negative_weight,
            "validation": bundle.manifest.recommender.get("negative_events"),
            "users": len(every),
            "ndcg": {f"{w:g}": v / len(every) for w, v in zip(WEIGHTS, ndcg, strict=True)},
            "recall": {f"{w:g}": v / len(every) for w, v in zip(WEIGHTS, recall, strict=True)},
        }
    return found


def main() -> None:
    """Builds, trains and measures; prints one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the two tables")
    parser.add_argument("--work", type=Path, required=True, help="folder for the bundles")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"machine": machine()}
    for seed in given.seeds:
        for name in given.variants:
            out = given.work / f"{name}-{seed}"
            found[out.name] = figures(trained(given.data, out, VARIANTS[name], seed))
            (given.work / "event_weights.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
