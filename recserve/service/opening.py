"""From a bundle on disk to the parts of a service: models, engine, store, journal."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from recserve.bundle.bundle import Bundle
from recserve.engine.build import EngineModels, build_engine
from recserve.engine.engine_config import EngineConfig
from recserve.features.catalog.item_journal import ItemJournal
from recserve.features.history_stores import open_store
from recserve.service.catalog.snapshot import Snapshot
from recserve.service.history.histories import Histories
from recserve.service.history.incoming import import_events
from recserve.service.loading import (
    Device,
    DTypeName,
    Models,
    default_journal,
    default_store,
    item_index,
    load_item_graph,
    load_models,
    resolve_device,
)
from recserve.service.recommend.attribution import Signer
from recserve.service.runtime import Runtime
from recserve.service.text.text_loading import LoadedText


@dataclass(frozen=True)
class Parts:
    """What a service is made of; the engine runs already."""

    bundle: Bundle
    runtime: Runtime
    models: Models
    journal: ItemJournal


def open_parts(
    folder: Path,
    store: str | None,
    device: Device,
    dtype: DTypeName,
    signing_key: bytes,
    sizes: EngineConfig,
    journal: Path | None,
    text: LoadedText | None = None,
) -> Parts:
    """Load everything; arguments and errors as in Service.open."""
    bundle = Bundle.open(folder)
    place = resolve_device(device)
    snapshot = Snapshot.of(bundle.catalog(), place)
    models = load_models(bundle, snapshot, place, dtype)
    snapshot = replace(
        snapshot,
        graph=load_item_graph(bundle, place),
        index=item_index(models.recommender, models.heads),
    )
    url = default_store(folder) if store is None else store
    opened_store = open_store(url)
    import_events(opened_store, bundle)
    histories = Histories(opened_store, blocks=not url.startswith("lmdb:"))
    network, drafters = text.parts if text else (None, None)
    engine = build_engine(
        EngineModels(models.recommender, models.ranker, models.heads, network, drafters), sizes
    )
    engine.record(snapshot.trie)
    engine.start()
    version = bundle.manifest.model_version
    runtime = Runtime(engine, snapshot, histories, Signer(signing_key), version, place)
    kept = default_journal(folder) if journal is None else journal
    name = f"{bundle.manifest.catalog_version}.jsonl"
    return Parts(bundle, runtime, models, ItemJournal(kept / name))
