"""Strategies that keep structures of their own follow a live catalogue: `rpg` and `dense`."""

import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from recserve.bundle.bundle import Bundle
from recserve.models.dense_retriever import item_vectors
from recserve.models.recommender import load_recommender, save_recommender
from recserve.schemas.items import (
    Diversity,
    Exclusions,
    ItemsRequest,
    RecommendRequest,
    RollbackRequest,
)
from recserve.service import Service
from recserve.service import live_catalog as live_catalog_module
from recserve.service.snapshot import Snapshot
from recserve.training.options import TrainOptions
from recserve.training.recommender.retriever import RetrieverRecipe, train_retriever
from recserve.training.schedule import Schedule
from tests.support.grids import chosen
from tests.support.shared_folders import shared_folder
from tests.support.tiny_bundle import shared_bundle


def make_bundle(folder: Path) -> None:
    """Makes a bundle with a retriever, and level heads that were never trained."""
    prefix = folder / "bundle"
    shutil.copytree(shared_bundle(), prefix)
    bundle = Bundle.open(prefix)
    folder = bundle.directory("recommender")
    catalog = bundle.catalog()
    model = load_recommender(
        folder,
        torch.from_numpy(catalog.semantic_ids.codes.astype(np.int64)),
        torch.from_numpy(catalog.vectors),
    )
    changed = type(model)(type(model.config)(**{**vars(model.config), "level_heads": True}))
    changed.load_state_dict(model.state_dict(), strict=False)
    save_recommender(changed, folder)
    bundle.commit("recommender", {})
    bundle = Bundle.open(prefix)
    recipe = RetrieverRecipe(drawn=64, in_batch=64, validation_users=5, schedule=Schedule(1, 1e-3))
    train_retriever(bundle, TrainOptions(device="cpu"), recipe, Console(quiet=True))


@pytest.fixture
def service(tmp_path):
    shutil.copytree(shared_folder("live-strategies", make_bundle), tmp_path, dirs_exist_ok=True)
    with Service.open(tmp_path / "bundle", f"lmdb:{tmp_path}/store", "cpu") as opened:
        yield opened


@pytest.mark.parametrize("strategy", ["beam", "rpg", "dense", "specgr"])
def test_new_items_come_and_hidden_ones_go(service, strategy):
    ids = service.catalog.current.catalog.items.ids
    count = len(ids)

    def everything() -> list[str]:
        body = RecommendRequest(
            history=list(ids[:4]),
            k=min(count + 3, 1000),
            strategy=strategy,
            exclude=Exclusions(seen=False),
        )
        answer = service.recommend(body)
        assert answer.strategy == strategy
        return [item.item_id for item in answer.items if item.source == "model"]

    before = everything()
    assert len(before) == len(set(before))
    new = [{"item_id": f"new-{n}", "title": f"quiet lamp number {n}"} for n in range(3)]
    service.put_items(ItemsRequest(items=new))
    gone = before[0]
    service.hide_item(gone)
    after = everything()
    assert gone not in after
    assert set(after) == (set(before) - {gone}) | {item["item_id"] for item in new}
    assert service.recommender.illegal_items == 0


class Exhaustive:
    """All rows that may be answered, compared with every query."""

    def __init__(self, service) -> None:
        items = service.catalog.current.items
        self.rows = np.setdiff1d(np.arange(items.num_rows), items.removed_rows)
        models = service.catalog.models
        vectors = item_vectors(models.heads.retriever, models.recommender)
        self._vectors = vectors.numpy()
        self.num_items = len(self.rows)

    def search(self, queries, k):
        scores = queries @ self._vectors[self.rows].T
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return self.rows[order], np.take_along_axis(scores, order, 1)

    def vectors(self, rows):
        return self._vectors[rows]


def dense_slate(service, k: int) -> dict[str, float]:
    ids = service.catalog.current.catalog.items.ids
    body = RecommendRequest(
        history=list(ids[200:204]), k=k, strategy="dense", exclude=Exclusions(seen=False)
    )
    answer = service.recommend(body)
    return {item.item_id: item.score for item in answer.items if item.source == "model"}


def check_dense(service) -> None:
    """Slates of `dense` are those of an exhaustive search over the version that is served."""
    catalog, served = service.catalog, service.catalog.current
    for k in (3, 20, served.items.num_rows - served.items.removed_rows.size):
        found = dense_slate(service, k)
        assert len(found) == k
        catalog._current = replace(served, index=Exhaustive(service))
        expected = dense_slate(service, k)
        catalog._current = served
        assert list(found) == list(expected)
        assert found == pytest.approx(expected, abs=1e-4)


def put_some(service, step: int) -> None:
    """Four new items, a new vector for two old ones."""
    vectors = service.catalog.current.catalog.vectors
    ids = service.catalog.current.catalog.items.ids
    draw = np.random.default_rng(step)
    names = [f"new{step}-{n}" for n in range(4)] + [ids[step], ids[300 - step]]
    places = draw.integers(0, len(vectors), (len(names), 2))
    mixed = vectors[places].mean(1) + 0.01 * draw.standard_normal((len(names), vectors.shape[1]))
    body = [
        {"item_id": name, "embedding": vector.tolist()}
        for name, vector in zip(names, mixed, strict=True)
    ]
    assert not service.put_items(ItemsRequest(items=body)).rejected


def fold(service, monkeypatch) -> None:
    """Two folds: what comes during one is left for the next."""
    monkeypatch.setattr(live_catalog_module, "MAX_INSERTED", 1)
    put_some(service, 90)
    service.catalog._folding.join()
    monkeypatch.setattr(live_catalog_module, "MAX_INSERTED", 8192)


def rows_in(service) -> tuple[int, int]:
    """Rows behind the base of the index, and rows that may not be answered but are searched."""
    snapshot = service.catalog.current
    index, items = snapshot.index, snapshot.items
    return index.num_later, index.num_items - (items.num_rows - items.removed_rows.size)


def test_dense_is_exhaustive_before_and_after_folds(service, monkeypatch):
    """Through new items, new vectors, deletions, returns, a fold and rollbacks across it."""
    ids = service.catalog.current.catalog.items.ids
    for step in range(3):
        put_some(service, step)
    check_dense(service)
    before = service.catalog.current.items.name
    best = list(dense_slate(service, 12))
    for item_id in best:
        service.hide_item(item_id)
    assert not set(dense_slate(service, 12)) & set(best)
    check_dense(service)
    assert rows_in(service) == (18, 18)
    fold(service, monkeypatch)
    assert rows_in(service) == (0, 0)
    check_dense(service)
    put_some(service, 3)
    service.put_items(ItemsRequest(items=[{"item_id": best[0], "title": "back again"}]))
    assert best[0] in dense_slate(service, 12)
    assert rows_in(service) == (7, 2)
    check_dense(service)
    folded = service.catalog.current.items.name
    service.rollback_items(RollbackRequest(catalog_version=before))
    assert list(dense_slate(service, 12)) == best
    check_dense(service)
    fold(service, monkeypatch)
    assert rows_in(service) == (0, 0)
    check_dense(service)
    service.rollback_items(RollbackRequest(catalog_version=folded))
    assert not set(dense_slate(service, 12)) & set(best[1:])
    check_dense(service)
    assert service.item(ids[3]).catalog_version == service.catalog.current.items.name
    assert service.recommender.illegal_items == 0


@pytest.mark.parametrize("undone", [False, True], ids=["changed", "rolled-back"])
def test_what_comes_during_a_fold_is_in_the_next_version(service, monkeypatch, undone):
    """A fold that waits while items come and go; after a rollback it is of no use."""
    put_some(service, 0)
    named = service.catalog.current.items.name
    hidden = service.catalog.current.catalog.items.ids[60]
    service.hide_item(hidden)
    waiting, compact_trie = threading.Event(), Snapshot.compact_trie

    def slow(snapshot):
        waiting.wait(30)
        return compact_trie(snapshot)

    monkeypatch.setattr(Snapshot, "compact_trie", slow)
    monkeypatch.setattr(live_catalog_module, "MAX_INSERTED", 1)
    put_some(service, 1)
    monkeypatch.setattr(live_catalog_module, "MAX_INSERTED", 8192)
    put_some(service, 2)
    service.put_items(ItemsRequest(items=[{"item_id": hidden, "title": "back"}]))
    service.hide_item("new2-1")
    if undone:
        service.rollback_items(RollbackRequest(catalog_version=named))
    base = service.catalog.current.base_trie
    check_dense(service)
    waiting.set()
    service.catalog._folding.join()
    assert (service.catalog.current.base_trie is base) == undone
    assert rows_in(service)[0] == (18 if undone else 6)
    check_dense(service)
    items = service.catalog.current.items
    everything = dense_slate(service, items.num_rows - items.removed_rows.size)
    assert hidden in everything and "new2-1" not in everything


def test_k_items_come_where_most_around_are_gone(service):
    """A tenth of the catalogue is left, the items far from the user: the search goes deeper."""
    count = len(service.catalog.current.catalog.items.ids)
    order = list(dense_slate(service, count))
    for item_id in order[: count * 9 // 10]:
        service.hide_item(item_id)
    assert list(dense_slate(service, 20)) == order[count * 9 // 10 :][:20]


def test_a_restart_folds_what_the_journal_holds(tmp_path, service, monkeypatch):
    """The rows of the journal do not stay behind the base until somebody changes an item."""
    put_some(service, 0)
    bundle = service.bundle.root
    service.close()
    monkeypatch.setattr(live_catalog_module, "MAX_INSERTED", 1)
    with Service.open(bundle, f"lmdb:{tmp_path}/other", "cpu") as again:
        again.catalog._folding.join()
        assert rows_in(again) == (0, 0)
        assert "new0-3" in dense_slate(again, 504)
        check_dense(again)


@pytest.mark.parametrize("strategy", chosen(("rpg", "specgr", "dense"), "rpg", "specgr"))
def test_the_model_fills_a_capped_slate(service, strategy):
    """k of its own items wherever so many keep to the cap, at most one of each group."""
    ids = service.catalog.current.catalog.items.ids
    codes = service.catalog.current.catalog.semantic_ids.codes
    for level, k in ((0, 8), (0, 40), (1, 30)):
        body = RecommendRequest(
            history=ids[:4], k=k, beam_width=k, strategy=strategy, exclude=Exclusions(seen=False),
            diversity=Diversity(prefix=(level, 1)),
        )  # fmt: skip
        items = [i for i in service.recommend(body).items if i.source == "model"]
        prefixes = {tuple(service.item(i.item_id).semantic_id[: level + 1]) for i in items}
        there = len({tuple(code[: level + 1]) for code in codes.tolist()})
        assert len(items) == len(prefixes) == min(k, there)
        if strategy != "specgr":
            assert (np.diff([item.score for item in items]) <= 0).all()
