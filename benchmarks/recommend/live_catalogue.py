"""Measures a catalogue that changes under load: the cost of change sets, and their effect on reads.

    python -m benchmarks.recommend.live_catalogue [--items 1000000] [--rate 1000] [--seconds 20]
    python -m benchmarks.recommend.live_catalogue --filtered
    python -m benchmarks.recommend.live_catalogue --retriever

The bundle has random vectors and a real quantiser, trie and recommender. It runs as a service with
its journal on disk. One thread changes items at the given rate in sets of a hundred: half are new,
a fifth get a new vector, the rest new texts or a new visibility. Another thread requests slates and
is timed before and during the changes. `--filtered` requests items in one of four price ranges.
With `--retriever`, slates are those of `dense` with an untrained retriever of two outcomes and
three time offsets.

Prints one JSON object with read and write times. Every slate is checked; errors and short slates
count as failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from recserve.bundle import bundle as names
from recserve.bundle.bundle import Bundle
from recserve.features.catalog.catalog import Catalog
from recserve.features.catalog.semantic_ids import build_semantic_ids
from recserve.features.tables.items import ItemTable
from recserve.features.vectors.quantizer import ResidualQuantizer
from recserve.models.config import DecoderConfig, RecommenderConfig
from recserve.models.dense_retriever import DenseRetriever, RetrieverConfig, save_retriever
from recserve.models.recommender import Recommender, save_recommender
from recserve.schemas.items import ItemsRequest, RecommendRequest
from recserve.service import Service, ServiceOptions

WIDTH, SET = 32, 100
FITTED_ON = 100_000
FILTERS = [{"range": ["price", low / 4, low / 4 + 0.25]} for low in range(4)]


@dataclass(frozen=True)
class Reads:
    """Milliseconds per slate, and the number of failed reads."""

    count: int
    median_ms: float
    p99_ms: float
    slowest_ms: float
    failed: int


@dataclass(frozen=True)
class Changes:
    """Milliseconds per change set, and the state of the catalogue at the end.

    Attributes:
        sets: Number of change sets.
        items: Number of changed items.
        per_second: Changed items per second.
        cpu_ms: Median CPU time of the writing thread.
        median_ms: Median time of a set.
        p99_ms: 99th percentile of the time of a set.
        slowest_ms: Longest time of a set.
        late_ms: Delay against the due times.
        overlay_rows: Rows of the overlay at the end.
        later_vectors: Vectors that the index does not hold yet.
        folds: Number of base catalogues that were built meanwhile.
        versions: Number of catalogue versions at the end.
    """

    sets: int
    items: int
    per_second: float
    cpu_ms: float
    median_ms: float
    p99_ms: float
    slowest_ms: float
    late_ms: float
    overlay_rows: int
    later_vectors: int
    folds: int
    versions: int


def make_bundle(folder: Path, num_items: int, retriever: bool) -> Path:
    """Builds a bundle whose items have ids, prices and random vectors."""
    draw = np.random.default_rng(0)
    centres = draw.standard_normal((2_000, WIDTH), dtype=np.float32)
    vectors = centres[draw.integers(0, len(centres), num_items)]
    vectors += 0.7 * draw.standard_normal(vectors.shape, dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    quantizer = ResidualQuantizer.fit(vectors[:FITTED_ON], (256,) * 4, 0)
    ids = [f"item{row:08d}" for row in range(num_items)]
    popularity = draw.integers(0, 1000, num_items).astype(np.float32)
    codes = quantizer.encode(vectors)
    index, report = build_semantic_ids(ids, codes, quantizer.codebook_sizes, popularity)
    print("\n".join(report.lines()))
    prices = pa.table({"price": pa.array(draw.random(num_items), pa.float32())})
    paths = [[f"Kind {row % 20}"] for row in range(num_items)]
    catalog = Catalog("", ItemTable(ids, ids, paths, prices), index, popularity, vectors)
    bundle = Bundle.create(folder)
    catalog.save(folder / names.CATALOG, folder / names.VECTORS)
    quantizer.save(folder / names.QUANTIZER)
    bundle.commit("build", {"own_vectors": True, "collaborative_dim": 0})
    torch.manual_seed(0)
    decoder = DecoderConfig(64, 2, 2, 2, 32, 128)
    config = RecommenderConfig(
        decoder,
        index.codebook_sizes,
        num_items=num_items,
        vector_dim=WIDTH,
        id_embedding=True,
        dense_head=retriever,
    )
    recommender = Recommender(config)
    save_recommender(recommender, bundle.directory("recommender"))
    bundle.commit("recommender", {})
    if retriever:
        save_retriever(_drawn_retriever(recommender), bundle.directory("retriever"))
        bundle.commit("retriever", {})
    return folder


def _drawn_retriever(recommender: Recommender) -> DenseRetriever:
    """Returns an untrained retriever whose vectors differ by outcome and offset."""
    offsets = ("events", (1, 2, 4), (0.5, 0.25, 0.25))
    size = recommender.config.decoder.hidden_size
    retriever = DenseRetriever(RetrieverConfig(size, 128, ("click", "buy"), (0.7, 0.3), *offsets))
    retriever.start_from(recommender)
    torch.nn.init.normal_(retriever.project.weight, std=0.3)
    return retriever


def read_while(
    service: Service, go_on: Callable[[], bool], seed: int, num_items: int, filtered: bool
) -> Reads:
    """Requests slates of ten items for random histories, one after another."""
    draw, times, failed = np.random.default_rng(seed), [], 0
    strategy = "auto" if service.catalog.current.index is None else "dense"
    while go_on():
        history = [f"item{row:08d}" for row in draw.integers(0, num_items, 20)]
        wanted = FILTERS[len(times) % len(FILTERS)] if filtered else None
        body = RecommendRequest(
            history=history, k=10, beam_width=20, strategy=strategy, filter=wanted
        )
        began = time.perf_counter()
        try:
            answer = service.recommend(body)
            failed += len(answer.items) != 10 or "illegal_items" in answer.degraded
        except Exception as error:
            print(f"failed: {error!r}")
            failed += 1
        times.append((time.perf_counter() - began) * 1e3)
    return Reads(len(times), *_figures(times), failed)


def change(
    service: Service, rate: float, seconds: float, num_items: int, size: int = SET
) -> Changes:
    """Applies change sets at their due times until the time is over."""
    draw, times, late = np.random.default_rng(1), [], 0.0
    began, number, changed = time.perf_counter(), 0, 0
    fresh: list[str] = []
    computed: list[float] = []
    bases: dict[int, None] = {}
    while (due := began + number * size / rate) < began + seconds:
        time.sleep(max(0.0, due - time.perf_counter()))
        body = ItemsRequest(items=[_item(draw, number, place, num_items) for place in range(size)])
        fresh += [raw["item_id"] for raw in body.items if raw["item_id"].startswith("new")]
        started, before = time.perf_counter(), time.thread_time()
        answer = service.put_items(body)
        if number % 10 == 9:
            service.hide_item(fresh.pop(int(draw.integers(len(fresh)))))
        assert not answer.rejected, answer.rejected[:3]
        times.append((time.perf_counter() - started) * 1e3)
        computed.append((time.thread_time() - before) * 1e3)
        bases[service.catalog.current.base_trie.num_rows] = None
        late = max(late, (time.perf_counter() - due) * 1e3)
        number, changed = number + 1, changed + size
    snapshot = service.catalog.current
    rows = snapshot.num_items - snapshot.base_trie.num_rows
    later = 0 if snapshot.index is None else snapshot.index.num_later
    spent = time.perf_counter() - began
    figures = (float(np.median(computed)), *_figures(times))
    folds = len(bases) - 1
    return Changes(
        number, changed, changed / spent, *figures, late, rows, later, folds, snapshot.items.number
    )


def _item(draw: np.random.Generator, number: int, place: int, num_items: int) -> dict[str, object]:
    """Returns a changed item: half are new, a fifth have a new vector, the others new texts."""
    known = f"item{(number * 7919 + place * 104_729) % num_items:08d}"
    if place % 10 >= 7:
        return {"item_id": known, "title": f"sold {number} times", "price": float(draw.random())}
    vector = draw.standard_normal(WIDTH)
    said = {"embedding": (vector / np.linalg.norm(vector)).tolist(), "price": 1.0}
    return {"item_id": f"new{number}-{place}" if place % 10 < 5 else known, **said}


def _figures(times: list[float]) -> tuple[float, float, float]:
    middle, tail = np.percentile(times, [50, 99]) if times else (0.0, 0.0)
    return float(middle), float(tail), max(times, default=0.0)


def main() -> None:
    """Builds the bundle, measures, and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=1_000_000, help="items in the catalogue")
    parser.add_argument("--rate", type=float, default=1000, help="changed items per second")
    parser.add_argument("--seconds", type=float, default=20, help="duration of the changes")
    parser.add_argument("--retriever", action="store_true", help="measure slates of `dense`")
    parser.add_argument("--filtered", action="store_true", help="request slates with a filter")
    options = parser.parse_args()
    asked = options.items, options.filtered
    with tempfile.TemporaryDirectory() as folder:
        bundle = make_bundle(Path(folder) / "bundle", options.items, options.retriever)
        store = f"lmdb:{folder}/store"
        with Service.open(
            bundle, store, "cpu", ServiceOptions(journal=Path(folder) / "items")
        ) as service:
            service.put_items(
                ItemsRequest(items=[{"item_id": "first", "embedding": [0.1] * WIDTH}])
            )
            gc.collect()
            gc.freeze()
            ends = time.perf_counter() + options.seconds
            before = read_while(service, lambda: time.perf_counter() < ends, 2, *asked)
            done = threading.Event()
            found: list[Reads] = []
            reader = threading.Thread(
                target=lambda: found.append(
                    read_while(service, lambda: not done.is_set(), 3, *asked)
                )
            )
            reader.start()
            changes = change(service, options.rate, options.seconds, options.items)
            done.set()
            reader.join()
            single = change(service, 100, 1, options.items, 1)
            ends = time.perf_counter() + options.seconds / 2
            after = read_while(service, lambda: time.perf_counter() < ends, 4, *asked)
        said = {
            "items": options.items,
            "filtered": options.filtered,
            "asked_changes_per_second": options.rate,
            "strategy": "dense" if options.retriever else "auto",
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "reads_before": asdict(before),
            "changes": asdict(changes),
            "reads_during": asdict(found[0]),
            "reads_after_on_the_overlay": asdict(after),
            "single_item_sets": asdict(single),
        }
        print(json.dumps(said, indent=1))


if __name__ == "__main__":
    main()
