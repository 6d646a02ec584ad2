"""Damage anywhere in a bundle is found when it is opened, not by a later request."""

import hashlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from recserve.bundle.bundle import CHECKS, FILES, Bundle, BundleError, Manifest
from recserve.service import Service
from tests.support.tiny_bundle import shared_bundle


@pytest.mark.parametrize("part", [0.02, 0.5, 0.98])
def test_a_changed_bit_in_any_file_is_found_at_the_start(tmp_path, part):
    """Also in files that only a later request would read, such as the quantiser's."""
    folder = Path(shutil.copytree(shared_bundle(), tmp_path / "bundle"))
    for name, entry in sorted(Bundle.open(folder).manifest.files.items()):
        path, sound = folder / name, (folder / name).read_bytes()
        place = int(entry.size * part)
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 4]) + sound[place + 1 :])
        with pytest.raises(BundleError, match=re.escape(f"{name}: sha256")):
            Service.open(folder, f"lmdb:{tmp_path / 'store'}", "cpu")
        path.write_bytes(sound)


WRONG = (True, "1", "x", -1, 1.5, 10**9, 2**70, float("nan"), float("inf"), None, [], [None], {}, 3)
# Values of WRONG that a setting may have.
RIGHT = {
    "type_names": [[]],
    "levels": [None, 3],
    "codes": [None, 3],
    "text_dim": [3],
    "collaborative_dim": [3],
    "collaborative_weight": [1.5, 3],
    "seed": [3, 10**9],
    "holdout_users": [3, 10**9],
    "event_kinds": [{}],
    "event_weights": [[]],
    "split": [{}],
    "own_vectors": [True],
    "has_timestamps": [True],
    "dense_weight": [1.5, 3],
    "weight": [1.5, 3],
    "negative_weight": [1.5, 3],
    "auto": [None],
}


@pytest.mark.parametrize(
    ("section", "name"), [(one, name) for one, names in CHECKS.items() for name in names]
)
def test_a_setting_of_another_type_or_range_is_named_at_the_start(section, name):
    sound = Bundle.open(shared_bundle()).manifest
    for value in WRONG:
        values = sound.sections.get(section, {}) | {name: value}
        text = replace(sound, sections={**sound.sections, section: values}).to_json().encode()
        if any(repr(value) == repr(one) for one in RIGHT.get(name, ())):
            Manifest.from_json(text)
            continue
        with pytest.raises(
            BundleError, match=rf"manifest\.json: {section}\.{name} is .*; expected "
        ):
            Manifest.from_json(text)


def test_a_section_has_its_files(tmp_path):
    sound = Bundle.open(shared_bundle()).manifest
    for section in sound.sections:
        for name in FILES[section]:
            folder = tmp_path / name.replace("/", ".")
            shutil.copytree(shared_bundle(), folder)
            files = {one: entry for one, entry in sound.files.items() if one != name}
            (folder / "manifest.json").write_text(replace(sound, files=files).to_json())
            with pytest.raises(BundleError, match=f"a section {section}, but files has no {name}"):
                Bundle.open(folder)


def column(name, change):
    """Damages a column of the catalogue; `change` gets its values."""

    def damage(folder):
        path = folder / "catalog.parquet"
        table = pq.read_table(path)
        place = table.column_names.index(name)
        values = change(table.column(name).to_pylist())
        pq.write_table(table.set_column(place, name, values), path)
        return f"column {name}"

    return damage


def number(file, value, name=None):
    """Damages one number of an array; `name` None is the largest array."""

    def damage(folder):
        arrays = load_file(folder / file)
        key = name or max(arrays, key=lambda one: arrays[one].size)
        arrays[key].reshape(-1)[-1] = value
        save_file(arrays, folder / file)
        return f"{key} holds NaN or infinity"

    return damage


def field(file, name, value, message=None):
    """Damages a field of a JSON file."""

    def damage(folder):
        content = json.loads((folder / file).read_text())
        place = content
        for part in name.split(".")[:-1]:
            place = place[part]
        place[name.split(".")[-1]] = value
        (folder / file).write_text(json.dumps(content))
        return message or f"{Path(file).name}: {name} is"

    return damage


def fewer(file, name, axis=0):
    """Shortens an array, whose file fits itself, but no other file."""

    def damage(folder):
        arrays = load_file(folder / file)
        arrays[name] = np.ascontiguousarray(np.delete(arrays[name], 0, axis))
        save_file(arrays, folder / file)
        return "catalogue|require|expected"

    return damage


def without_codes(folder):
    """Removes a code of each level of the quantiser."""
    path = folder / "quantizer/quantizer.safetensors"
    books = load_file(path).items()
    save_file({name: np.ascontiguousarray(book[1:]) for name, book in books}, path)
    return "it maps .* numbers to codes of .*; the catalogue has"


NAN, INF = float("nan"), float("inf")
RANKER, RECOMMENDER = "ranker/config.json", "recommender/config.json"
DAMAGES = {
    "null ids": column("item_id", lambda ids: pa.array([None, *ids[1:]])),
    "integer ids": column("item_id", lambda ids: pa.array(range(len(ids)))),
    "an empty id": column("item_id", lambda ids: pa.array(["", *ids[1:]])),
    "null titles": column("title", lambda titles: pa.array([None, *titles[1:]])),
    "categories as text": column("categories", lambda paths: pa.array(["x"] * len(paths))),
    "a null path": column("categories", lambda paths: pa.array([[None], *paths[1:]])),
    "null counts": column("__popularity", lambda n: pa.array([None, *n[1:]], pa.float32())),
    "NaN as count": column("__popularity", lambda n: pa.array([NAN, *n[1:]], pa.float32())),
    "codes as text": column("__semantic_id", lambda codes: pa.array(["1"] * len(codes))),
    "null codes": column("__semantic_id", lambda codes: pa.array([[None] * 3, *codes[1:]])),
    "vectors of NaN": number("vectors.safetensors", NAN),
    "a quantiser of NaN": number("quantizer/quantizer.safetensors", NAN),
    "a quantiser of infinity": number("quantizer/quantizer.safetensors", INF),
    "a text encoder of NaN": number("text/text.safetensors", NAN, "idf"),
    "features of NaN": number("ranker/features.safetensors", NAN, "item_counts"),
    "narrow vectors": fewer("vectors.safetensors", "vectors", 1),
    "a narrow text encoder": fewer("text/text.safetensors", "components", 1),
    "short features": fewer("ranker/features.safetensors", "item_counts"),
    "a smaller quantiser": without_codes,
    "levels of the quantiser": field("quantizer/config.json", "levels", 1.5),
    "text in the recommender": field(RECOMMENDER, "decoder.hidden_size", "x"),
    "a number as flag": field(RECOMMENDER, "dense_head", 1),
    "no history": field(RECOMMENDER, "max_history_items", 0, "max_history_items is 0"),
    "NaN in the recommender": field(RECOMMENDER, "level_temperature", NAN),
    "text in the ranker": field(RANKER, "num_layers", "x"),
    "many layers of the ranker": field(RANKER, "num_layers", 2**40, "num_layers is"),
    "an unknown field": field(RANKER, "colour", 1, "colour is unknown"),
    "a window of the ranker": field("ranker/features.json", "block", 0, "block is 0"),
    "a mean of infinity": field("ranker/features.json", "mean_value", INF),
    "sizes of a draft head": field(
        "drafters/nezha/config.json", "hidden_size", "x", "hidden_size is"
    ),
    "plans of a draft head": field(
        "drafters/nezha/config.json", "calibration", {"x": []}, "WIDTH/K"
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_part_that_cannot_be_used_is_named_at_the_start(name, tmp_path):
    """Its hash fits, as after a faulty build."""
    folder = Path(shutil.copytree(shared_bundle(), tmp_path / "bundle"))
    message = DAMAGES[name](folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    for file, said in manifest["files"].items():
        content = (folder / file).read_bytes()
        said |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=message):
        Service.open(folder, f"lmdb:{tmp_path / 'store'}", "cpu")
