"""Strategies that keep structures of their own follow a live catalogue: `parallel` and `dense`."""

import shutil

import numpy as np
import pytest
import torch
from rich.console import Console
from tiny_bundle import shared_bundle

from recserve.bundle import Bundle
from recserve.features.vector_index import FaissIndex, GrownIndex, grown
from recserve.messages import Diversity, Exclude, ItemsBody, RecommendBody
from recserve.models.recommender import load_recommender, save_recommender
from recserve.service import Service
from recserve.training.options import TrainOptions
from recserve.training.retriever import RetrieverRecipe, train_retriever
from recserve.training.schedule import Schedule


def unit(count: int, seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((count, 8)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_a_grown_index_finds_what_one_of_all_items_finds():
    vectors, queries = unit(90, 0), unit(7, 1)
    index = FaissIndex(vectors[:50])
    for stop in (53, 80, 90):
        index = grown(index, vectors[index.num_items : stop])
        assert isinstance(index, GrownIndex) and index.num_items == stop
        for k in (1, 10, stop):
            rows, scores = index.search(queries, k)
            expected_rows, expected = FaissIndex(vectors[:stop]).search(queries, k)
            np.testing.assert_array_equal(rows, expected_rows)
            np.testing.assert_allclose(scores, expected, atol=1e-6)


@pytest.fixture
def service(tmp_path):
    """A bundle with a retriever, and level heads that were never trained."""
    root = tmp_path / "bundle"
    shutil.copytree(shared_bundle(), root)
    bundle = Bundle.open(root)
    folder = bundle.directory("recommender")
    catalog = bundle.catalog()
    model = load_recommender(
        folder,
        torch.from_numpy(catalog.index.codes.astype(np.int64)),
        torch.from_numpy(catalog.vectors),
    )
    changed = type(model)(type(model.config)(**{**vars(model.config), "level_heads": True}))
    changed.load_state_dict(model.state_dict(), strict=False)
    save_recommender(changed, folder)
    bundle.commit("recommender", {})
    bundle = Bundle.open(root)
    recipe = RetrieverRecipe(drawn=64, in_batch=64, validation_users=5, schedule=Schedule(1, 1e-3))
    train_retriever(bundle, TrainOptions(device="cpu"), recipe, Console(quiet=True))
    with Service.open(root, f"lmdb:{tmp_path}/store", "cpu") as opened:
        yield opened


@pytest.mark.parametrize("strategy", ["beam", "parallel", "dense", "specgr"])
def test_new_items_come_and_hidden_ones_go(service, strategy):
    ids = service.runtime.snapshot.catalog.items.ids
    count = len(ids)

    def everything() -> list[str]:
        body = RecommendBody(
            history=list(ids[:4]),
            k=min(count + 3, 1000),
            strategy=strategy,
            exclude=Exclude(seen=False),
        )
        answer = service.recommend(body)
        assert answer.strategy == strategy
        return [item.item_id for item in answer.items if item.source == "model"]

    before = everything()
    assert len(before) == len(set(before))
    new = [{"item_id": f"new-{n}", "title": f"quiet lamp number {n}"} for n in range(3)]
    service.put_items(ItemsBody(items=new))
    gone = before[0]
    service.hide_item(gone)
    after = everything()
    assert gone not in after
    assert set(after) == (set(before) - {gone}) | {item["item_id"] for item in new}
    assert service.runtime.illegal_items == 0


def test_diversity_counts_what_items_say_now(service):
    """An item that moves to another category is counted there in the next answer."""
    ids = service.runtime.snapshot.catalog.items.ids

    def slate(**diversity) -> list[str]:
        body = RecommendBody(
            history=list(ids[:4]),
            k=20,
            exclude=Exclude(seen=False),
            diversity=Diversity(**diversity),
        )
        return [item.item_id for item in service.recommend(body).items if item.source == "model"]

    free = slate()
    groups = [service.item(item).categories for item in free]
    assert len({tuple(paths) for paths in groups}) > 1
    service.put_items(
        ItemsBody(
            items=[{"item_id": item, "title": "x", "categories": ["One > Only"]} for item in free]
        )
    )
    capped = slate(category=2)
    now = [service.item(item).categories for item in capped]
    assert sum(paths == ["One > Only"] for paths in now) <= 2
    assert set(capped) != set(free)
    for level in (0, 1):
        codes = [
            tuple(service.item(item).semantic_id[: level + 1]) for item in slate(prefix=(level, 1))
        ]
        assert len(codes) == len(set(codes))


@pytest.mark.parametrize("strategy", ["parallel", "specgr", "dense"])
def test_the_model_fills_a_capped_slate(service, strategy):
    """k of its own items wherever so many keep to the cap, at most one of each group."""
    ids = service.runtime.snapshot.catalog.items.ids
    codes = service.runtime.snapshot.catalog.index.codes
    for level, k in ((0, 8), (0, 40), (1, 30)):
        body = RecommendBody(
            history=ids[:4], k=k, beam_width=k, strategy=strategy, exclude=Exclude(seen=False),
            diversity=Diversity(prefix=(level, 1)),
        )  # fmt: skip
        items = [i for i in service.recommend(body).items if i.source == "model"]
        prefixes = {tuple(service.item(i.item_id).semantic_id[: level + 1]) for i in items}
        there = len({tuple(code[: level + 1]) for code in codes.tolist()})
        assert len(items) == len(prefixes) == min(k, there)
        if strategy != "specgr":
            assert (np.diff([item.score for item in items]) <= 0).all()
