"""A small bundle for tests: synthetic events, real codes, random models."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from recserve.bundle.building import BuildOptions, build_bundle
from recserve.bundle.bundle import Bundle
from recserve.features.ranking.ranking_tables import RankingTables
from recserve.features.synthetic import SyntheticFiles, SyntheticOptions, write_synthetic
from recserve.models.config import DecoderConfig, RecommenderConfig
from recserve.models.dense_retriever import DenseRetriever, RetrieverConfig, save_retriever
from recserve.models.item_heads import SelfDraftConfig, SelfDraftHead, save_self_draft
from recserve.models.ranker import save_ranker
from recserve.models.recommender import Recommender, save_recommender
from recserve.training.ranker.ranker import RankerRecipe, make_ranker
from tests.support.shared_folders import shared_folder

NUM_ITEMS, NUM_USERS = 500, 40


def tiny_bundle(folder: Path, ranker: bool = True, recommender: bool = True) -> Path:
    """Writes a bundle of 500 items and 40 users under `folder` and returns its path.

    It is a copy of the one that all tests share, which the test may change.
    """
    shutil.copytree(_original(ranker, recommender), folder, dirs_exist_ok=True)
    return folder / "bundle"


def _original(ranker: bool, recommender: bool) -> Path:
    """Returns a folder with a bundle and its data, which must not be changed."""

    def make(folder: Path) -> None:
        files = write_synthetic(folder / "data", SyntheticOptions(NUM_ITEMS, NUM_USERS, 12, seed=3))
        built(files, folder / "bundle")
        with_models(folder / "bundle", ranker, recommender)

    parts = ["ranker"] * ranker + ["recommender"] * recommender
    return shared_folder("-".join(["bundle", *parts]), make)


def every_strategy_bundle() -> Path:
    """Returns one bundle with all models and heads for all tests; it must not be changed."""

    def make(folder: Path) -> None:
        files = write_synthetic(folder / "data", SyntheticOptions(NUM_ITEMS, NUM_USERS, 12, seed=3))
        built(files, folder / "bundle")
        with_models(folder / "bundle", every_strategy=True)

    return shared_folder("bundle-every-strategy", make) / "bundle"


def built(files: SyntheticFiles, out: Path, seed: int = 0) -> None:
    """Builds a bundle without models."""
    options = BuildOptions(
        files.items,
        files.events,
        out,
        levels=2,
        codes=16,
        text_dim=16,
        collaborative_dim=0,
        seed=seed,
    )
    build_bundle(options, log=lambda _: None)


def with_models(
    out: Path,
    ranker: bool = True,
    recommender: bool = True,
    seed: int = 5,
    every_strategy: bool = False,
) -> Path:
    """Adds untrained models to a bundle and returns its path.

    With `every_strategy` the recommender has level heads and a retriever too.
    """
    bundle = Bundle.open(out)
    catalog = bundle.catalog()
    torch.manual_seed(seed)
    if recommender:
        config = RecommenderConfig(
            DecoderConfig(32, 2, 2, 1, 16, 64),
            catalog.semantic_ids.codebook_sizes,
            num_items=len(catalog),
            vector_dim=catalog.vectors.shape[1],
            id_embedding=True,
            dense_head=True,
            level_heads=every_strategy,
            max_history_items=16,
        )
        save_recommender(Recommender(config), bundle.directory("recommender"))
        bundle.commit("recommender", {})
        for name in ("speculative", "nezha"):
            shape = SelfDraftConfig(32, catalog.semantic_ids.codebook_sizes, name == "nezha")
            folder = bundle.directory(f"drafters/{name}")
            save_self_draft(SelfDraftHead(shape), folder)
            bundle.commit(f"drafters/{name}", {})
    if every_strategy:
        shape = RetrieverConfig(32, 24, ("click",), (1.0,), "events", (1, 2), (0.6, 0.4))
        save_retriever(DenseRetriever(shape), bundle.directory("retriever"))
        bundle.commit("retriever", {})
    if ranker:
        recipe = RankerRecipe(hidden_size=32, long_items=16, recent_items=8, block=4)
        train = bundle.events().leave_one_out().train
        tables = RankingTables.fit(train, catalog.items, catalog.vectors, 16, 8, 4)
        directory = bundle.directory("ranker")
        save_ranker(make_ranker(tables, catalog.vectors, recipe, 7), directory)
        tables.save(directory)
        bundle.commit("ranker", {})
    return out


def shared_bundle() -> Path:
    """Returns one bundle with both models for all tests; it must not be changed."""
    return _original(ranker=True, recommender=True) / "bundle"
