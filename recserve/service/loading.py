"""From a bundle to models in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from recserve.bundle import Bundle
from recserve.engine.heads import Heads
from recserve.models.drafters.nezha import load_self_draft
from recserve.models.ranker import Ranker, load_ranker
from recserve.models.recommender import Recommender, load_recommender
from recserve.service.snapshot import Snapshot

SELF_DRAFT = "drafters/nezha"
Device = Literal["auto", "cpu", "cuda"]


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
        if self.ranker is not None:
            said["ranker"] = {
                "parameters": _parameters(self.ranker),
                "tasks": list(self.ranker.config.tasks),
            }
        return said


def load_models(bundle: Bundle, snapshot: Snapshot, device: torch.device) -> Models:
    """Load what was trained. Raises ValueError where a model is damaged or does not fit."""
    catalog = snapshot.catalog
    vectors = torch.from_numpy(catalog.vectors)
    recommender = ranker = None
    heads = Heads()
    if bundle.has("recommender"):
        codes = torch.from_numpy(catalog.index.codes.astype("int64"))
        recommender = load_recommender(bundle.directory("recommender"), codes, vectors, device)
        if recommender.config.dense_head:
            with torch.inference_mode():
                recommender.dense_item_rows()  # once here, and then grown with the catalogue
        if bundle.has(SELF_DRAFT):
            heads = Heads(load_self_draft(bundle.directory(SELF_DRAFT), recommender))
    if bundle.has("ranker"):
        ranker = load_ranker(bundle.directory("ranker"), vectors, device)
    return Models(recommender, ranker, heads)


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


def _parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
