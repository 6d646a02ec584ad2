"""Every format of files that is loaded: a function that writes a folder and returns its loader."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from recserve.bundle.bundle import CATALOG, VECTORS, Bundle
from recserve.doctor.drafter_kind import drafter_files
from recserve.drafters.mask_tokens.files import save_mask_tokens
from recserve.drafters.registry import build_drafter
from recserve.features.catalog.catalog import Catalog
from recserve.features.ranking.ranking_tables import RankingTables
from recserve.features.vectors.item_graph import ItemLinks, link_items
from recserve.features.vectors.quantizer import fit_quantizer, load_quantizer
from recserve.features.vectors.text_encoder import TextEncoder
from recserve.models.config import DecoderConfig, RecommenderConfig
from recserve.models.dense_retriever import load_retriever
from recserve.models.history_bonus import HistoryBonus, load_history_bonus
from recserve.models.item_heads import load_self_draft
from recserve.models.loading import load_language_model
from recserve.models.ranker import load_ranker
from recserve.models.recommender import Recommender, load_recommender, save_recommender
from recserve.models.sasrec import SasRec, SasRecConfig, load_sasrec, save_sasrec
from recserve.tokenizer.tokenizer import TextTokenizer
from tests.support import published_block, published_eagle, published_mtp
from tests.support.drafter_folders import uneven_model, write_drawn
from tests.support.mask_tokens_drafter import mask_network
from tests.support.model_folders import drawn
from tests.support.scripted_text import byte_tokenizer
from tests.support.shared_folders import shared_folder
from tests.support.tiny_bundle import shared_bundle, with_models

Load = Callable[[], object]
Format = Callable[[Path], Load]
# Kinds of drafters that write_drawn writes, and the drafter that reads them.
DRAWN = {
    **{kind: kind for kind in ("mtp", "medusa", "specformer", "mask_tokens")},
    **{"eagle-1": "eagle", "eagle-3": "eagle", "dflash": "block", "dspark": "block"},
}


def drafter(kind: str) -> Format:
    def write(folder: Path) -> Load:
        if kind == "mask_tokens":
            save_mask_tokens(mask_network(uneven_model()), folder)
        else:
            write_drawn(kind, folder)
        return lambda: build_drafter(DRAWN[kind], uneven_model(), [folder])

    return write


def published(name: str, make: Callable[[], tuple[dict, dict]]) -> Format:
    def write(folder: Path) -> Load:
        torch.manual_seed(0)
        published_mtp.write_folder(folder, *make())
        return lambda: build_drafter(name, uneven_model(), [folder])

    return write


def language_model(family: str) -> Format:
    def write(folder: Path) -> Load:
        drawn(folder, family)
        (folder / "generation_config.json").unlink(missing_ok=True)
        return lambda: load_language_model(folder)

    return write


def recommender(**more) -> Format:
    def write(folder: Path) -> Load:
        config = RecommenderConfig(DecoderConfig(16, 1, 2, 1, 8, 32), (4, 4), **more)
        save_recommender(Recommender(config), folder)
        return lambda: load_recommender(folder)

    return write


def sasrec(folder: Path) -> Load:
    save_sasrec(SasRec(SasRecConfig(9, 8, num_heads=2)), folder)
    return lambda: load_sasrec(folder)


def bonus(folder: Path) -> Load:
    offsets, rows = np.array([0, 1, 1]), np.array([1], np.int32)
    HistoryBonus(offsets, rows, np.ones(1, np.float32), 0.5).save(folder)
    return lambda: load_history_bonus(folder, 2)


def quantizer(kind: str) -> Format:
    def write(folder: Path) -> Load:
        vectors = torch.randn(40, 8, generator=torch.Generator().manual_seed(0)).numpy()
        fit_quantizer(kind, vectors, (4, 4), 0).save(folder)
        return lambda: load_quantizer(folder)

    return write


def graph(folder: Path) -> Load:
    path = folder / "item_graph.safetensors"
    codes = torch.cartesian_prod(torch.arange(4), torch.arange(4)).numpy()
    link_items(codes, [torch.randn(4, 3).numpy() for _ in range(2)]).save(path)
    return lambda: ItemLinks.load(path)


def write_full_bundle(folder: Path) -> None:
    shutil.copytree(shared_bundle(), folder, dirs_exist_ok=True)
    with_models(folder, every_strategy=True)


def bundled(part: str) -> Format:
    """A part of a bundle that has every model."""

    def write(folder: Path) -> Load:
        bundle = Bundle.open(shared_folder("bundle-with-every-model", write_full_bundle))
        catalog, model = bundle.catalog(), load_recommender(bundle.directory("recommender"))
        if part == "vectors":
            shutil.copy(bundle.root / VECTORS, folder)
            return lambda: Catalog.load(bundle.path(CATALOG), folder / VECTORS, "")
        shutil.copytree(bundle.directory(part), folder, dirs_exist_ok=True)
        return {
            "retriever": lambda: load_retriever(folder, model),
            "drafters/nezha": lambda: load_self_draft(folder, model),
            "text": lambda: TextEncoder.load(folder),
            "ranker": lambda: (
                load_ranker(folder, catalog.vectors),
                RankingTables.load(folder, catalog.items, catalog.vectors),
            ),
        }[part]

    return write


def tokenizer(folder: Path) -> Load:
    byte_tokenizer(folder)
    return lambda: TextTokenizer.open(folder)


def doctor(folder: Path) -> Load:
    """What `recserve doctor` reads of a drafter."""
    write_drawn("dflash", folder)
    return lambda: drafter_files(folder).fields


EAGLE = published_eagle.LAYOUTS | {
    "p-eagle": published_eagle.peagle,
    "hass": published_eagle.hass_speculators,
}
LAYOUTS = {"eagle": EAGLE, "block": published_block.LAYOUTS, "mtp": published_mtp.LAYOUTS}
FORMATS: dict[str, Format] = {
    **{family: language_model(family) for family in ("llama", "llama-biases", "qwen3")},
    **{kind: drafter(kind) for kind in DRAWN},
    **{
        f"{family} of {name}": published(family, make)
        for family, layouts in LAYOUTS.items()
        for name, make in layouts.items()
    },
    "recommender": recommender(normalization="vocabulary", input="codes"),
    "recommender, tied": recommender(tied=True),
    "sasrec": sasrec,
    "history bonus": bonus,
    "residual quantizer": quantizer("residual"),
    "product quantizer": quantizer("product"),
    "item graph": graph,
    **{
        part: bundled(part) for part in ("retriever", "drafters/nezha", "ranker", "text", "vectors")
    },
    "tokenizer": tokenizer,
    "doctor": doctor,
}


def fingerprint(loaded: object) -> object:
    """Configuration and weights of a network, or of the one in a drafter; None of all else."""
    loaded = getattr(loaded, "network", getattr(loaded, "heads", loaded))
    if isinstance(loaded, tuple):
        return tuple(map(fingerprint, loaded))
    if not isinstance(loaded, torch.nn.Module):
        return None
    sums = {name: weight.double().sum().item() for name, weight in loaded.state_dict().items()}
    return repr(getattr(loaded, "config", None)), sums


def change_file(path: Path, change: Callable[[dict], dict]) -> None:
    """Replaces the tensors or fields of a file."""
    if path.suffix == ".safetensors":
        tensors = {name: one.contiguous().clone() for name, one in change(load_file(path)).items()}
        save_file(tensors, path)
    else:
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
