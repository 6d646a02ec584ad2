"""Loads the models of a bundle into memory."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any, Literal

import torch

from recserve.bundle.bundle import ITEM_GRAPH, Bundle
from recserve.engine.build import EngineModels
from recserve.features.vectors.faiss_gpu import faiss_gpu, has_gpu
from recserve.features.vectors.item_graph import ItemLinks
from recserve.features.vectors.vector_index import FaissIndex, VersionIndex
from recserve.kernels.item_graph import ItemGraph
from recserve.kernels.linear.products import fastest_dtype
from recserve.models.dense_retriever import item_vectors, load_retriever
from recserve.models.imported_model import ImportedModel, load_model
from recserve.models.item_heads import SelfDraftHead, load_self_draft
from recserve.models.loading import DTYPES
from recserve.models.packing import pack_weights
from recserve.models.ranker import load_ranker
from recserve.models.recommender import Recommender
from recserve.models.semantic_id_model import Network, SemanticIdModel
from recserve.search.device_index import DeviceIndex
from recserve.search.strategy import Heads
from recserve.service.memory import ModelSize, fitting_dtypes
from recserve.service.snapshot import LISTS, Snapshot

log = logging.getLogger(__name__)

RETRIEVER = "retriever"
SPECULATIVE, NEZHA = "drafters/speculative", "drafters/nezha"
Device = Literal["auto", "cpu", "cuda"]
DTypeName = Literal["auto", "float32", "bfloat16"]


def model_fields(models: EngineModels, strategies: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Returns facts about each model of a bundle, keyed by its name.

    Args:
        models: The networks.
        strategies: Names of the strategies that the engine offers.

    Returns:
        The number of parameters of each model, with the strategies and outcomes of the
        recommender and the tasks of the ranker. Before its training, the recommender has the lists
        that a slate can have.
    """
    facts: dict[str, dict[str, Any]] = {}
    if models.recommender is None:
        facts["recommender"] = {
            "trained": False,
            "parameters": 0,
            "strategies": [],
            "lists": list(LISTS),
        }
    else:
        count = _count_parameters(models.recommender)
        facts["recommender"] = {"parameters": count, "strategies": list(strategies)}
        if isinstance(models.recommender, ImportedModel):
            config = models.recommender.config
            facts["recommender"] |= {
                "imported": config.imported,
                "rule": config.scoring.rule,
                "scoring": asdict(config.scoring),
            }
        if models.heads.retriever is not None:
            facts["recommender"]["outcomes"] = list(models.heads.retriever.config.outcomes)
    if models.ranker is not None:
        count, tasks = _count_parameters(models.ranker), list(models.ranker.config.tasks)
        facts["ranker"] = {"parameters": count, "tasks": tasks}
    return facts


def load_models(
    bundle: Bundle,
    snapshot: Snapshot,
    device: torch.device,
    dtype: DTypeName | None = None,
    weights: str | None = None,
) -> EngineModels:
    """Loads all models that the bundle contains.

    Args:
        bundle: The open bundle.
        snapshot: The bundle's catalogue, whose rows the models bind to.
        device: Device of the models.
        dtype: Element type of the recommender and its heads; "auto" picks the fastest one that
            fits here. None is float32 on a CPU and "auto" on CUDA.
        weights: Format of the recommender's decoder weights; None means the element type.

    Raises:
        ValueError: If a model is damaged or does not fit the catalogue.
    """
    catalog = snapshot.catalog
    vectors = torch.from_numpy(catalog.vectors)
    recommender = ranker = None
    heads = Heads()
    if bundle.has("recommender"):
        codes = torch.from_numpy(catalog.semantic_ids.codes.astype("int64"))
        recommender = load_model(bundle.directory("recommender"), codes, vectors, device)
        count = _count_parameters(recommender)
        size = ModelSize(count, loaded_bytes=count * torch.float32.itemsize, weights=weights)
        recommender.to(resolve_dtype(dtype, device, size))
        if weights is not None:
            pack_weights(recommender.decoder, weights)  # `pack` packs the rest
        recommender.pack()
        heads = load_heads(bundle, recommender)
        if isinstance(recommender, Recommender) and recommender.config.dense_head:
            with torch.inference_mode():
                recommender.dense_item_rows()  # computed once; new items append rows
    if bundle.has("ranker"):
        ranker = load_ranker(bundle.directory("ranker"), vectors, device)
        ranker.pack()
    return EngineModels(recommender, ranker, heads)


def load_heads(bundle: Bundle, recommender: SemanticIdModel) -> Heads:
    """Loads the draft heads and the retriever that the bundle contains.

    A head that was trained on another recommender would propose useless items. It is skipped with
    a warning.

    Args:
        bundle: The open bundle.
        recommender: The recommender of the bundle.

    Raises:
        ValueError: If a head is damaged or does not fit the recommender.
    """

    def fits(section: str) -> bool:
        if not bundle.has(section):
            return False
        digest = bundle.digest("recommender")
        # Bundles of older releases do not record the digest; their heads are assumed to fit.
        same = bool(bundle.manifest.sections[section].get("recommender", digest) == digest)
        if not same:
            log.warning("%s belongs to another recommender and is unused; train it again", section)
        return same

    prefixes: SelfDraftHead | None = None
    if fits(SPECULATIVE):
        prefixes = load_self_draft(bundle.directory(SPECULATIVE), recommender)
        prefixes.pack()
    nezha = retriever = None
    if fits(NEZHA):
        nezha = load_self_draft(bundle.directory(NEZHA), recommender)
        nezha.pack()
    if fits(RETRIEVER):
        retriever = load_retriever(bundle.directory(RETRIEVER), recommender)
    return Heads(prefixes, nezha, retriever)


def item_index(
    recommender: SemanticIdModel | None, heads: Heads, device: Device = "cpu"
) -> VersionIndex | DeviceIndex | None:
    """Returns a search index over the retriever's item vectors; None without a retriever.

    Args:
        recommender: The recommender.
        heads: Its heads.
        device: Where to search; "auto" is the recommender's device if faiss is built for it.

    Raises:
        ValueError: If the device is "cuda" and the recommender or faiss computes elsewhere.
    """
    if recommender is None:
        return None
    place = recommender.tokens.weight.device
    if device == "cuda" and place.type != "cuda":
        raise ValueError(f"index_device is cuda, but the models run on {place.type}")
    if heads.retriever is None:
        return None
    index = VersionIndex.on(FaissIndex(item_vectors(heads.retriever, recommender).numpy()))
    if device == "cpu" or place.type != "cuda" or (device == "auto" and not has_gpu()):
        return index
    return DeviceIndex.on(index, faiss_gpu(place.index or 0), place)


def load_item_graph(bundle: Bundle, device: torch.device) -> ItemGraph | None:
    """Loads the graph of similar items that was saved with the recommender.

    Returns:
        The graph on the device; None if the bundle has none.

    Raises:
        ValueError: If the file is damaged.
    """
    name = f"recommender/{ITEM_GRAPH}"
    if name not in bundle.manifest.files:
        return None
    return graph_of_links(ItemLinks.load(bundle.path(name)), device)


def graph_of_links(links: ItemLinks, device: torch.device) -> ItemGraph:
    """Returns the graph as tensors on the device that searches it."""
    near, entries = torch.from_numpy(links.neighbours), torch.from_numpy(links.entries)
    return ItemGraph(near, entries).to(device)


def resolve_device(name: Device) -> torch.device:
    """Returns the torch device for a name; "auto" is CUDA where it is available.

    Raises:
        ValueError: If the name is "cuda" and there is no CUDA device.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch finds no CUDA device")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def resolve_dtype(
    name: DTypeName | None,
    device: torch.device,
    size: ModelSize | None = None,
) -> torch.dtype:
    """Returns the torch dtype for a name; "auto" is the fastest dtype that fits into memory.

    On a CPU the fastest dtype is that of `products.fastest_dtype`. bfloat16 rounds every weight to
    8 significant bits, so scores differ in the third digit. "auto" never stores weights in 8 bits,
    which would change answers more.

    Args:
        name: Name of a dtype, or "auto". None is float32 on a CPU and "auto" on CUDA.
        device: Device of the model.
        size: Size that "auto" compares with the free memory; None does not compare.

    Raises:
        ValueError: If the name is "auto" and the model fits in no dtype.
    """
    if name is None and device.type != "cuda":
        name = "float32"
    if name is not None and name != "auto":
        return DTYPES[name]
    candidates: tuple[torch.dtype, ...] = torch.float32, torch.bfloat16
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        candidates = (torch.bfloat16,)
    fitting = candidates if size is None else fitting_dtypes(candidates, size, device)
    if device.type == "cuda" or len(fitting) == 1:
        log.info("dtype auto: %s", str(fitting[0])[6:])
        return fitting[0]
    found = fastest_dtype(fitting)
    log.info("dtype auto: %s is the fastest on this processor", str(found)[6:])
    return found


def _count_parameters(model: Network) -> int:
    return sum(p.numel() for p in model.parameters())
