"""Items that training never saw: how often are they found when they are what comes next?

    python benchmarks/cold_items.py --data DIR [--share 0.05] [--epochs 3] [--users 1000]

A share of the items is taken out of the items and the events, a bundle is built and trained on the
rest, and the items are put into the running service with their words alone. Then the users whose
last event is one of them ask for slates, and as many whose last event is not. Two ways to fill the
collaborative part of a new item's vector are compared: zero, and what similar items have.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recserve.building import BuildOptions, build_bundle
from recserve.bundle import Bundle
from recserve.messages import Exclude, ItemsBody, RecommendBody, RollbackBody
from recserve.service import Service
from recserve.training.options import TrainOptions
from recserve.training.recommender import train_recommender

CUTOFFS = (10, 50)
BEAM = 200


def split(data: Path, folder: Path, share: float) -> tuple[set[str], dict[str, list[str]]]:
    """Write the warm part of the data; the cold items, and every user's items in order."""
    items = pq.read_table(data / "items.parquet")
    events = pq.read_table(data / "events.parquet").sort_by(
        [("user_id", "ascending"), ("position", "ascending")]
    )
    draw = np.random.default_rng(0)
    chosen = draw.permutation(items.num_rows)[: round(share * items.num_rows)]
    cold = items.column("item_id").take(chosen)
    kept = pc.invert(pc.is_in(items.column("item_id"), cold.combine_chunks()))
    pq.write_table(items.filter(kept), folder / "items.parquet")
    kept = pc.invert(pc.is_in(events.column("item_id"), cold.combine_chunks()))
    pq.write_table(events.filter(kept), folder / "events.parquet")
    users: dict[str, list[str]] = {}
    columns = (events.column("user_id").to_pylist(), events.column("item_id").to_pylist())
    for user, item in zip(*columns, strict=True):
        users.setdefault(user, []).append(item)
    return set(cold.to_pylist()), users


def put(service: Service, rows: list[dict[str, Any]]) -> float:
    """Insert items; seconds."""
    began = time.perf_counter()
    for first in range(0, len(rows), 500):
        answer = service.put_items(ItemsBody(items=rows[first : first + 500]))
        assert not answer.rejected, answer.rejected[:3]
    return time.perf_counter() - began


def found(
    service: Service, cases: list[list[str]], cold: set[str], dense_weight: float
) -> dict[str, float]:
    """Recall of the last item of each case, and the share of cold items in the slates."""
    bodies = [
        RecommendBody(
            history=case[:-1],
            k=max(CUTOFFS),
            beam_width=BEAM,
            dense_weight=dense_weight,
            exclude=Exclude(seen=False),
        )
        for case in cases
    ]
    hits, shown = dict.fromkeys(CUTOFFS, 0), 0
    for case, answer in zip(cases, service.recommend_many(bodies), strict=True):
        if isinstance(answer, Exception):
            raise answer
        ids = [item.item_id for item in answer.items]
        shown += len(cold & set(ids[:10]))
        for cutoff in CUTOFFS:
            hits[cutoff] += case[-1] in ids[:cutoff]
    said = {f"recall@{cutoff}": hits[cutoff] / len(cases) for cutoff in CUTOFFS}
    return said | {"cold_share@10": shown / (10 * len(cases))}


def main() -> None:
    """Split, build, train, insert, ask; one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--users", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cold, users = split(options.data, folder, options.share)
        out = folder / "bundle"
        build_bundle(BuildOptions(folder / "items.parquet", folder / "events.parquet", out))
        train_recommender(Bundle.open(out), TrainOptions(epochs=options.epochs, device="cpu"))
        table = pq.read_table(options.data / "items.parquet").to_pylist()
        rows = [{k: v for k, v in row.items() if v} for row in table if row["item_id"] in cold]
        histories = [items for items in users.values() if len(items) >= 3]
        order = np.random.default_rng(1).permutation(len(histories))
        histories = [histories[place] for place in order]
        asked = {
            "cold": [h for h in histories if h[-1] in cold][: options.users],
            "warm": [h for h in histories if h[-1] not in cold][: options.users],
        }
        said: dict[str, Any] = {"epochs": options.epochs, "cold_items": len(cold)}
        with Service.open(out, f"lmdb:{name}/store", "cpu", journal=folder / "journal") as service:
            first = service.versions()["catalog_version"]
            said["insert_s"] = put(service, rows)
            said["similar"] = figures(service, asked, cold)
            vectors = service.runtime.snapshot.items.vectors
            content = BuildOptions.text_dim
            for row in rows:
                vector = vectors[service.runtime.snapshot.rows.get(row["item_id"])].copy()
                vector[content:] = 0
                row["embedding"] = vector.tolist()
            service.rollback_items(RollbackBody(catalog_version=first))
            put(service, rows)
            said["zero"] = figures(service, asked, cold)
        said["asked"] = {kind: len(cases) for kind, cases in asked.items()}
        said["chance_recall@10"] = 10 / len(table)
        print(json.dumps(said, indent=1))


def figures(service: Service, asked: dict[str, list[list[str]]], cold: set[str]) -> dict[str, Any]:
    """With the semantic ids alone, and with the dense head as the bundle weighs it."""
    weight = float(service.bundle.manifest.recommender["dense_weight"])
    weights = {"ids": 0.0, "ids_and_dense": weight}
    return {
        kind: {name: found(service, cases, cold, weight) for name, weight in weights.items()}
        for kind, cases in asked.items()
    }


if __name__ == "__main__":
    main()
