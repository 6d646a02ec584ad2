"""Measures how often new items, which training never saw, are recommended when they come next.

    python -m benchmarks.recommend.cold_items --data DIR [--epochs 3] [--users 1000]
        [--first-codes 1024]

A share of the items is removed from items and events, and a bundle is built and trained on the
rest. The removed items are then inserted into the running service with only their texts. Slates are
requested for three groups: users whose last event is a removed item, equally many whose last event
is not, and equally many of all users. Beam search rarely keeps a prefix that training never saw.
With `specgr`, a retriever proposes items and the recommender verifies them. Two ways to fill the
collaborative part of a new item's vector are compared: zeros, and the values of similar items.

Prints one JSON object with recall and NDCG by group and strategy.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recserve.batch.together import together
from recserve.bundle.building import BuildOptions, build_bundle
from recserve.bundle.bundle import Bundle
from recserve.schemas.items import Exclusions, ItemsRequest, RecommendRequest, RollbackRequest
from recserve.service import Service, ServiceOptions
from recserve.training.options import TrainOptions
from recserve.training.recommender.recommender import train_recommender
from recserve.training.recommender.retriever import train_retriever

CUTOFFS = (10, 50)
BEAM = 200


@dataclass(frozen=True)
class Way:
    """A strategy, and the weight of the recommender's dense head in it."""

    strategy: str
    dense_weight: float

    def __str__(self) -> str:
        weight = f", dense head {self.dense_weight:g}" if self.dense_weight else ""
        return self.strategy + weight


def split(data: Path, folder: Path, share: float) -> tuple[set[str], dict[str, list[str]]]:
    """Writes the remaining part of the data; returns the removed items and all users' items in
    order.
    """
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
    """Inserts items; returns the seconds."""
    began = time.perf_counter()
    for first in range(0, len(rows), 500):
        answer = service.put_items(ItemsRequest(items=rows[first : first + 500]))
        assert not answer.rejected, answer.rejected[:3]
    return time.perf_counter() - began


def found(service: Service, cases: list[list[str]], cold: set[str], way: Way) -> dict[str, float]:
    """Returns recall and NDCG of each case's last item, and the share of removed items in the
    slates.
    """
    bodies = [
        RecommendRequest(
            history=case[:-1],
            k=max(CUTOFFS),
            beam_width=BEAM,
            strategy=way.strategy,
            dense_weight=way.dense_weight,
            exclude=Exclusions(seen=False),
        )
        for case in cases
    ]
    ranks, shown, rounds = [], 0, 0
    recommend = together(service)
    for case, answer in zip(cases, recommend(bodies), strict=True):
        assert "illegal_items" not in answer.degraded
        ids = [item.item_id for item in answer.items]
        shown += len(cold & set(ids[:10]))
        rounds += answer.rounds
        ranks.append(ids.index(case[-1]) if case[-1] in ids else max(CUTOFFS))
    said = {f"recall@{cutoff}": float(np.mean(np.array(ranks) < cutoff)) for cutoff in CUTOFFS}
    gains = np.where(np.array(ranks) < 10, 1 / np.log2(np.array(ranks) + 2), 0.0)
    said["ndcg@10"] = float(gains.mean())
    return said | {"cold_share@10": shown / (10 * len(cases)), "rounds": rounds / len(cases)}


def trained_bundle(folder: Path, epochs: int, first_codes: int | None) -> Bundle:
    """Builds and trains a bundle in the folder, or opens it if it exists."""
    out = folder / "bundle"
    if not out.exists():
        codes = None if first_codes is None else (first_codes, 256, 256, 256)
        tables = (folder / "items.parquet", folder / "events.parquet")
        build_bundle(BuildOptions(*tables, out, codes=codes))
    for name, train in (("recommender", train_recommender), ("retriever", train_retriever)):
        bundle = Bundle.open(out)
        if not bundle.has(name):
            wanted = TrainOptions(epochs=epochs if name == "recommender" else None, device="cpu")
            train(bundle, wanted)
    return Bundle.open(out)


def main() -> None:
    """Splits the data, builds, trains, inserts and measures; prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with items.parquet and events.parquet"
    )
    parser.add_argument(
        "--work", type=Path, help="folder for data and bundle; default: a temporary one"
    )
    parser.add_argument(
        "--share", type=float, default=0.05, help="share of the items that is removed"
    )
    parser.add_argument("--epochs", type=int, default=3, help="training epochs")
    parser.add_argument("--first-codes", type=int, help="codes of the first level")
    parser.add_argument("--users", type=int, default=1000, help="users per group")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = options.work or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        cold, users = split(options.data, folder, options.share)
        bundle = trained_bundle(folder, options.epochs, options.first_codes)
        table = pq.read_table(options.data / "items.parquet").to_pylist()
        rows = [{k: v for k, v in row.items() if v} for row in table if row["item_id"] in cold]
        histories = [items for items in users.values() if len(items) >= 3]
        order = np.random.default_rng(1).permutation(len(histories))
        histories = [histories[place] for place in order]
        asked = {
            "cold": [h for h in histories if h[-1] in cold][: options.users],
            "warm": [h for h in histories if h[-1] not in cold][: options.users],
            "all": histories[: options.users],
        }
        said: dict[str, Any] = {"epochs": options.epochs, "cold_items": len(cold)}
        weight = float(bundle.manifest.recommender["dense_weight"])
        ways = [Way("beam", 0.0), Way("beam", weight), Way("specgr", 0.0), Way("dense", 0.0)]
        journal = Path(name) / "journal"
        with Service.open(
            bundle.root, f"lmdb:{name}/store", "cpu", ServiceOptions(journal=journal)
        ) as service:
            first = service.versions()["catalog_version"]
            said["insert_s"] = put(service, rows)
            said["similar"] = figures(service, asked, cold, ways)
            vectors = service.catalog.current.items.vectors
            content = BuildOptions.text_dim
            for row in rows:
                vector = vectors[service.catalog.current.rows.get(row["item_id"])].copy()
                vector[content:] = 0
                row["embedding"] = vector.tolist()
            service.rollback_items(RollbackRequest(catalog_version=first))
            put(service, rows)
            said["zero"] = figures(service, asked, cold, ways[:2])
        said["asked"] = {kind: len(cases) for kind, cases in asked.items()}
        said["chance_recall@10"] = 10 / len(table)
        print(json.dumps(said, indent=1))


def figures(
    service: Service, asked: dict[str, list[list[str]]], cold: set[str], ways: list[Way]
) -> dict[str, Any]:
    """Returns the figures by group of users and strategy."""
    return {
        kind: {str(way): found(service, cases, cold, way) for way in ways}
        for kind, cases in asked.items()
    }


if __name__ == "__main__":
    main()
