"""The bundle: what is written is read back; a hostile or damaged folder is refused by name."""

import hashlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recserve.bundle.building import BuildOptions, build_bundle
from recserve.bundle.bundle import (
    FORMAT,
    UNTRAINED,
    Bundle,
    BundleError,
    FileEntry,
    FileState,
    Manifest,
)
from recserve.features.synthetic import SyntheticOptions, write_synthetic


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    files = write_synthetic(folder, SyntheticOptions(500, 60, 12))
    build_bundle(
        BuildOptions(files.items, files.events, folder / "b", levels=2, codes=16, text_dim=16),
        log=lambda line: None,
    )
    return folder / "b"


@pytest.fixture
def copied(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "b"))


def change(path: Path, **fields: Any) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | fields))


def test_everything_is_read_back(built: Path) -> None:
    bundle = Bundle.open(built)
    bundle.verify()
    catalog, events = bundle.catalog(), bundle.events()
    assert catalog.version == bundle.manifest.catalog_version and len(catalog.version) == 12
    assert bundle.manifest.model_version == UNTRAINED and bundle.manifest.recommender == {}
    assert events.num_users == 60 and events.item_rows.max() < len(catalog)
    assert np.array_equal(catalog.popularity, events.leave_one_out().train.popularity(500))
    encoder = bundle.text_encoder()
    assert encoder is not None
    codes = bundle.quantizer().encode(catalog.vectors)
    assert np.array_equal(codes, catalog.semantic_ids.codes[:, :2])
    assert bundle.manifest.build["levels"] == 2
    assert str(built.parent) not in (built / "manifest.json").read_text()


def test_manifest_round_trip() -> None:
    entry = FileEntry("0" * 64, 3)
    manifest = Manifest("c", {"a/b.bin": entry}, {"ranker": {"auc": 0.7}})
    assert Manifest.from_json(manifest.to_json().encode()) == manifest


def test_commit_hashes_the_section_and_changes_the_model_version(copied: Path) -> None:
    bundle = Bundle.open(copied)
    folder = bundle.directory("recommender")
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_bytes(b"{}")
    (folder / ".hidden").write_bytes(b"x")
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "state.safetensors").write_bytes(b"x")
    bundle.commit("recommender", {"input": "codes"})
    again = Bundle.open(copied)
    again.verify()
    assert again.manifest.recommender == {"input": "codes"} and again.has("recommender")
    assert not again.has("ranker")
    models = [n for n in again.manifest.files if n.startswith("recommender/")]
    assert models == ["recommender/config.json", "recommender/model.safetensors"]
    first = again.manifest.model_version
    assert first != UNTRAINED
    assert again.manifest.catalog_version == bundle.catalog().version
    (folder / "model.safetensors").write_bytes(b"heavier")
    again.commit("recommender", {})
    assert Bundle.open(copied).manifest.model_version != first
    assert [p.name for p in copied.iterdir() if p.name.startswith(".")] == []
    with pytest.raises(ValueError, match="section is 'other'"):
        again.commit("other", {})


def test_verify_names_the_changed_file(copied: Path) -> None:
    path = copied / "vectors.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    bundle = Bundle.open(copied)
    with pytest.raises(BundleError, match="vectors.safetensors: sha256 is"):
        bundle.verify()


def test_a_file_that_changes_while_it_is_hashed_is_refused(copied: Path, monkeypatch: Any) -> None:
    original = hashlib.file_digest

    def changing(file: Any, name: str) -> Any:
        found = original(file, name)
        if file.name.endswith("vectors.safetensors"):
            Path(file.name).touch()
        return found

    monkeypatch.setattr(hashlib, "file_digest", changing)
    with pytest.raises(BundleError, match="vectors.safetensors: has changed while it was compared"):
        Bundle.open(copied).verify()


def test_a_change_within_one_step_of_a_coarse_clock_is_found(
    copied: Path, monkeypatch: Any
) -> None:
    """Both changes have one time stamp. Files that are older than a step are not hashed twice."""
    bundle, hashed = Bundle.open(copied), []
    monkeypatch.setattr(FileState, "of", lambda file: FileState(1, 1, 1, 1, 10**18))
    original = hashlib.file_digest
    monkeypatch.setattr(
        hashlib, "file_digest", lambda file, name: hashed.append(file) or original(file, name)
    )
    monkeypatch.setattr(time, "time_ns", lambda: 10**18 + 10**6)
    bundle.verify()
    bundle.check_unchanged()
    assert len(hashed) == 2 * len(bundle.manifest.files)
    path = copied / "vectors.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(BundleError, match="vectors.safetensors: sha256 is"):
        bundle.check_unchanged()
    path.write_bytes((copied / "vectors.safetensors").read_bytes())


def test_old_files_are_hashed_once(copied: Path, monkeypatch: Any) -> None:
    hashed = []
    original = hashlib.file_digest
    monkeypatch.setattr(
        hashlib, "file_digest", lambda file, name: hashed.append(file) or original(file, name)
    )
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 10 * 10**9)
    bundle = Bundle.open(copied)
    assert not bundle.verified
    bundle.verify()
    bundle.check_unchanged()
    assert bundle.verified and len(hashed) == len(bundle.manifest.files)
    for name in bundle.manifest.files:
        path = copied / name
        path.write_bytes(path.read_bytes())
        with pytest.raises(BundleError, match=f"b/{name}: has changed while the bundle was loaded"):
            bundle.check_unchanged()
        bundle.verify()
    bundle.commit("build", {})
    assert not bundle.verified


def test_open_names_the_missing_or_resized_file(copied: Path) -> None:
    with (copied / "catalog.parquet").open("ab") as file:
        file.write(b"x")
    with pytest.raises(BundleError, match="catalog.parquet: .* bytes; the manifest says"):
        Bundle.open(copied)
    (copied / "catalog.parquet").unlink()
    with pytest.raises(BundleError, match="catalog.parquet: .*no such file"):
        Bundle.open(copied)


GOOD_ENTRY = {"sha256": "0" * 64, "size": 1}


@pytest.mark.parametrize(
    "name",
    ["../secret", "/etc/passwd", "a/../../b", "a//b", "a\\b", "", ".", "x/.hidden", "a\0b"]
    + ["manifest.json", "x" * 200, "/".join("a" * 20), "a/", "C:evil"],
)
def test_names_that_are_not_plain_are_refused(copied: Path, name: str) -> None:
    change(copied, files={name: GOOD_ENTRY})
    with pytest.raises(BundleError, match="not a plain relative file name"):
        Bundle.open(copied)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "recserve-bundle/9"}, f"format is .* expected '{FORMAT}'"),
        ({"format": None}, "format is missing"),
        ({"extra": 1}, "fields are"),
        ({"files": []}, "files must be an object"),
        ({"files": {f"f{n}": GOOD_ENTRY for n in range(5000)}}, "at most 4096"),
        ({"files": {"a": {"sha256": "0" * 64}}}, "expected sha256 and size"),
        ({"files": {"a": {"sha256": "0" * 64, "size": -1}}}, "size is -1"),
        ({"files": {"a": {"sha256": "0" * 64, "size": True}}}, "size is True"),
        ({"files": {"a": {"sha256": "0" * 64, "size": 1e3}}}, "size is 1000.0"),
        ({"files": {"a": {"sha256": "0" * 64, "size": 2**60}}}, "expected 0.."),
        ({"files": {"a": {"sha256": "G" * 64, "size": 1}}}, "not 64 hex digits"),
        ({"model_version": 3}, "versions must be strings"),
        ({"catalog_version": "x" * 65}, "versions must be strings"),
        ({"sections": {"ranker": 1}}, "sections must be an object of objects"),
    ],
)
def test_manifests_out_of_bounds_are_refused(copied: Path, fields: Any, message: str) -> None:
    change(copied, **fields)
    with pytest.raises(BundleError, match=message):
        Bundle.open(copied)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"[" * 100_000, b"\xff\xfe"])
def test_manifests_that_are_not_json_are_refused(copied: Path, text: bytes) -> None:
    (copied / "manifest.json").write_bytes(text)
    with pytest.raises(BundleError, match="manifest.json"):
        Bundle.open(copied)


def test_a_huge_manifest_is_not_read(copied: Path) -> None:
    with (copied / "manifest.json").open("ab") as file:
        file.truncate(5 << 20)
    with pytest.raises(BundleError, match="larger than"):
        Bundle.open(copied)


def test_links_are_refused(copied: Path, tmp_path: Path) -> None:
    secret = tmp_path / "vectors"
    (copied / "vectors.safetensors").rename(secret)
    (copied / "vectors.safetensors").symlink_to(secret)
    with pytest.raises(BundleError, match="vectors.safetensors: a link"):
        Bundle.open(copied)
    (copied / "vectors.safetensors").unlink()
    secret.rename(copied / "vectors.safetensors")
    (copied / "quantizer").rename(tmp_path / "q")
    (copied / "quantizer").symlink_to(tmp_path / "q")
    with pytest.raises(BundleError, match="quantizer: a link"):
        Bundle.open(copied)


def test_no_bundle_here(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(BundleError, match="is it a bundle"):
            Bundle.open(path)
    (tmp_path / "x").touch()
    with pytest.raises(BundleError, match="not empty"):
        Bundle.create(tmp_path)


@pytest.mark.parametrize("name", ["..", "/tmp", "a/../b", ""])
def test_directory_takes_plain_names(built: Path, name: str) -> None:
    with pytest.raises(BundleError, match="plain folder name"):
        Bundle.open(built).directory(name)


def test_files_outside_the_manifest_are_not_read(copied: Path) -> None:
    (copied / "stray.parquet").write_bytes(b"x")
    with pytest.raises(BundleError, match="names no stray.parquet"):
        Bundle.open(copied).path("stray.parquet")


@pytest.mark.parametrize("name", ["catalog.parquet", "vectors.safetensors", "events.parquet"])
def test_damaged_contents_are_bundle_errors(copied: Path, name: str) -> None:
    path = copied / name
    path.write_bytes(b"\0" * path.stat().st_size)
    bundle = Bundle.open(copied)
    with pytest.raises(BundleError, match=name):
        bundle.catalog()
        bundle.events()


def test_files_are_as_readable_as_the_manifest(built: Path) -> None:
    """safetensors writes files for their owner alone; a server of another user reads the bundle."""
    mode = (built / "manifest.json").stat().st_mode & 0o777
    files = Bundle.open(built).manifest.files
    assert any(name.endswith(".safetensors") for name in files)
    assert {(built / name).stat().st_mode & 0o777 for name in files} == {mode}
