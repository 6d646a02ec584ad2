"""The bundle: one folder with everything that a server needs, described by a manifest.

    manifest.json  catalog.parquet  vectors.safetensors  events.parquet  quantizer/  text/
    recommender/  retriever/  ranker/  sasrec/  drafters/NAME/

A bundle may come from an untrusted source. Names are plain relative paths, links are rejected, and
sizes are checked before a file is read. Nothing in a bundle is ever executed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from recserve.features.catalog.catalog import Catalog
from recserve.features.history.event_kinds import EventKinds
from recserve.features.history.event_weights import EventWeights
from recserve.features.history.type_names import check_type_names
from recserve.features.tables.event_table import read_events
from recserve.features.tables.events import EventLog
from recserve.features.vectors.quantizer import (
    MAX_CODES,
    MAX_LEVELS,
    Quantizer,
    load_quantizer,
)
from recserve.features.vectors.text_encoder import TextEncoder
from recserve.files import UnreadableFile, check_format, whole_file

FORMAT = "recserve-bundle/1"
MANIFEST = "manifest.json"
CATALOG, VECTORS, EVENTS = "catalog.parquet", "vectors.safetensors", "events.parquet"
QUANTIZER, TEXT = "quantizer", "text"
ITEM_GRAPH = "item_graph.safetensors"  # in recommender/
MODELS = ("recommender", "retriever", "ranker", "sasrec")
DRAFTERS = ("drafters/nezha", "drafters/speculative")
SIMILAR_ITEMS = "similar"
SECTIONS = ("build", *MODELS, *DRAFTERS, SIMILAR_ITEMS)
CATALOG_FILES = (CATALOG, VECTORS)
QUANTIZER_FILES = ("config.json", "quantizer.safetensors")
TEXT_FILES = (f"{TEXT}/terms.json", f"{TEXT}/text.safetensors")
MODEL_FILES = ("config.json", "model.safetensors")
RANKING_FILES = ("features.json", "features.safetensors")
UNTRAINED = "untrained"
# What servers read from each section of a manifest. The rest of a section is the record of how it
# was made, and changes no answer.
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "build": (
        *("type_names", "event_kinds", "event_weights"),
        *("collaborative_dim", "own_vectors", "shared_ids"),
    ),
    "recommender": ("dense_weight", "auto", "negative_weight"),
    "retriever": ("recommender",),
    "drafters/nezha": ("recommender",),
    "drafters/speculative": ("recommender",),
    SIMILAR_ITEMS: ("weight",),
}
# Files without which a section is of no use.
FILES: Mapping[str, tuple[str, ...]] = {
    "build": (*CATALOG_FILES, EVENTS, *(f"{QUANTIZER}/{name}" for name in QUANTIZER_FILES)),
    **{name: tuple(f"{name}/{file}" for file in MODEL_FILES) for name in (*MODELS, *DRAFTERS)},
    "ranker": tuple(f"ranker/{file}" for file in (*MODEL_FILES, *RANKING_FILES)),
    SIMILAR_ITEMS: (f"{SIMILAR_ITEMS}/history_bonus.safetensors",),
}
MAX_DENSE_WEIGHT = 100
MAX_SIMILAR_WEIGHT = 100
MAX_NEGATIVE_WEIGHT = 100
MAX_DIM = 4096  # of a part of an item vector
MAX_COLLABORATIVE_WEIGHT = 100
MAX_SEED = 2**31 - 1 - 64
COLUMNS = ("kept", "filtered")  # of recommender.auto: requests that keep or filter seen items
MAX_MANIFEST_BYTES = 4 << 20
MAX_FILES = 4096
MAX_FILE_BYTES = 256 << 30
CLOCK_STEP_NS = 2 * 10**9  # coarsest time stamps of file systems in use, those of FAT
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}(/[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}){0,7}")
SHA256 = re.compile(r"[0-9a-f]{64}")


class BundleError(ValueError):
    """The bundle is missing, damaged or of another format; the message names the file."""


@dataclass(frozen=True)
class FileEntry:
    """Expected hash and size of a file.

    Attributes:
        sha256: 64 hex digits.
        size: Size in bytes.
    """

    sha256: str
    size: int


@dataclass(frozen=True)
class Manifest:
    """Contents of manifest.json.

    Attributes:
        catalog_version: Hash prefix of the catalogue's files.
        files: Expected hash and size of every file, by name relative to the bundle.
        sections: Records of the build and of each training, by name. An untrained model has none.
        format: Name and version of the format.
    """

    catalog_version: str
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    sections: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    format: str = FORMAT

    @cached_property
    def model_version(self) -> str:
        """Hash prefix of everything that can change an answer; `untrained` without a model.

        These are the hashes of all files, the names of the sections, and their `SETTINGS`.
        """
        if not any(name.split("/")[0] in MODELS for name in self.files):
            return UNTRAINED
        settings = {
            section: {key: values[key] for key in SETTINGS.get(section, ()) if key in values}
            for section, values in self.sections.items()
        }
        files = {name: entry.sha256 for name, entry in self.files.items()}
        return _digest({"files": files, "settings": settings})

    @property
    def build(self) -> dict[str, Any]:
        """Options and figures of the build."""
        return self.sections.get("build", {})

    @property
    def type_names(self) -> tuple[str, ...]:
        """Names of the event types."""
        return tuple(self.build.get("type_names", ()))

    @property
    def has_quantizer(self) -> bool:
        """False for an imported bundle, whose ids come from elsewhere."""
        return "shared_ids" not in self.build

    @property
    def collaborative_dim(self) -> int:
        """Number of columns of an item vector that come from events, the last ones."""
        return int(self.build.get("collaborative_dim", 0))

    @property
    def dense_weight(self) -> float:
        """Weight of the recommender's dense head if nothing names another."""
        return float(self.recommender.get("dense_weight", 0.0))

    @property
    def event_kinds(self) -> EventKinds:
        """Kinds of the event types."""
        return EventKinds.read_record(self.build.get("event_kinds", {}))

    @property
    def event_weights(self) -> EventWeights:
        """Weights of the events."""
        return EventWeights.read_record(self.build.get("event_weights", []))

    @property
    def negative_weight(self) -> float:
        """How much items similar to one with a negative event are lowered."""
        return float(self.recommender.get("negative_weight", 0.0))

    @property
    def recommender(self) -> dict[str, Any]:
        """Training record of the recommender; empty if untrained."""
        return self.sections.get("recommender", {})

    def to_json(self) -> str:
        """Returns sorted, indented JSON; equal manifests give equal bytes."""
        content = {
            "format": self.format,
            "model_version": self.model_version,
            "catalog_version": self.catalog_version,
            "files": {name: vars(entry) for name, entry in self.files.items()},
            "sections": self.sections,
        }
        return json.dumps(content, indent=1, sort_keys=True) + "\n"

    @staticmethod
    def from_json(text: bytes) -> Manifest:
        """Parses and checks a manifest.

        The version of the models that is written there is not used. It may be that of an older
        release, which covered fewer parts.

        Raises:
            BundleError: If a field is wrong. The message names it.
        """
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BundleError(f"{MANIFEST}: not JSON ({error})") from error
        expected = {"format", "model_version", "catalog_version", "files", "sections"}
        if not isinstance(raw, dict):
            raise BundleError(f"{MANIFEST}: it is {raw!r:.80}; expected an object")
        try:
            check_format(raw.get("format"), FORMAT, MANIFEST)
        except UnreadableFile as error:
            raise BundleError(str(error)) from None
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
        for section, values in sections.items():
            if section not in SECTIONS:
                raise BundleError(
                    f"{MANIFEST}: section {section[:80]!r} is unknown; another version of recserve "
                    f"wrote it. Known are {', '.join(SECTIONS)}"
                )
            _check_settings(section, values)
        return Manifest(versions[1], files, sections)


class FileState(NamedTuple):
    """What changes with every change of a file; no program can set `changed_ns` back.

    Attributes:
        device: Device of the file.
        inode: Number of the file on its device.
        size: Size in bytes.
        written_ns: Time of the last change of the content.
        changed_ns: Time of the last change of content or properties.
    """

    device: int
    inode: int
    size: int
    written_ns: int
    changed_ns: int

    @classmethod
    def of(cls, file: Path | int) -> Self:
        """Returns the state of a path or of an open file."""
        found = os.stat(file)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True)
class HashedFile:
    """A file that has been compared with its hash.

    Attributes:
        state: State of the file while it was hashed.
        began_ns: Time at which hashing began.
    """

    state: FileState
    began_ns: int

    @property
    def is_new(self) -> bool:
        """True if another change could have left the same time stamp."""
        return self.state.changed_ns > self.began_ns - CLOCK_STEP_NS


class Bundle:
    """An opened bundle.

    `open` checks the format and the file sizes. `verify` checks every byte, and `check_unchanged`
    that the files which were read since then are those that `verify` has seen:

        verify             hash every file, note its state
        load               read or map the files
        check_unchanged    compare the states; hash files again that were new
    """

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self.root = root
        self.manifest = manifest
        self._hashed: dict[str, HashedFile] = {}
        self._large_events: EventLog | None = None  # on disk, so that they are read once

    @staticmethod
    def open(path: str | Path) -> Bundle:
        """Opens a bundle and checks its settings, and that each file exists with its size.

        Raises:
            BundleError: If a setting has another type or is out of range, or if a file is missing,
                is a link or has another size. The message names it.
        """
        root = Path(path)
        source = root / MANIFEST
        if not source.is_file() or source.is_symlink():
            raise BundleError(f"{root}: no {MANIFEST} here; is it a bundle?")
        if source.stat().st_size > MAX_MANIFEST_BYTES:
            raise BundleError(f"{source}: larger than {MAX_MANIFEST_BYTES} bytes")
        bundle = Bundle(root, Manifest.from_json(source.read_bytes()))
        _check_files(bundle.manifest)
        for name in bundle.manifest.files:
            bundle.path(name)
        return bundle

    @staticmethod
    def create(path: str | Path) -> Bundle:
        """Returns a bundle without files in a new or empty folder.

        Raises:
            BundleError: If the folder is not empty.
        """
        root = Path(path)
        root.mkdir(parents=True, exist_ok=True)
        if any(root.iterdir()):
            raise BundleError(f"{root}: not empty; choose another folder or delete this one")
        return Bundle(root, Manifest(""))

    def path(self, name: str) -> Path:
        """Returns the path of a file in the manifest.

        Raises:
            BundleError: If the manifest lacks the name, or the file differs from its description.
        """
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
        """Whether the manifest has a section; `has("ranker")` means that a ranker was trained."""
        return section in self.manifest.sections

    def directory(self, name: str) -> Path:
        """Returns the path of a folder inside the bundle, which may not exist yet."""
        if not NAME.fullmatch(name):
            raise BundleError(f"{name[:80]!r} is not a plain folder name")
        return self._inside(name)

    def digest(self, section: str) -> str:
        """Returns the sha256 of a trained model's weights.

        Draft heads and retrievers record it, because they fit exactly these weights.
        """
        return self.manifest.files[f"{section}/model.safetensors"].sha256

    @property
    def verified(self) -> bool:
        """True once `verify` has compared every file."""
        return self._hashed.keys() == self.manifest.files.keys()

    def verify(self) -> None:
        """Compares every file with its sha256. Raises BundleError naming the first that differs."""
        self._hashed = {name: self._verify(name) for name in self.manifest.files}

    def check_unchanged(self) -> None:
        """Checks that no file has changed since `verify`. Call it when everything is loaded.

        Raises:
            BundleError: If a file has changed, even if it has its old content again: what was
                loaded may be something else. The message names it.
        """
        for name, hashed in self._hashed.items():
            path = self.path(name)
            if FileState.of(path) != hashed.state:
                raise BundleError(f"{path}: has changed while the bundle was loaded; try again")
            if hashed.is_new:
                self._hashed[name] = self._verify(name)

    def catalog(self) -> Catalog:
        """Loads the catalogue. Raises BundleError if it is damaged."""
        try:
            catalog = Catalog.load(
                self.path(CATALOG), self.path(VECTORS), self.manifest.catalog_version
            )
        except (ValueError, OSError) as error:
            raise BundleError(f"{self.root}: catalogue: {error}") from error
        size, width = self.manifest.collaborative_dim, catalog.vectors.shape[1]
        if size > width:
            raise BundleError(
                f"{self.root / MANIFEST}: build.collaborative_dim is {size}; {VECTORS} has "
                f"vectors of {width} numbers"
            )
        return catalog

    def encoders(self, catalog: Catalog) -> tuple[Quantizer, TextEncoder | None]:
        """Loads what makes vectors and codes of new items, and compares it with the catalogue.

        Raises:
            BundleError: If a part is damaged or does not fit the catalogue.
        """
        quantizer, encoder = self.quantizer(), self.text_encoder()
        ids, width = catalog.semantic_ids, catalog.vectors.shape[1]
        sizes = ids.codebook_sizes[: -1 if ids.has_disambiguation else None]
        if quantizer.codebook_sizes != sizes or quantizer.dim != width:
            raise BundleError(
                f"{self.root}: quantizer: it maps {quantizer.dim} numbers to codes of "
                f"{quantizer.codebook_sizes}; the catalogue has {width} and {sizes}"
            )
        content = width - self.manifest.collaborative_dim
        if encoder is not None and encoder.components.shape[1] != content:
            raise BundleError(
                f"{self.root}: text: it makes vectors of {encoder.components.shape[1]} numbers; "
                f"the catalogue has {content} of texts"
            )
        return quantizer, encoder

    def shadows(self, catalog: Catalog) -> np.ndarray:
        """Returns ascending rows of items that share the id of another one and give way to it."""
        ids = catalog.semantic_ids
        if self.manifest.build.get("shared_ids", "all") == "all" or not ids.has_disambiguation:
            return np.zeros(0, np.int64)
        return np.flatnonzero(ids.codes[:, -1])

    def check_parts(self) -> None:
        """Loads everything but the models and throws it away. Raises BundleError."""
        catalog = self.catalog()
        if self.manifest.has_quantizer:
            self.encoders(catalog)

    def events(self) -> EventLog:
        """Loads the positive events of the build, which models are trained on and evaluated with.

        They have the weights of the build, and hold out the last events of the same users.

        Raises:
            BundleError: If they are damaged.
        """
        manifest = self.manifest
        positive = self.all_events().positive(manifest.event_kinds)
        weighted = positive.weighted(manifest.event_weights)
        return weighted.holding_out(manifest.build.get("holdout_users"))

    def all_events(self) -> EventLog:
        """Loads the events of the build. Raises BundleError if there are none, or damaged ones."""
        if EVENTS not in self.manifest.files and not self.manifest.has_quantizer:
            raise BundleError(
                f"{self.root}: was imported without events; import it again with --events FILE"
            )
        if self._large_events is not None:
            return self._large_events
        try:
            events = read_events(self.path(EVENTS), self._catalog.items)[0]
        except (ValueError, OSError) as error:
            raise BundleError(f"{self.root}: events: {error}") from error
        if events.is_mapped:
            self._large_events = events
        return events

    def quantizer(self) -> Quantizer:
        """Loads the frozen quantiser. Raises BundleError if it is damaged."""
        try:
            return load_quantizer(self.directory(QUANTIZER))
        except (ValueError, OSError) as error:
            raise BundleError(f"{self.root}: quantizer: {error}") from error

    def text_encoder(self) -> TextEncoder | None:
        """Loads the text encoder of the build; None if the item vectors were supplied."""
        if f"{TEXT}/terms.json" not in self.manifest.files:
            return None
        try:
            return TextEncoder.load(self.directory(TEXT))
        except (ValueError, OSError) as error:
            raise BundleError(f"{self.root}: text: {error}") from error

    def commit(self, section: str, values: Mapping[str, Any]) -> None:
        """Records a section, hashes its files and replaces the manifest atomically.

        Hidden files and files or folders named `checkpoint*` stay outside the manifest.

        Args:
            section: One of SECTIONS. `build` hashes every file; the name of a model or drafter
                hashes its folder.
            values: Contents of the section.
        """
        if section not in SECTIONS:
            raise ValueError(f"section is {section!r}; expected one of {', '.join(SECTIONS)}")
        files = {
            name: entry
            for name, entry in self.manifest.files.items()
            if section != "build" and not name.startswith(f"{section}/")
        }
        start = self.root if section == "build" else self.directory(section)
        for path in sorted(start.rglob("*")):
            name = path.relative_to(self.root).as_posix()
            parts = name.split("/")
            # Temporary files and training checkpoints are no part of the artifact.
            ours = not any(part.startswith((".", "checkpoint")) for part in parts)
            if ours and name != MANIFEST and self._inside(name).is_file():
                files[name] = FileEntry(_sha256(path), path.stat().st_size)
        listed = {n: e.sha256 for n, e in files.items() if n in CATALOG_FILES}
        self.manifest = replace(
            self.manifest,
            catalog_version=_digest(listed),
            files=files,
            sections={**self.manifest.sections, section: dict(values)},
        )
        self._hashed = {}
        with whole_file(self.root / MANIFEST, shared=True) as new:
            new.write_text(self.manifest.to_json(), encoding="utf-8")

    def _verify(self, name: str) -> HashedFile:
        """Compares a file with its sha256. Raises BundleError."""
        path, expected = self.path(name), self.manifest.files[name].sha256
        with path.open("rb") as file:
            hashed = HashedFile(FileState.of(file.fileno()), time.time_ns())
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != expected:
            raise BundleError(f"{path}: sha256 is {found}; the manifest says {expected}")
        if FileState.of(path) != hashed.state:
            raise BundleError(f"{path}: has changed while it was compared with its hash; try again")
        return hashed

    @cached_property
    def _catalog(self) -> Catalog:
        return self.catalog()

    def _inside(self, name: str) -> Path:
        """Returns the path of a checked name. Raises BundleError if a link is on the way."""
        path = self.root
        for part in name.split("/"):
            path = path / part
            if path.is_symlink():
                raise BundleError(f"{path}: a link; a bundle holds plain files only")
        return path


def _whole(least: int, most: int) -> Callable[[Any], str | None]:
    """Returns a check of a setting, which returns what is expected if the value is another."""
    return lambda value: (
        None if type(value) is int and least <= value <= most else f"an integer in {least}..{most}"
    )


def _number(least: float, most: float) -> Callable[[Any], str | None]:
    return lambda value: (
        None
        if type(value) in (int, float) and least <= value <= most
        else f"a number in {least:g}..{most:g}"
    )


def _one_of(*choices: object) -> Callable[[Any], str | None]:
    return lambda value: (
        None
        if any(type(value) is type(one) and value == one for one in choices)
        else " or ".join(json.dumps(one) for one in choices)
    )


def _or_null(check: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
    def either(value: Any) -> str | None:
        expected = None if value is None else check(value)
        return None if expected is None else f"{expected}, or null"

    return either


def _codes(value: Any) -> str | None:
    check = _whole(2, MAX_CODES)
    listed = isinstance(value, list) and 1 <= len(value) <= MAX_LEVELS
    fits = all(check(one) is None for one in value) if listed else check(value) is None
    return None if fits else f"{check('')}, or a list of them"


def _texts(value: Any) -> str | None:
    fits = isinstance(value, dict) and all(isinstance(one, str) and one for one in value.values())
    return None if fits else "an object of texts"


def _type_names(value: Any) -> str | None:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        return "a list of strings"
    try:
        check_type_names(value)
    except ValueError as error:
        return f"names of event types: {error}"
    return None


def _event_kinds(value: Any) -> str | None:
    try:
        EventKinds.read_record(value)
    except ValueError as error:
        return f"kinds of event types: {error}"
    return None


def _event_weights(value: Any) -> str | None:
    try:
        EventWeights.read_record(value)
    except ValueError as error:
        return f"weights of events: {error}"
    return None


def _digest_of_weights(value: Any) -> str | None:
    fits = isinstance(value, str) and SHA256.fullmatch(value)
    return None if fits else "the sha256 of a recommender's weights, 64 hex digits"


def _auto(value: Any) -> str | None:
    weight = _number(0, MAX_DENSE_WEIGHT)
    fits = isinstance(value, dict) and set(value) == set(COLUMNS)
    for one in value.values() if fits else ():
        given = one if isinstance(one, dict) else {}
        fits &= isinstance(given.get("strategy"), str) and weight(given.get("dense_weight")) is None
    return (
        None
        if fits
        else f"a strategy and a dense_weight of 0..{MAX_DENSE_WEIGHT} for {' and '.join(COLUMNS)}"
    )


# Every value that some code reads from a manifest. An absent one has its default.
CHECKS: Mapping[str, Mapping[str, Callable[[Any], str | None]]] = {
    "build": {
        "type_names": _type_names,
        "event_kinds": _event_kinds,
        "event_weights": _event_weights,
        "quantizer": _one_of("residual", "product"),
        "shared_ids": _one_of("popular", "first", "all"),
        "levels": _or_null(_whole(1, MAX_LEVELS)),
        "codes": _or_null(_codes),
        "text_dim": _whole(0, MAX_DIM),
        "collaborative_dim": _whole(0, MAX_DIM),
        "collaborative_weight": _number(5e-324, MAX_COLLABORATIVE_WEIGHT),
        "seed": _whole(0, MAX_SEED),
        "holdout_users": _whole(1, 2**63 - 1),
        "device": _one_of("cpu", "cuda"),
        "on_bad_rows": _one_of("error", "skip"),
        "split": _texts,
        "own_vectors": _one_of(True, False),
        "has_timestamps": _one_of(True, False),
    },
    "recommender": {
        "dense_weight": _number(0, MAX_DENSE_WEIGHT),
        "auto": _or_null(_auto),
        "negative_weight": _number(0, MAX_NEGATIVE_WEIGHT),
        "seed": _whole(0, 2**63 - 1),
    },
    **{name: {"recommender": _digest_of_weights} for name in ("retriever", *DRAFTERS)},
    SIMILAR_ITEMS: {"weight": _number(0, MAX_SIMILAR_WEIGHT)},
}


def _check_settings(section: str, values: Mapping[str, Any]) -> None:
    """Raises BundleError for a value of another type or outside its range."""
    for name, check in CHECKS.get(section, {}).items():
        if name in values and (expected := check(values[name])) is not None:
            raise BundleError(
                f"{MANIFEST}: {section}.{name} is {values[name]!r:.80}; expected {expected}"
            )


def _check_files(manifest: Manifest) -> None:
    """Raises BundleError if a section lacks a file that it is of no use without."""
    files, sections = manifest.files, manifest.sections
    needed = {section: FILES.get(section, ()) for section in sections}
    if "build" in sections and not manifest.has_quantizer:
        needed["build"] = CATALOG_FILES
    if any(name in files for name in TEXT_FILES) and "build" in sections:
        needed["build"] += TEXT_FILES
    for section, names in needed.items():
        for name in names:
            if name not in files:
                raise BundleError(
                    f"{MANIFEST}: there is a section {section}, but files has no {name}; copy the "
                    "whole bundle again, or make this part again"
                )


def _entry(name: str, entry: Any) -> FileEntry:
    """Checks one file entry of a manifest."""
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


def _digest(content: Mapping[str, Any]) -> str:
    """Returns 12 hex digits of a hash over plain values; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
