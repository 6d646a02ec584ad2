"""Opens a bundle and assembles the parts of a service: models, engine, histories, catalogue."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from recserve.bundle.bundle import EVENTS, Bundle
from recserve.engine.build import EngineModels, build_engine
from recserve.features.catalog.item_journal import ItemJournal
from recserve.features.history.history import HistoryStore, StoreOptions
from recserve.features.history.stores import open_store
from recserve.features.ranking.live_ranking import LiveRanking
from recserve.features.ranking.ranking_tables import RankingTables
from recserve.service.catalog.live_items import LiveItems
from recserve.service.catalog.snapshot import Snapshot
from recserve.service.event_types import EventTypes
from recserve.service.histories import Histories
from recserve.service.model_loader import (
    Device,
    Models,
    default_journal,
    default_store,
    item_index,
    load_item_graph,
    load_models,
    resolve_device,
)
from recserve.service.options import ServiceOptions
from recserve.service.recommend.attribution import Signer
from recserve.service.recommend.prewarm import Prewarm
from recserve.service.recommend.rank import Rankings
from recserve.service.recommend.recommend import Recommendations
from recserve.service.recommend.roots import RankerPrefixes, RecommenderPrefixes
from recserve.service.recommend.scorers import ItemScorer, LikelihoodScorer, RankerScorer
from recserve.service.runtime import Runtime

# Name of the scorer that each model implements.
SCORER_OF = {"ranker": "ranker", "recommender": "likelihood"}


@dataclass(frozen=True)
class ItemParts:
    """The parts of a service that answer requests about the items of a bundle.

    Attributes:
        bundle: The open bundle.
        models: Its networks.
        runtime: Engine, catalogue snapshot, histories, versions.
        items: The live catalogue.
        recommendations: Answers recommend requests; None if the bundle has no recommender.
        rankings: Answers rank requests; None if no model of the bundle can rank.
    """

    bundle: Bundle
    models: Models
    runtime: Runtime
    items: LiveItems
    recommendations: Recommendations | None
    rankings: Rankings | None

    def close(self) -> None:
        """Finishes the engine's requests, then closes the journal, the engine and the stores."""
        self.items.close()
        self.runtime.engine.close()
        self.runtime.histories.close()
        # A reference to this service must not keep its successors in memory.
        self.items.successor = self.runtime.histories.successor = None

    def described(self) -> list[dict[str, Any]]:
        """Returns the models in OpenAI's format; the key `recserve` holds our own fields."""
        return [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "recserve",
                "recserve": {**self.runtime.versions(), **fields, **self._scorer_of(name)},
            }
            for name, fields in self.models.described(self.runtime.engine.strategies).items()
        ]

    def _scorer_of(self, model: str) -> dict[str, str]:
        """Returns the field `scorer` of a model that can rank."""
        scorer = SCORER_OF.get(model)
        known = () if self.rankings is None else self.rankings.scorers
        return {} if scorer is None or scorer not in known else {"scorer": scorer}

    def samples(self, num_users: int, num_items: int) -> dict[str, list[str]]:
        """Returns the ids of some users and of the most popular items."""
        snapshot = self.runtime.snapshot
        popular = snapshot.most_popular(num_items, np.zeros(0, np.int64), None)
        items = [snapshot.items.item_id(row) for row in popular.tolist()]
        users: list[str] = []
        if EVENTS in self.bundle.manifest.files:
            column = pq.read_table(self.bundle.path(EVENTS), columns=["user_id"]).column(0)
            users = column.unique().slice(0, num_users).to_pylist()
        return {"users": users, "items": items}


def open_parts(
    bundle: Bundle,
    store: str | None,
    device: Device,
    options: ServiceOptions,
    predecessor: ItemParts | None = None,
) -> ItemParts:
    """Loads a bundle and starts its engine, unless the bundle will replace another one.

    Args:
        bundle: The bundle. It is compared with its hashes unless that has been done.
        store: URL of the history store; None means `default_store`. An empty store is filled with
            the bundle's own events.
        device: Device of the models.
        options: The other options.
        predecessor: Parts that this bundle will replace. Their store and signing key are shared,
            and the store gets the bundle's events of new users only. The caller starts the engine.

    Raises:
        BundleError: If a file differs from its hash, or changes until it is loaded.
        StoreUnavailable: If the history store does not answer.
        JournalError: If the journal of item changes cannot be read.
        ValueError: If the device or an option does not fit this machine.
    """
    if not bundle.verified:
        bundle.verify()
    place = resolve_device(device)
    snapshot = Snapshot.of(bundle.catalog(), place)
    models = load_models(bundle, snapshot, place, options.dtype, options.weights)
    snapshot = replace(
        snapshot,
        graph=load_item_graph(bundle, place),
        index=item_index(models.recommender, models.heads),
    )
    opened = _store(bundle.root, store, options, predecessor)
    network, drafters = options.text.parts if options.text else (None, None)
    engine = build_engine(
        EngineModels(models.recommender, models.ranker, models.heads, network, drafters),
        options.engine,
    )
    try:
        engine.record(snapshot.trie)
        if predecessor is None:
            engine.start()
        runtime = Runtime(
            engine=engine,
            snapshot=snapshot,
            signer=_signer(options, predecessor),
            model_version=bundle.manifest.model_version,
            device=place,
        )
        journal = default_journal(bundle.root) if options.journal is None else options.journal
        path = journal / f"{bundle.manifest.catalog_version}.jsonl"
        names = options.event_types
        parts = _assemble(bundle, models, runtime, opened, ItemJournal(path), names, predecessor)
        parts.items.open_tools()
        bundle.check_unchanged()  # before the journal and the store are written
        parts.items.replay()
        runtime.histories.import_events(bundle, only_new_users=predecessor is not None)
    except BaseException:
        engine.close()
        if predecessor is None:
            opened.close()
        raise
    return parts


def _store(
    folder: Path, url: str | None, options: ServiceOptions, predecessor: ItemParts | None
) -> HistoryStore:
    """Opens the history store, or returns that of the predecessor."""
    if predecessor is not None:
        return predecessor.runtime.histories.store
    limit_ms = options.history_timeout_ms
    kept = StoreOptions(
        ttl_s=options.history_ttl_s, read_timeout_s=None if limit_ms is None else limit_ms / 1e3
    )
    return open_store(default_store(folder) if url is None else url, kept)


def _signer(options: ServiceOptions, predecessor: ItemParts | None) -> Signer:
    if predecessor is not None:
        return predecessor.runtime.signer
    return Signer(secrets.token_bytes(32) if options.signing_key is None else options.signing_key)


def _assemble(
    bundle: Bundle,
    models: Models,
    runtime: Runtime,
    store: HistoryStore,
    journal: ItemJournal,
    event_types: Sequence[str],
    predecessor: ItemParts | None,
) -> ItemParts:
    manifest, scorers = bundle.manifest, dict[str, ItemScorer]()
    ranking, ranker_roots, recommender_roots, recommendations = None, None, None, None
    tables, trained, types, default_value = None, tuple[str, ...](), EventTypes(store), 1.0
    if models.ranker is not None:
        catalog = runtime.snapshot.catalog
        tables = RankingTables.load(bundle.directory("ranker"), catalog.items, catalog.vectors)
        trained = tables.settings.type_names
    bundle.check_unchanged()  # before names are written to the store
    types.add(event_types)
    types.add_of_bundle((*manifest.type_names, *trained))
    if tables is not None and models.ranker is not None:
        ranking = LiveRanking(tables)
        runtime.snapshot = replace(runtime.snapshot, ranking=tables)
        salt = int.from_bytes(hashlib.sha256(manifest.model_version.encode()).digest()[:8])
        ranker_roots = RankerPrefixes(tables, types, salt, runtime.device)
        if tables.settings.has_values:
            default_value = tables.settings.mean_value
        scorers["ranker"] = RankerScorer(ranker_roots, models.ranker.config.tasks)
    if models.recommender is not None:
        recommender_roots = RecommenderPrefixes(models.recommender.config, runtime.device)
        weight = float(manifest.recommender.get("dense_weight", 0.0))
        retriever = models.heads.retriever
        outcomes = () if retriever is None else retriever.config.outcomes
        recommendations = Recommendations(runtime, recommender_roots, weight, outcomes)
        scorers["likelihood"] = LikelihoodScorer(recommender_roots)
    # The predecessor may still write to this file. Then it hands over content and file later.
    used = None if predecessor is None else predecessor.items.journal
    shared = used is not None and used.path.resolve() == journal.path.resolve()
    items = LiveItems(runtime, models, bundle, None if shared else journal, ranking)
    prewarm = Prewarm(runtime.engine, recommender_roots, ranker_roots)
    histories = Histories(store, types, runtime.engine, items, prewarm, default_value)
    histories.owns_store = predecessor is None
    runtime.histories = histories
    return ItemParts(
        bundle=bundle,
        models=models,
        runtime=runtime,
        items=items,
        recommendations=recommendations,
        rankings=Rankings(runtime, scorers) if scorers else None,
    )
