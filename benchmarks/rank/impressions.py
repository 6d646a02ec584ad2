"""Rankers trained on sampled negatives and on impressions, against a relevance that is known.

A simulated feed shows each user slates whose order has little to do with relevance. A user looks at
rank r with probability r^-bias and takes what he looks at with the item's relevance to him. Each
ranker then ranks random items; NDCG@10 and the rank correlation are those of the true relevance.

    python -m benchmarks.rank.impressions --out impressions.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from rich.console import Console

from recserve.features.ranking.event_features import HOUR, EventColumns
from recserve.features.ranking.ranking import Columns, candidate_columns, prefix_columns
from recserve.features.ranking.ranking_tables import RankingTables
from recserve.features.tables.events import EventLog
from recserve.features.tables.items import ItemTable
from recserve.models.ranker import load_ranker
from recserve.service.parquet_log import LogFiles
from recserve.service.slate_log.records import SCHEMAS
from recserve.training.options import TrainOptions
from recserve.training.ranker.impressions import SlateSource
from recserve.training.ranker.ranker import RankerRecipe, RankerSource, fit_ranker
from recserve.training.ranker.ranking_batch import pack
from recserve.training.ranker.ranking_quality import attend_within
from recserve.training.schedule import Schedule

START = 1_700_000_000_000_000
DIM = 8


@dataclass(frozen=True)
class FeedOptions:
    """A simulated feed.

    Attributes:
        num_users: Users.
        num_items: Items.
        num_slates: Slates of each user.
        slate: Items of a slate.
        bias: Exponent of the position bias; 0 means that users look at everything.
        promotion: Weight of each item's fixed promotion in the order of slates.
        first: Events of each user before the first slate.
        seed: Seed of everything.
    """

    num_users: int = 600
    num_items: int = 400
    num_slates: int = 16
    slate: int = 10
    bias: float = 1.0
    promotion: float = 1.0
    first: int = 5
    seed: int = 0


@dataclass(frozen=True)
class Feed:
    """What the feed has recorded, and the truth.

    Attributes:
        log: The events of users.
        items: The catalogue.
        vectors: [I, DIM] noisy vectors of items, as a server knows them.
        relevance: [U, I] probability that a user takes an item he looks at.
        slates: Rows of the slate log.
        outcomes: Rows of its outcomes.
    """

    log: EventLog
    items: ItemTable
    vectors: np.ndarray
    relevance: np.ndarray
    slates: list[dict[str, Any]]
    outcomes: list[dict[str, Any]]

    def write(self, folder: Path, ranks: bool = True) -> Path:
        """Writes the slate log, with ranks or as if all items were shown beside each other."""
        files = LogFiles(folder, 1 << 40, SCHEMAS)
        slates = self.slates
        if not ranks:
            slates = [
                row | {"items": [item | {"rank": 0} for item in row["items"]]} for row in slates
            ]
        files.write("slates", slates)
        files.write("outcomes", self.outcomes)
        return folder


def simulate(options: FeedOptions) -> Feed:
    """Runs the feed."""
    draw = np.random.default_rng(options.seed)
    users = draw.standard_normal((options.num_users, DIM))
    truth = draw.standard_normal((options.num_items, DIM))
    relevance = 1 / (1 + np.exp(2.0 - 1.2 * users @ truth.T))
    promotion = options.promotion * draw.standard_normal(options.num_items)
    ids = [f"i{n}" for n in range(options.num_items)]
    slates, outcomes = [], []
    rows: list[np.ndarray] = []
    times: list[np.ndarray] = []
    for user in range(options.num_users):
        liked = relevance[user] / relevance[user].sum()
        own = draw.choice(options.num_items, options.first, False, liked).tolist()
        when = [START + n * HOUR for n in range(options.first)]
        clock = START + options.first * HOUR
        for number in range(options.num_slates):
            clock += 6 * HOUR
            pool = draw.choice(options.num_items, 5 * options.slate, False)
            shown = pool[np.argsort(-promotion[pool] - draw.standard_normal(pool.size))]
            shown = shown[: options.slate]
            looked = draw.random(options.slate) < (1 + np.arange(options.slate)) ** -options.bias
            taken = looked & (draw.random(options.slate) < relevance[user, shown])
            token = f"{user}-{number}"
            listed = [
                {"item_id": ids[row], "rank": rank, "score": 0.0, "source": "model"}
                for rank, row in enumerate(shown.tolist(), 1)
            ]
            slates.append({"token_id": token, "time": clock, "user": f"u{user}", "items": listed})
            for place in np.flatnonzero(taken).tolist():
                moment = clock + 1_000_000 * (1 + place)
                own.append(int(shown[place]))
                when.append(moment)
                outcomes.append(
                    {
                        "token_id": token,
                        "time": moment,
                        "user": f"u{user}",
                        "item_id": ids[shown[place]],
                        "type": "click",
                        "value": 1.0,
                        "event": f"{token}-{place}",
                    }
                )
        rows.append(np.array(own, np.int32))
        times.append(np.array(when, np.int64))
    flat = np.concatenate(rows)
    log = EventLog(
        [f"u{n}" for n in range(options.num_users)],
        np.concatenate([[0], np.cumsum([len(own) for own in rows])]).astype(np.int64),
        flat,
        np.concatenate(times),
        np.zeros(flat.size, np.int16),
        ("click",),
        np.ones(flat.size, np.float32),
        True,
    )
    noisy = truth + 0.5 * draw.standard_normal(truth.shape)
    items = ItemTable(ids, ids, [[] for _ in ids], pa.table({}))
    return Feed(log, items, noisy.astype(np.float32), relevance, slates, outcomes)


@torch.no_grad()
def true_quality(feed: Feed, folder: Path, users: int = 200, seed: int = 1) -> dict[str, float]:
    """Returns how well a ranker orders 50 random items by their true relevance to each user."""
    draw = np.random.default_rng(seed)
    tables = RankingTables.load(folder, feed.items, feed.vectors)
    model = load_ranker(folder, feed.vectors).eval()
    model.freeze_items()
    discount = 1 / np.log2(np.arange(2, 12))
    gains, correlations = [], []
    for user in range(min(users, feed.log.num_users)):
        rows = draw.choice(len(feed.items), 50, False)
        events = EventColumns.of(feed.log, user)
        prefix = prefix_columns(tables, events)
        moment = np.full(rows.size, events.times[-1] + HOUR)
        made = candidate_columns(tables, prefix, rows, moment)
        columns = Columns(**vars(made.columns))
        labels = np.zeros((rows.size, 2), np.float32)
        batch = pack([prefix], columns, made.prefix_limits, np.array([rows.size]), labels)
        assert batch.inputs.groups is not None
        hidden = model(model.embed(batch.inputs), batch.inputs.groups, attend_within(model, batch))
        scores = model.heads(hidden.flatten(0, 1)[batch.candidates])[:, 0].numpy()
        truth = feed.relevance[user, rows]
        best = float((np.sort(truth)[::-1][:10] * discount).sum())
        gains.append(float((truth[np.argsort(-scores)[:10]] * discount).sum()) / best)
        ranks = np.argsort(np.argsort(scores)), np.argsort(np.argsort(truth))
        correlations.append(float(np.corrcoef(*ranks)[0, 1]))
    half = 1.96 * float(np.std(gains)) / len(gains) ** 0.5
    return {
        "ndcg10": float(np.mean(gains)),
        "ndcg10_half_interval": half,
        "rank_correlation": float(np.mean(correlations)),
    }


SMALL = RankerRecipe(
    hidden_size=32,
    num_layers=1,
    long_items=32,
    recent_items=16,
    block=8,
    schedule=Schedule(epochs=12, learning_rate=5e-3, weight_decay=0.01, averaging=0.9),
)


def arms(feed: Feed, scratch: Path) -> dict[str, tuple[SlateSource | None, RankerRecipe]]:
    """Returns the source of impressions and the recipe of each ranker."""
    whole, flat = feed.write(scratch / "slates"), feed.write(scratch / "flat", ranks=False)
    ranked, unlooked = SlateSource(whole), SlateSource(whole, unlooked_weight=0.3)
    return {
        "sampled negatives": (None, SMALL),
        "shown, without ranks": (SlateSource(flat), SMALL),
        "shown, with ranks": (ranked, SMALL),
        "shown, with ranks, no sampled negatives": (ranked, replace(SMALL, negatives=0)),
        "shown, with ranks, one sampled negative": (ranked, replace(SMALL, negatives=1)),
        "shown, with ranks, unlooked at 0.3": (unlooked, SMALL),
        "shown, with ranks and popularity": (ranked, replace(SMALL, popularity_bias=True)),
    }


def train(
    feed: Feed,
    source: SlateSource | None,
    recipe: RankerRecipe,
    folder: Path,
    options: TrainOptions,
) -> dict[str, float]:
    """Trains one ranker and returns its quality and its time on the processor."""
    started = time.process_time()
    trained = RankerSource(feed.log, feed.items, feed.vectors, slates=source)
    fit_ranker(trained, folder, options, recipe, Console(quiet=True))
    seconds = time.process_time() - started
    return true_quality(feed, folder) | {"processor_seconds": round(seconds, 1)}


def main() -> None:
    """Prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--users", type=int, default=600)
    parser.add_argument("--bias", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    for seed in range(given.seeds):
        feed = simulate(FeedOptions(num_users=given.users, bias=given.bias, seed=seed))
        options = TrainOptions(device="cpu", precision="float32", seed=seed)
        with tempfile.TemporaryDirectory() as folder:
            for name, (source, recipe) in arms(feed, Path(folder)).items():
                one = train(feed, source, recipe, Path(folder) / "ranker" / name, options)
                found.setdefault(name, []).append(one)
                print(f"seed {seed} {name}: {one}", flush=True)
    print("| training | NDCG@10 of the truth | rank correlation | processor s |\n|---|---|---|---|")
    for name, runs in found.items():
        values = [np.mean([run[key] for run in runs]) for key in runs[0]]
        print(f"| {name} | {values[0]:.3f} ± {values[1]:.3f} | {values[2]:.3f} | {values[3]:.0f} |")
    if given.out is not None:
        record = {"options": vars(given) | {"out": str(given.out)}, "torch": torch.__version__}
        given.out.write_text(json.dumps(record | {"runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
