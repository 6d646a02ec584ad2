"""From a bundle to models in memory."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from recserve.bundle.bundle import ITEM_GRAPH, Bundle
from recserve.features.vectors.grown_index import GrownIndex
from recserve.features.vectors.item_graph import ItemLinks
from recserve.features.vectors.vector_index import FaissIndex
from recserve.kernels.trie.item_graph import ItemGraph
from recserve.models.config import DecoderConfig
from recserve.models.dense_retriever import item_vectors, load_retriever
from recserve.models.drafters.nezha import load_self_draft
from recserve.models.drafters.prefix_head import PrefixHead, load_prefix_head
from recserve.models.loading import DTYPES
from recserve.models.packing import fastest_dtype
from recserve.models.ranker import Ranker, load_ranker
from recserve.models.recommender import Recommender, load_recommender
from recserve.search.recommend_strategy import Heads
from recserve.service.catalog.snapshot import Snapshot

log = logging.getLogger(__name__)

RETRIEVER = "retriever"
SPECULATIVE, NEZHA = "drafters/speculative", "drafters/nezha"
Device = Literal["auto", "cpu", "cuda"]
DTypeName = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True)
class Models:
    """What the bundle holds; None: not trained."""

    recommender: Recommender | None
    ranker: Ranker | None
    heads: Heads

    def described(self, strategies: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        """Parameters, and what each model offers, by name."""
        said: dict[str, dict[str, Any]] = {}
        if self.recommender is not None:
            said["recommender"] = {
                "parameters": _parameters(self.recommender),
                "strategies": list(strategies),
            }
            if self.heads.retriever is not None:
                said["recommender"]["outcomes"] = list(self.heads.retriever.config.outcomes)
        if self.ranker is not None:
            said["ranker"] = {
                "parameters": _parameters(self.ranker),
                "tasks": list(self.ranker.config.tasks),
            }
        return said


def load_models(
    bundle: Bundle,
    snapshot: Snapshot,
    device: torch.device,
    dtype: DTypeName = "float32",
) -> Models:
    """Load what was trained. dtype: of the recommender and its heads; "auto" is the fastest here.

    Raises ValueError where a model is damaged or does not fit.
    """
    catalog = snapshot.catalog
    vectors = torch.from_numpy(catalog.vectors)
    recommender = ranker = None
    heads = Heads()
    if bundle.has("recommender"):
        codes = torch.from_numpy(catalog.index.codes.astype("int64"))
        recommender = load_recommender(bundle.directory("recommender"), codes, vectors, device)
        recommender.to(resolve_dtype(dtype, recommender.config.decoder, device))
        recommender.pack()
        heads = load_heads(bundle, recommender)
        if recommender.config.dense_head:
            with torch.inference_mode():
                recommender.dense_item_rows()  # once here, and then grown with the catalogue
    if bundle.has("ranker"):
        ranker = load_ranker(bundle.directory("ranker"), vectors, device)
        ranker.pack()
    return Models(recommender, ranker, heads)


def load_heads(bundle: Bundle, recommender: Recommender) -> Heads:
    """The networks beside the recommender that were trained.

    One that was trained on an earlier recommender would find nonsense: it is left out, and a
    warning says so. Raises ValueError where one is damaged or does not fit.
    """

    def fits(section: str) -> bool:
        if not bundle.has(section):
            return False
        digest = bundle.digest("recommender")
        # Heads of before this was recorded are taken at their word.
        same = bool(bundle.manifest.sections[section].get("recommender", digest) == digest)
        if not same:
            log.warning("%s belongs to another recommender: train it again; left out", section)
        return same

    prefixes: PrefixHead | None = None
    if fits(SPECULATIVE):
        prefixes = load_prefix_head(bundle.directory(SPECULATIVE), recommender)
        prefixes.pack()
    nezha = retriever = None
    if fits(NEZHA):
        nezha = load_self_draft(bundle.directory(NEZHA), recommender)
        nezha.pack()
    if fits(RETRIEVER):
        retriever = load_retriever(bundle.directory(RETRIEVER), recommender)
    return Heads(prefixes, nezha, retriever)


def item_index(recommender: Recommender | None, heads: Heads) -> GrownIndex | None:
    """The retriever's item vectors, ready to be searched; None where there is no retriever."""
    if recommender is None or heads.retriever is None:
        return None
    return GrownIndex.on(FaissIndex(item_vectors(heads.retriever, recommender).numpy()))


def load_item_graph(bundle: Bundle, device: torch.device) -> ItemGraph | None:
    """The graph that was saved with the recommender, if one was. Raises ValueError if damaged."""
    name = f"recommender/{ITEM_GRAPH}"
    if name not in bundle.manifest.files:
        return None
    return graph_of_links(ItemLinks.load(bundle.path(name)), device)


def graph_of_links(links: ItemLinks, device: torch.device) -> ItemGraph:
    """The same graph on the device that searches it."""
    near, entries = torch.from_numpy(links.neighbours), torch.from_numpy(links.entries)
    return ItemGraph(near, entries).to(device)


def default_store(bundle: Path) -> str:
    """URL of the store that is used when none is named: an LMDB folder beside the bundle."""
    bundle = bundle.resolve()
    return f"lmdb:{bundle.with_name(bundle.name + '.history')}"


def default_journal(bundle: Path) -> Path:
    """Folder of the changes of items where none is named: beside the bundle."""
    bundle = bundle.resolve()
    return bundle.with_name(bundle.name + ".items")


def resolve_device(name: Device) -> torch.device:
    """Where tensors live. Raises ValueError for CUDA where there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch sees no CUDA device here")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def resolve_dtype(name: DTypeName, decoder: DecoderConfig, device: torch.device) -> torch.dtype:
    """The type that a name stands for. "auto": the one whose products are fastest on the device.

    bfloat16 rounds every weight to 8 significant bits, so scores differ in the third digit.
    """
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    found = fastest_dtype(decoder, (torch.float32, torch.bfloat16))
    log.info("dtype auto: %s is the fastest on this processor", str(found)[6:])
    return found


def _parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
