"""The bundle: one folder with everything that serves, and a manifest of what each file must be.

    manifest.json  catalog.parquet  vectors.safetensors  events.parquet  quantizer/  text/
    recommender/  retriever/  ranker/  sasrec/  drafters/NAME/

A bundle may come from a stranger: names are plain relative paths, links are refused, sizes are
checked before a file is read, and nothing in it is ever executed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from recserve.features.catalog.catalog import Catalog
from recserve.features.tables.event_table import read_events
from recserve.features.tables.events import EventLog
from recserve.features.vectors.quantizer import Quantizer, load_quantizer
from recserve.features.vectors.text_encoder import TextEncoder

FORMAT = "recserve-bundle/1"
MANIFEST = "manifest.json"
CATALOG, VECTORS, EVENTS = "catalog.parquet", "vectors.safetensors", "events.parquet"
QUANTIZER, TEXT = "quantizer", "text"
ITEM_GRAPH = "item_graph.safetensors"  # in recommender/
MODELS = ("recommender", "retriever", "ranker", "sasrec")
DRAFTERS = ("drafters/nezha", "drafters/speculative")
CATALOG_FILES = (CATALOG, VECTORS)
UNTRAINED = "untrained"
MAX_MANIFEST_BYTES = 4 << 20
MAX_FILES = 4096
MAX_FILE_BYTES = 256 << 30
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}(/[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}){0,7}")
SHA256 = re.compile(r"[0-9a-f]{64}")


class BundleError(ValueError):
    """The bundle is missing, damaged or of another format; the message names the file."""


@dataclass(frozen=True)
class FileEntry:
    """What a file must be. sha256: 64 hex digits. size: bytes."""

    sha256: str
    size: int


@dataclass(frozen=True)
class Manifest:
    """Contents of manifest.json.

    files: every file by its name relative to the bundle. sections: what a build or a training
    said of itself ("build", "recommender", "retriever", "ranker", "sasrec"); an untrained model
    has no section.
    """

    model_version: str
    catalog_version: str
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    sections: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    format: str = FORMAT

    @property
    def build(self) -> dict[str, Any]:
        """Options and figures of the build."""
        return self.sections.get("build", {})

    @property
    def recommender(self) -> dict[str, Any]:
        """What the recommender's training recorded; empty when untrained."""
        return self.sections.get("recommender", {})

    @property
    def ranker(self) -> dict[str, Any]:
        """What the ranker's training recorded; empty when untrained."""
        return self.sections.get("ranker", {})

    @property
    def sasrec(self) -> dict[str, Any]:
        """What the SASRec baseline's training recorded; empty when untrained."""
        return self.sections.get("sasrec", {})

    def to_json(self) -> str:
        """Sorted, indented: the same manifest gives the same bytes."""
        files = {name: vars(entry) for name, entry in self.files.items()}
        return json.dumps(vars(self) | {"files": files}, indent=1, sort_keys=True) + "\n"

    @staticmethod
    def from_json(text: bytes) -> Manifest:
        """Read and check. Raises BundleError saying what is wrong."""
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BundleError(f"{MANIFEST}: not JSON ({error})") from error
        expected = {"format", "model_version", "catalog_version", "files", "sections"}
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            given = raw.get("format") if isinstance(raw, dict) else raw
            raise BundleError(f"{MANIFEST}: format is {str(given)[:80]!r}; expected {FORMAT!r}")
        if set(raw) != expected:
            raise BundleError(f"{MANIFEST}: fields are {sorted(raw)}; expected {sorted(expected)}")
        versions, files, sections = (
            [raw["model_version"], raw["catalog_version"]],
            {},
            raw["sections"],
        )
        if not all(isinstance(version, str) and len(version) <= 64 for version in versions):
            raise BundleError(f"{MANIFEST}: versions must be strings of at most 64 characters")
        if not isinstance(sections, dict) or not all(
            isinstance(s, dict) for s in sections.values()
        ):
            raise BundleError(f"{MANIFEST}: sections must be an object of objects")
        if not isinstance(raw["files"], dict) or len(raw["files"]) > MAX_FILES:
            raise BundleError(f"{MANIFEST}: files must be an object of at most {MAX_FILES} entries")
        for name, entry in raw["files"].items():
            files[name] = _entry(name, entry)
        return Manifest(versions[0], versions[1], files, sections)


class Bundle:
    """An opened bundle. `open` checks format and sizes, `verify` every byte."""

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self.root = root
        self.manifest = manifest

    @staticmethod
    def open(path: str | Path) -> Bundle:
        """Read the manifest; every file it names must be there, plain and of its size.

        Raises BundleError naming the file.
        """
        root = Path(path)
        source = root / MANIFEST
        if not source.is_file() or source.is_symlink():
            raise BundleError(f"{root}: no {MANIFEST} here; is it a bundle?")
        if source.stat().st_size > MAX_MANIFEST_BYTES:
            raise BundleError(f"{source}: larger than {MAX_MANIFEST_BYTES} bytes")
        bundle = Bundle(root, Manifest.from_json(source.read_bytes()))
        for name in bundle.manifest.files:
            bundle.path(name)
        return bundle

    @staticmethod
    def create(path: str | Path) -> Bundle:
        """A bundle without files in a new or empty folder. Raises BundleError if it is not."""
        root = Path(path)
        root.mkdir(parents=True, exist_ok=True)
        if any(root.iterdir()):
            raise BundleError(f"{root}: not empty; choose another folder or delete this one")
        return Bundle(root, Manifest(UNTRAINED, ""))

    def path(self, name: str) -> Path:
        """Path of a file that the manifest names. Raises BundleError if it is not as described."""
        entry = self.manifest.files.get(name)
        if entry is None:
            raise BundleError(f"{self.root}: the manifest names no {name}")
        path = self._inside(name)
        if not path.is_file():
            raise BundleError(f"{path}: named in the manifest, but there is no such file")
        size = path.stat().st_size
        if size != entry.size:
            raise BundleError(f"{path}: {size} bytes; the manifest says {entry.size}")
        return path

    def has(self, section: str) -> bool:
        """Whether the manifest has this section: `has("ranker")` says that one was trained."""
        return section in self.manifest.sections

    def directory(self, name: str) -> Path:
        """A folder inside the bundle; it may not exist yet."""
        if not NAME.fullmatch(name):
            raise BundleError(f"{name[:80]!r} is not a plain folder name")
        return self._inside(name)

    def digest(self, section: str) -> str:
        """Of the weights of a trained model, for what was made to stand on just these."""
        return self.manifest.files[f"{section}/model.safetensors"].sha256

    def verify(self) -> None:
        """Compare every file with its sha256. Raises BundleError naming the first that differs."""
        for name, entry in self.manifest.files.items():
            path = self.path(name)
            found = _sha256(path)
            if found != entry.sha256:
                raise BundleError(f"{path}: sha256 is {found}; the manifest says {entry.sha256}")

    def catalog(self) -> Catalog:
        """The catalogue. Raises BundleError if it is damaged."""
        try:
            return Catalog.load(
                self.path(CATALOG), self.path(VECTORS), self.manifest.catalog_version
            )
        except (ValueError, OSError) as error:
            raise BundleError(f"{self.root}: catalogue: {error}") from error

    def events(self) -> EventLog:
        """The events the bundle was built from. Raises BundleError if they are damaged."""
        try:
            return read_events(self.path(EVENTS), self._catalog.items)[0]
        except (ValueError, OSError) as error:
            raise BundleError(f"{self.root}: events: {error}") from error

    def quantizer(self) -> Quantizer:
        """The frozen quantiser. Raises BundleError if it is damaged."""
        try:
            return load_quantizer(self.directory(QUANTIZER))
        except (ValueError, OSError) as error:
            raise BundleError(f"{self.root}: quantizer: {error}") from error

    def text_encoder(self) -> TextEncoder | None:
        """What turned text into the item vectors; None where the user brought the vectors."""
        if f"{TEXT}/terms.json" not in self.manifest.files:
            return None
        try:
            return TextEncoder.load(self.directory(TEXT))
        except (ValueError, OSError) as error:
            raise BundleError(f"{self.root}: text: {error}") from error

    def commit(self, section: str, values: Mapping[str, Any]) -> None:
        """Record a section, hash what belongs to it and replace the manifest at once.

        section: "build" hashes every file; a model's or drafter's name hashes its folder. Hidden
        files and everything called `checkpoint*` stay outside the manifest. Readers see the
        manifest before or after, never half.
        """
        known = ("build", *MODELS, *DRAFTERS)
        if section not in known:
            raise ValueError(f"section is {section!r}; expected one of {', '.join(known)}")
        files = {
            name: entry
            for name, entry in self.manifest.files.items()
            if section != "build" and not name.startswith(f"{section}/")
        }
        start = self.root if section == "build" else self.directory(section)
        for path in sorted(start.rglob("*")):
            name = path.relative_to(self.root).as_posix()
            parts = name.split("/")
            ours = not any(part.startswith((".", "checkpoint")) for part in parts)
            if ours and name != MANIFEST and self._inside(name).is_file():
                files[name] = FileEntry(_sha256(path), path.stat().st_size)
        trained = {n: e.sha256 for n, e in files.items() if n.split("/")[0] in MODELS}
        listed = {n: e.sha256 for n, e in files.items() if n in CATALOG_FILES}
        self.manifest = replace(
            self.manifest,
            model_version=_digest(trained) if trained else UNTRAINED,
            catalog_version=_digest(listed),
            files=files,
            sections={**self.manifest.sections, section: dict(values)},
        )
        self._write()

    @cached_property
    def _catalog(self) -> Catalog:
        return self.catalog()

    def _inside(self, name: str) -> Path:
        """The path of a name, refusing links on the way. Names are checked by `_entry` or by us."""
        path = self.root
        for part in name.split("/"):
            path = path / part
            if path.is_symlink():
                raise BundleError(f"{path}: a link; a bundle holds plain files only")
        return path

    def _write(self) -> None:
        """Replace the manifest; every file it names becomes as readable as the manifest itself,
        since safetensors writes files that only their owner may read.
        """
        temporary = self.root / f".{MANIFEST}.{os.getpid()}"
        with temporary.open("w", encoding="utf-8") as file:
            file.write(self.manifest.to_json())
            file.flush()
            os.fsync(file.fileno())
        mode = temporary.stat().st_mode & 0o777
        for name in self.manifest.files:
            self._inside(name).chmod(mode)
        temporary.replace(self.root / MANIFEST)
        folder = os.open(self.root, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _entry(name: str, entry: Any) -> FileEntry:
    if not NAME.fullmatch(name) or name == MANIFEST:
        raise BundleError(f"{MANIFEST}: {name[:80]!r} is not a plain relative file name")
    if not isinstance(entry, dict) or set(entry) != {"sha256", "size"}:
        raise BundleError(f"{MANIFEST}: {name}: expected sha256 and size")
    size, digest = entry["size"], entry["sha256"]
    if type(size) is not int or not 0 <= size <= MAX_FILE_BYTES:
        raise BundleError(f"{MANIFEST}: {name}: size is {size!r}; expected 0..{MAX_FILE_BYTES}")
    if not isinstance(digest, str) or not SHA256.fullmatch(digest):
        raise BundleError(f"{MANIFEST}: {name}: sha256 is not 64 hex digits")
    return FileEntry(digest, size)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(hashes: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()[:12]
