"""Settings that another version of recserve stored are refused in words, at every reader."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recserve.bundle.bundle import Bundle
from recserve.features.ranking.ranking_tables import RankingTables
from recserve.files import parse_record
from recserve.models.config import RecommenderConfig
from recserve.models.item_heads import Calibration
from recserve.models.ranker import load_ranker
from recserve.models.sasrec import SasRecConfig, load_sasrec
from recserve.training.recommender.recommender import ITEMS, recorded_recipe
from tests.support.tiny_bundle import shared_bundle

Settings = dict[str, Any]


def read_recipe(folder: Path, settings: Settings) -> object:
    manifest = SimpleNamespace(recommender={"recipe": settings})
    return recorded_recipe(SimpleNamespace(manifest=manifest, root=folder))  # type: ignore[arg-type]


def read_recommender(folder: Path, settings: Settings) -> object:
    return parse_record(settings, RecommenderConfig)


def read_ranker(folder: Path, settings: Settings) -> object:
    (folder / "ranker/config.json").write_text(json.dumps(settings))
    return load_ranker(folder / "ranker", np.zeros((1, 1), np.float32))


def read_features(folder: Path, settings: Settings) -> object:
    catalog = Bundle.open(folder).catalog()
    (folder / "ranker/features.json").write_text(json.dumps(settings))
    return RankingTables.load(folder / "ranker", catalog.items, catalog.vectors)


def read_sasrec(folder: Path, settings: Settings) -> object:
    (folder / "config.json").write_text(json.dumps(settings))
    return load_sasrec(folder)


def read_calibration(folder: Path, settings: Settings) -> object:
    return Calibration.from_dict({"10/10": [settings]})


def stored(folder: Path, name: str) -> Settings:
    settings: Settings = json.loads((folder / name).read_text())
    return settings


PLAN = {"margin": 1.0, "nodes": 3.0, "repairs": 0.0, "proved": 1.0}
DOORS: dict[str, tuple[Callable[[Path, Settings], object], Callable[[Path], Settings], str]] = {
    "recipe": (read_recipe, lambda folder: json.loads(json.dumps(asdict(ITEMS))), ""),
    "schedule": (read_recipe, lambda folder: json.loads(json.dumps(asdict(ITEMS))), "schedule"),
    "objective": (read_recipe, lambda folder: json.loads(json.dumps(asdict(ITEMS))), "objective"),
    "recommender": (read_recommender, lambda f: stored(f, "recommender/config.json"), ""),
    "decoder": (read_recommender, lambda f: stored(f, "recommender/config.json"), "decoder"),
    "ranker": (read_ranker, lambda folder: stored(folder, "ranker/config.json"), ""),
    "features": (read_features, lambda folder: stored(folder, "ranker/features.json"), ""),
    "sasrec": (read_sasrec, lambda folder: asdict(SasRecConfig(5, 8)), ""),
    "calibration": (read_calibration, lambda folder: dict(PLAN), ""),
}


@pytest.mark.parametrize("change", ["new", "renamed"])
@pytest.mark.parametrize("door", DOORS)
def test_foreign_settings_are_named(door: str, change: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(shared_bundle(), tmp_path / "bundle"))
    read, make, part = DOORS[door]
    settings = make(folder)
    inner = settings[part] if part else settings
    if change == "new":
        inner["patience"] = 3
        expected = "patience"
    else:
        expected = next(iter(inner))
        inner[f"{expected}_before"] = inner.pop(expected)
        expected += "_before"
    with pytest.raises(ValueError) as caught:
        read(folder, settings)
    message = str(caught.value)
    assert expected in message
    assert "__init__" not in message and "argument" not in message
