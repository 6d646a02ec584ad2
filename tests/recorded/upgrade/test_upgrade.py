"""Files of earlier releases are opened for ever; files of other versions are refused in words."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import lmdb
import msgspec
import pyarrow.parquet as pq
import pytest
import redis
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from recserve.batch.manifest import OutputFolder, check_output
from recserve.bundle.bundle import Bundle
from recserve.experiments.saved_counts import SavedCounts, SavedExperiment
from recserve.features.catalog.catalog_log import JournalError
from recserve.features.catalog.item_journal import ItemJournal
from recserve.features.catalog.popularity import SavedCounts as Popularity
from recserve.features.catalog.redis_log import open_log
from recserve.features.history.history import Removal
from recserve.features.history.lmdb_store import LmdbStore
from recserve.features.history.redis_store import RedisStore
from recserve.features.tables.event_files import read_event_files
from recserve.files import FORMAT_KEY
from recserve.models.sasrec import load_sasrec
from recserve.service import Service
from recserve.service.slate_log.reader import read_log
from recserve.training.retraining import Run
from tests.recorded.compare import differences
from tests.recorded.upgrade.read import answers, copied, restore, run_command
from tests.support.redis_server import servers, start_redis

HERE = Path(__file__).parent
RELEASES = sorted(path.name for path in HERE.iterdir() if (path / "answers.json").is_file())
LATEST = HERE / RELEASES[-1]
OTHER_VERSIONS = {"newer": 2, "missing": None, "damaged": "x"}


@pytest.mark.parametrize("release", RELEASES)
def test_files_of_a_release_are_opened(release):
    recorded = json.loads((HERE / release / "answers.json").read_text(encoding="utf-8"))
    found = list(differences(recorded, answers(HERE / release)))
    assert not found, "\n".join(map(str, found[:20]))


@pytest.fixture(scope="module")
def port(tmp_path_factory) -> Iterator[int]:
    with servers() as started:
        process, number = start_redis(tmp_path_factory.mktemp("redis"))
        started.append(process)
        yield number


@pytest.fixture
def folder(port) -> Iterator[Path]:
    with copied(LATEST) as copy:
        client = redis.Redis(port=port)
        client.flushall()
        restore(client, json.loads((copy / "redis.json").read_text(encoding="utf-8")))
        (copy / "port").write_text(str(port))
        yield copy


def client_of(folder: Path) -> Any:
    return redis.Redis(port=int((folder / "port").read_text()))


def named(name: str, version: object) -> str | None:
    return None if version is None else f"{name}/{version}"


def other_bundle(folder: Path, version: object) -> None:
    path = folder / "bundle" / "manifest.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["format"] = named("recserve-bundle", version)
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def other_value(value: bytes, version: object) -> bytes:
    """Returns a stored history of another version; without one, the bytes are no history."""
    if version is None:
        return value[3:]
    return value[:2] + (b"\2" if version == 2 else b"\xee") + value[3:]


def other_lmdb(folder: Path, version: object) -> None:
    with lmdb.open(str(folder / "history")) as store, store.begin(write=True) as writing:
        writing.put(b"user1", other_value(writing.get(b"user1"), version))


def other_redis_history(folder: Path, version: object) -> None:
    client, key = client_of(folder), b"recserve:history:user1"
    client.set(key, other_value(client.get(key), version))


def other_line(line: bytes, version: object) -> bytes:
    fields = json.loads(line[9:])
    fields["v"] = version
    text = json.dumps({k: v for k, v in fields.items() if v is not None}).encode()
    return b"%08x %s" % (zlib.crc32(text), text)


def other_journal(folder: Path, version: object) -> None:
    (path,) = (folder / "items").glob("*.jsonl")
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([other_line(lines[0], version), *lines[1:], b""]))


def other_redis_log(folder: Path, version: object) -> None:
    client, key = client_of(folder), "recserve:items:{items}:log"
    entries = client.xrange(key)
    client.delete(key)
    for number, (entry, fields) in enumerate(entries):
        if not number:
            fields[b"line"] = other_line(fields[b"line"].removesuffix(b"\n"), version)
        client.xadd(key, fields, id=entry)


def other_parquet(pattern: str, name: str) -> Callable[[Path, object], None]:
    def change(folder: Path, version: object) -> None:
        path = next(folder.glob(pattern))
        table = pq.read_table(path, partitioning=None)
        given = named(name, version)
        pq.write_table(table.replace_schema_metadata(given and {FORMAT_KEY: given}), path)

    return change


def other_batch(folder: Path, version: object) -> None:
    path = folder / "batch" / "slates" / "_job.json"
    facts = json.loads(path.read_text(encoding="utf-8")) | {"format": version}
    path.write_text(json.dumps({k: v for k, v in facts.items() if v is not None}))


def other_counts(folder: Path, version: object) -> None:
    path = folder / "experiments" / "shelf.counts"
    content = msgspec.msgpack.decode(path.read_bytes())
    content["format"] = named("recserve-experiment", version)
    path.write_bytes(msgspec.msgpack.encode({k: v for k, v in content.items() if v is not None}))


def other_popularity(folder: Path, version: object) -> None:
    path = folder / "history" / "popularity.safetensors"
    arrays, given = load_file(path), named("recserve-popularity", version)
    save_file(arrays, path, given and {FORMAT_KEY: given})


def other_run(folder: Path, version: object) -> None:
    record = {"format": named("recserve-retrain", version), "settings": "some"}
    path = folder / "runs" / "0001" / "run.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({k: v for k, v in record.items() if v is not None}))


class Shelf:
    """An experiment that takes what is restored."""

    name, keep = "shelf", None

    def save(self) -> None:
        pass

    def restore(self, saved: SavedExperiment) -> None:
        pass


def open_bundle(folder: Path) -> None:
    Bundle.open(folder / "bundle")


def serve_bundle(folder: Path) -> None:
    Service.open(folder / "bundle", f"lmdb:{folder / 'history'}", "cpu").close()


def verify_bundle(folder: Path) -> None:
    run_command(folder, ("recserve", "--debug", "bundle", "verify", "bundle"))


def read_lmdb(folder: Path) -> None:
    store = LmdbStore(folder / "history")
    try:
        store.get("user1")
    finally:
        store.close()


def show_history(folder: Path) -> None:
    words = ("--bundle", "bundle", "--store", "lmdb:history")
    run_command(folder, ("recserve", "--debug", "history", "show", "user1", *words))


def read_redis(folder: Path) -> None:
    RedisStore(f"redis://127.0.0.1:{(folder / 'port').read_text()}/0").get("user1")


def append_redis(folder: Path) -> None:
    store = RedisStore(f"redis://127.0.0.1:{(folder / 'port').read_text()}/0")
    store.append("user1", [Removal(1)])


def read_journal(folder: Path) -> None:
    ItemJournal(next((folder / "items").glob("*.jsonl"))).read()


def serve_journal(folder: Path) -> None:
    shutil.copytree(folder / "items", folder / "bundle.items")
    serve_bundle(folder)


def read_redis_log(folder: Path) -> None:
    catalog = Bundle.open(folder / "bundle").catalog()
    open_log(f"redis://127.0.0.1:{(folder / 'port').read_text()}/0", catalog, "items").read()


def build_from_events(folder: Path) -> None:
    words = ("--items", "data/items.jsonl", "--events", "events", "--out", "new")
    run_command(folder, ("recserve", "--debug", "build", *words))


def continue_batch(folder: Path) -> None:
    with OutputFolder(folder / "batch" / "slates"):
        pass


# Each format with what writes another version into it, and the doors that open it.
FORMATS: dict[str, tuple[Callable[[Path, object], None], tuple[Callable[[Path], object], ...]]] = {
    "bundle": (other_bundle, (open_bundle, serve_bundle, verify_bundle)),
    "history, LMDB": (other_lmdb, (read_lmdb, show_history)),
    "history, Redis": (other_redis_history, (read_redis, append_redis)),
    "journal": (other_journal, (read_journal, serve_journal)),
    "log, Redis": (other_redis_log, (read_redis_log,)),
    "slates": (
        other_parquet("slates/slates-*.parquet", "recserve-slate-log"),
        (lambda folder: read_log(folder / "slates", "slates"),),
    ),
    "outcomes": (
        other_parquet("slates/outcomes-*.parquet", "recserve-slate-log"),
        (lambda folder: read_log(folder / "slates", "outcomes"),),
    ),
    "events": (
        other_parquet("events/events-*.parquet", "recserve-event-log"),
        (lambda folder: read_event_files(folder / "events"), build_from_events),
    ),
    "batch": (
        other_batch,
        (continue_batch, lambda folder: check_output(folder / "batch" / "slates", False)),
    ),
    "experiments": (other_counts, (lambda folder: SavedCounts(folder / "experiments", [Shelf()]),)),
    "retrain": (other_run, (lambda folder: Run.latest(folder / "runs", "some"),)),
    "popularity": (
        other_popularity,
        (lambda folder: Popularity.load(folder / "history" / "popularity.safetensors"),),
    ),
}


@pytest.mark.parametrize("kind", OTHER_VERSIONS)
@pytest.mark.parametrize("name", FORMATS)
def test_another_version_is_refused_at_every_door(folder, name, kind):
    change, doors = FORMATS[name]
    change(folder, OTHER_VERSIONS[kind])
    for open_it in doors:
        with pytest.raises((ValueError, JournalError)) as refused:
            open_it(folder)
        said = str(refused.value)
        assert "\n" not in said and ("recserve" in said or "history" in said), said
        if kind == "newer":
            assert "newer recserve" in said or "nother version of recserve" in said, said
        elif not name.startswith("history"):
            assert "format is" in said and "expected 'recserve-" in said, said


def json_fields(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of each field of JSON objects."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield (*path, key)
            yield from json_fields(value, (*path, key))


def rename(content: Any, path: tuple[Any, ...]) -> None:
    for key in path[:-1]:
        content = content[key]
    content[f"{path[-1]}_renamed"] = content.pop(path[-1])


RECORDS = sorted(
    path.relative_to(LATEST / "bundle").as_posix()
    for path in (LATEST / "bundle").rglob("*.json")
    if path.name not in ("manifest.json", "terms.json")
)


@pytest.mark.parametrize("name", RECORDS)
def test_a_renamed_field_of_a_bundle_is_refused_in_words(name, tmp_path):
    """What the bundles of another commit look like: each dataclass that is read from a file."""
    shutil.copytree(LATEST / "bundle", tmp_path / "bundle")
    source, manifest = tmp_path / "bundle" / name, tmp_path / "bundle" / "manifest.json"
    text, whole = source.read_text(encoding="utf-8"), json.loads(manifest.read_text("utf-8"))
    paths = list(json_fields(json.loads(text)))
    for path in random.Random(name).sample(paths, min(3, len(paths))):
        content = json.loads(text)
        rename(content, path)
        source.write_text(json.dumps(content), encoding="utf-8")
        data = source.read_bytes()
        whole["files"][name] = {"sha256": sha256(data).hexdigest(), "size": len(data)}
        manifest.write_text(json.dumps(whole), encoding="utf-8")
        with pytest.raises(ValueError) as refused:
            open_all(tmp_path / "bundle")
        said = str(refused.value)
        assert "\n" not in said and "__init__" not in said, said
        assert str(path[-1]) in said or source.name in said or source.parent.name in said, said


def open_all(folder: Path) -> None:
    """Opens what a server opens, and the baseline that only an evaluation reads."""
    load_sasrec(folder / "sasrec", torch.from_numpy(Bundle.open(folder).catalog().vectors))
    Service.open(folder, None, "cpu").close()


def test_the_recorded_files_name_the_formats_of_the_page():
    page = (HERE.parents[2] / "docs/reference/formats.md").read_text(encoding="utf-8")
    found = {json.loads((LATEST / "bundle/manifest.json").read_text("utf-8"))["format"]}
    for path in LATEST.rglob("*.parquet"):
        found.add((pq.read_schema(path).metadata or {}).get(FORMAT_KEY.encode(), b"").decode())
    counts = gzip.decompress((LATEST / "experiments/shelf.counts.gz").read_bytes())
    found.add(msgspec.msgpack.decode(counts)["format"])
    with safe_open(LATEST / "history/popularity.safetensors", "numpy") as file:
        found.add(file.metadata()[FORMAT_KEY])
    assert {name for name in found if name} == {
        "recserve-bundle/1", "recserve-slate-log/1", "recserve-event-log/1",
        "recserve-experiment/1", "recserve-popularity/1",
    }  # fmt: skip
    assert all(f"`{name}`" in page for name in found if name)
