"""The model version: it changes with everything in a bundle that can change an answer."""

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recserve.bundle.bundle import MANIFEST, SETTINGS, UNTRAINED, Bundle, Manifest
from recserve.models.item_heads import SelfDraftConfig, SelfDraftHead, save_self_draft
from recserve.service import Service
from recserve.training.similar import train_similar
from tests.support.tiny_bundle import shared_bundle, tiny_bundle, with_models


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with every part: recommender, both draft heads, retriever, ranker, links."""
    folder = tiny_bundle(tmp_path_factory.mktemp("complete"), ranker=False, recommender=False)
    with_models(folder, every_strategy=True)
    train_similar(Bundle.open(folder))
    return folder


@pytest.fixture
def copied(complete: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(complete, tmp_path / "copy"))


def version(folder: Path) -> str:
    return Bundle.open(folder).manifest.model_version


def parts(folder: Path) -> list[str]:
    """Sections whose folder can be recorded by itself, and `build` for everything else."""
    return [*(name for name in Bundle.open(folder).manifest.sections if name != "build"), "build"]


def section_of(name: str, sections: list[str]) -> str:
    return next((one for one in sections if name.startswith(f"{one}/")), "build")


def test_each_file_of_a_bundle_changes_the_version(copied: Path) -> None:
    """One drawn byte of each file in turn; its section is recorded as training records it."""
    rng, seen = random.Random(7), {version(copied)}
    sections = parts(copied)
    assert len(sections) == 7
    for name in Bundle.open(copied).manifest.files:
        bundle = Bundle.open(copied)
        path = copied / name
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        section = section_of(name, sections)
        bundle.commit(section, bundle.manifest.sections[section])
        assert version(copied) not in seen, name
        seen.add(version(copied))


def test_bundles_that_differ_in_one_draft_head_differ_in_their_version(copied: Path) -> None:
    found = set()
    for seed in range(3):
        torch.manual_seed(seed)
        bundle = Bundle.open(copied)
        shape = SelfDraftConfig(32, bundle.catalog().semantic_ids.codebook_sizes, True)
        save_self_draft(SelfDraftHead(shape), bundle.directory("drafters/nezha"))
        bundle.commit("drafters/nezha", {})
        found.add(version(copied))
    assert len(found) == 3


def edited(folder: Path, section: str, key: str, value: Any) -> str:
    """Returns the version of a bundle with another value in its manifest."""
    path = folder / MANIFEST
    text = path.read_text()
    raw = json.loads(text)
    raw["sections"].setdefault(section, {})[key] = value
    path.write_text(json.dumps(raw))
    try:
        return version(folder)
    finally:
        path.write_text(text)


OTHER_VALUES = {
    "type_names": (["click", "listen"], ["watch"]),
    "collaborative_dim": (1, 2),
    "event_weights": (["x=2"], ["x=3"], ["y<2=0"]),
    "negative_weight": (0.5, 1),
    "event_kinds": ({"positive": ["x"]}, {"negative": ["y"]}),
    "own_vectors": (True,),
    "shared_ids": ("popular", "first", "all"),
    "dense_weight": (3.5, 7),
    "weight": (1.5, 3),
    "auto": (None,),
    "recommender": ("0" * 64, "1" * 64),
}


@pytest.mark.parametrize(("section", "key"), [(s, k) for s, keys in SETTINGS.items() for k in keys])
def test_each_setting_of_the_manifest_changes_the_version(
    copied: Path, section: str, key: str
) -> None:
    values = OTHER_VALUES[key]
    found = {version(copied), *(edited(copied, section, key, value) for value in values)}
    assert len(found) == 1 + len(values)


def test_a_further_section_changes_the_version(copied: Path) -> None:
    """A head is used only if its section is there."""
    before = json.loads((copied / MANIFEST).read_text())
    for name in before["sections"]:
        rest = {one: values for one, values in before["sections"].items() if one != name}
        (copied / MANIFEST).write_text(json.dumps(before | {"sections": rest}))
        assert version(copied) != before["model_version"], name


def test_times_figures_and_the_order_of_keys_change_nothing(copied: Path) -> None:
    before = version(copied)
    for path in copied.rglob("*"):
        os.utime(path, (1.0, 2.0))
    assert version(copied) == before
    raw = json.loads((copied / MANIFEST).read_text())

    def reverse(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: reverse(value[key]) for key in reversed(list(value))}

    (copied / MANIFEST).write_text(json.dumps(reverse(raw), indent=3))
    assert version(copied) == before
    for section in raw["sections"]:
        assert edited(copied, section, "seconds", 12.5) == before
        assert edited(copied, section, "validation", {"recall": 0.4}) == before
    bundle = Bundle.open(copied)
    for section in parts(copied):
        bundle.commit(section, bundle.manifest.sections[section])
    assert version(copied) == before


def test_a_bundle_names_what_it_holds_and_not_what_was_written(copied: Path) -> None:
    """Releases before covered fewer parts; their bundles get the full version, too."""
    raw = json.loads((copied / MANIFEST).read_text())
    (copied / MANIFEST).write_text(json.dumps(raw | {"model_version": "0123456789ab"}))
    assert version(copied) == raw["model_version"]


def test_a_bundle_without_models_is_untrained(tmp_path: Path) -> None:
    assert version(tiny_bundle(tmp_path, ranker=False, recommender=False)) == UNTRAINED


class Reads(dict[str, Any]):
    """A section that notes which of its keys are read."""

    def __init__(self, values: dict[str, Any], name: str, noted: set[tuple[str, str]]) -> None:
        super().__init__(values)
        self.name, self.noted = name, noted

    def __getitem__(self, key: str) -> Any:
        self.noted.add((self.name, key))
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.noted.add((self.name, key))
        return super().get(key, default)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[str, str]]]:
    """Keys of manifest sections that are read after a bundle is opened."""
    found: set[tuple[str, str]] = set()
    parse = Manifest.from_json

    def from_json(text: bytes) -> Manifest:
        read = parse(text)
        read.model_version  # noqa: B018 - its own reads are no use of a setting
        watched = {name: Reads(values, name, found) for name, values in read.sections.items()}
        return Manifest(read.catalog_version, read.files, watched)

    monkeypatch.setattr(Manifest, "from_json", staticmethod(from_json))
    yield found


def test_a_server_reads_no_setting_that_the_version_does_not_cover(
    complete: Path, tmp_path: Path, noted: set[tuple[str, str]]
) -> None:
    with Service.open(complete, store=f"lmdb:{tmp_path / 'history'}", device="cpu") as service:
        user = service.samples(1, 0)["users"][0]
        answer = service.recommend({"user": user, "strategy": "dense"})
        service.rank({"user": user, "candidates": [answer.items[0].item_id]})
        service.put_items({"items": [{"item_id": "new", "title": "a new item"}]})
        versions = {answer.model_version, service.versions()["model_version"]}
        assert versions == {version(complete)}
    assert ("recommender", "dense_weight") in noted
    assert ("build", "collaborative_dim") in noted
    assert noted <= {(section, key) for section, keys in SETTINGS.items() for key in keys}


def test_a_server_with_another_head_names_another_version(tmp_path: Path) -> None:
    """RecommendService, rankings and the Python API name the version of the bundle."""
    found = set()
    for seed in range(2):
        folder = tiny_bundle(tmp_path / str(seed))
        torch.manual_seed(seed)
        bundle = Bundle.open(folder)
        shape = SelfDraftConfig(32, bundle.catalog().semantic_ids.codebook_sizes, True)
        save_self_draft(SelfDraftHead(shape), bundle.directory("drafters/nezha"))
        bundle.commit("drafters/nezha", {})
        with Service.open(folder, store=f"lmdb:{tmp_path / f'h{seed}'}", device="cpu") as service:
            user = service.samples(1, 1)
            slate = service.recommend({"user": user["users"][0], "strategy": "nezha"})
            ranking = service.rank({"user": user["users"][0], "candidates": user["items"]})
            names = {
                slate.model_version,
                ranking.model_version,
                *(model["recserve"]["model_version"] for model in service.models()),
            }
            assert len(names) == 1
            found |= names
    assert len(found) == 2
    assert version(shared_bundle()) not in found
