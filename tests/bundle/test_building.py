"""Building: from Parquet to a bundle, deterministic, whole or not at all."""

import dataclasses
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recserve.bundle.building import BuildOptions, BuildReport, build_bundle, rebuild_bundle
from recserve.bundle.bundle import Bundle, BundleError
from recserve.features.history.event_weights import EventWeights
from recserve.features.synthetic import SyntheticFiles, SyntheticOptions, write_synthetic
from recserve.features.tables import large_events, mapped_arrays
from recserve.features.tables.event_table import read_events
from recserve.features.tables.items import read_items
from recserve.features.tables.parquet import BadRowError, SchemaError
from recserve.features.vectors import vectors
from tests.support.grids import covering
from tests.support.input_parts import KINDS, SEPARATOR, write_parts, write_table
from tests.support.pretend_faiss import installed


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> SyntheticFiles:
    return write_synthetic(tmp_path_factory.mktemp("data"), SyntheticOptions(500, 60, 12))


def build(files: SyntheticFiles, out: Path, **options: Any) -> BuildReport:
    small = {"levels": 2, "codes": 16, "text_dim": 16, "collaborative_dim": 8} | options
    return build_bundle(
        BuildOptions(files.items, files.events, out, **small), log=lambda line: None
    )


@pytest.mark.parametrize("quantizer", ["residual", "product"])
def test_same_input_same_bundle(files: SyntheticFiles, tmp_path: Path, quantizer: str) -> None:
    reports = [build(files, tmp_path / name, quantizer=quantizer) for name in ("one", "two")]
    one, two = (Bundle.open(report.out) for report in reports)
    assert dict(one.manifest.files) == dict(two.manifest.files)
    assert reports[0].catalog_version == reports[1].catalog_version
    other = build(files, tmp_path / "three", quantizer=quantizer, seed=1)
    assert other.catalog_version != reports[0].catalog_version


@pytest.mark.parametrize("parts", [1, 3])
def test_data_that_does_not_fit_gives_the_same_bundle(
    files: SyntheticFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    """Chunks, buckets, blocks and ranges of items are so small that all of them are many."""
    table = pq.read_table(files.events)
    size = -(-len(table) // parts)
    paths = [tmp_path / f"part{n}.parquet" for n in range(parts)]
    for n, path in enumerate(paths):
        pq.write_table(table.slice(n * size, size), path)
    events = paths[0] if parts == 1 else tuple(paths)
    small = {"levels": 2, "codes": 16, "text_dim": 16, "collaborative_dim": 8}
    said: list[list[str]] = [[], []]
    for name, lines in zip(("whole", "divided"), said, strict=True):
        if name == "divided":
            for module, bound, value in (
                (large_events, "ROWS_IN_MEMORY", -1),
                (large_events, "CHUNK_ROWS", 100),
                (large_events, "BUCKET_ROWS", 150),
                (mapped_arrays, "BLOCK_ROWS", 70),
                (mapped_arrays, "IN_MEMORY_BYTES", 200),
                (vectors, "RANGE_EVENTS", 90),
            ):
                monkeypatch.setattr(module, bound, value)
        options: dict[str, Any] = {**small, "event_weights": EventWeights(("purchase=2.7",))}
        build_bundle(BuildOptions(files.items, events, tmp_path / name, **options), lines.append)
    one, two = (Bundle.open(tmp_path / name) for name in ("whole", "divided"))
    assert dict(one.manifest.files) == dict(two.manifest.files)
    assert one.manifest.build == two.manifest.build
    assert said[0][:-1] == said[1][:-1]  # the last line has the folder and the seconds
    assert two.events().user_ids == one.events().user_ids


@pytest.mark.parametrize("seed", range(6))
def test_folders_of_parts_give_the_bundle_of_one_file_each(
    files: SyntheticFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Items, events and vectors of each kind, in parts that may be in sub-folders."""
    draw, kinds = random.Random(seed), KINDS[seed % 3 :] + KINDS[: seed % 3]
    items, events = pq.read_table(files.items), pq.read_table(files.events)
    lists = np.random.default_rng(seed).normal(size=(len(items), 4)).tolist()
    vectors_of = pa.table({"item_id": items["item_id"], "vector": lists})
    whole: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    tables = {"items": (kinds[0], items), "events": (kinds[1], events)}
    if draw.random() < 0.5:
        tables["embeddings"] = ("parquet", vectors_of)
    for name, (kind, table) in tables.items():
        whole[name] = tmp_path / f"{name}.{kind}"
        write_table(whole[name], table)
        parts[name] = write_parts(tmp_path / name, kind, table, draw)
    small: dict[str, Any] = {"levels": 2, "codes": 16, "text_dim": 16, "collaborative_dim": 8}
    small |= {"split": {"categories": SEPARATOR}} if kinds[0] == "csv" else {}
    build_bundle(BuildOptions(out=tmp_path / "one", **whole, **small), log=lambda line: None)
    if seed % 2:
        monkeypatch.setattr(large_events, "ROWS_IN_MEMORY", -1)
        monkeypatch.setattr(large_events, "CHUNK_ROWS", 100)
    build_bundle(BuildOptions(out=tmp_path / "two", **parts, **small), log=lambda line: None)
    one, two = (Bundle.open(tmp_path / name) for name in ("one", "two"))
    assert dict(one.manifest.files) == dict(two.manifest.files)
    assert one.manifest.build == two.manifest.build


def test_pairs_of_many_events_are_those_of_some_users(
    files: SyntheticFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = read_items(files.items)[0]
    log = read_events(files.events, items)[0]
    monkeypatch.setattr(vectors, "MAX_PAIR_EVENTS", log.num_events // 3 + 1)
    third = log.select(log.user_indices() % 3 == 0)
    found = vectors.collaborative_vectors(log, len(items), 8, 0)
    monkeypatch.setattr(vectors, "MAX_PAIR_EVENTS", log.num_events)
    assert np.array_equal(found, vectors.collaborative_vectors(third, len(items), 8, 0))


@pytest.mark.parametrize(
    "quantizer,device,built",
    covering(("residual", "product"), ("auto", "cpu", "cuda"), (True, False), pairs=True),
)
def test_the_device_that_clusters_is_chosen_and_recorded(
    files: SyntheticFiles, tmp_path: Path, quantizer: str, device: str, built: bool
) -> None:
    """The stand-in computes as the CPU does, so the codes are the same."""
    same = build(files, tmp_path / "cpu", quantizer=quantizer)
    with installed() if built else nullcontext() as gpu:
        if device == "cuda" and not built:
            with pytest.raises(ValueError, match="faiss-gpu"):
                build(files, tmp_path / "b", quantizer=quantizer, device=device)
            return
        made = build(files, tmp_path / "b", quantizer=quantizer, device=device)
        there = built and device != "cpu"
        # On each of two levels: k-means, what it leaves over, and the codes.
        assert gpu is None or (gpu.calls >= 6 if there else not gpu.calls)
    bundle = Bundle.open(made.out)
    assert bundle.manifest.build["device"] == ("cuda" if there else "cpu")
    codes = [Bundle.open(out).catalog().semantic_ids.codes for out in (same.out, made.out)]
    np.testing.assert_array_equal(*codes)
    again = rebuild_bundle(bundle, bundle.events(), tmp_path / "again", lambda line: None)
    assert again.manifest.build["device"] == "cpu"


def test_report_counts(files: SyntheticFiles, tmp_path: Path) -> None:
    lines: list[str] = []
    options = BuildOptions(files.items, files.events, tmp_path / "b", codes=16, levels=2)
    report = build_bundle(options, log=lines.append)
    catalog = Bundle.open(report.out).catalog()
    assert (report.num_items, report.num_users) == (500, 60)
    assert report.vector_dim == 256 and catalog.vectors.shape == (500, 256)
    assert report.codebook_sizes == catalog.semantic_ids.codebook_sizes
    assert 0 < report.reconstruction_error < 1 and report.codes.collision_share > 0
    text = "\n".join(lines)
    assert "500 items, 60 users" in text and "semantic ids:" in text and "level 1:" in text
    assert "variance lost" in text and report.catalog_version in text


def test_vectors_are_blind_to_held_events(files: SyntheticFiles, tmp_path: Path) -> None:
    """Other last and last but one events of every user: the same catalogue, to the byte."""
    table = pq.read_table(files.events)
    users = np.array(table.column("user_id").to_pylist())
    ends = np.append(np.flatnonzero(users[1:] != users[:-1]), len(users) - 1)
    items = np.array(table.column("item_id").to_pylist())
    held = np.concatenate([ends, ends - 1])
    items[held] = "item000007"
    changed = table.set_column(1, "item_id", pa.array(items.tolist()))
    pq.write_table(changed, tmp_path / "events.parquet")
    other = SyntheticFiles(files.items, tmp_path / "events.parquet")
    one, two = build(files, tmp_path / "one"), build(other, tmp_path / "two")
    assert one.catalog_version == two.catalog_version


def test_a_bundle_holds_out_the_users_of_its_build(files: SyntheticFiles, tmp_path: Path) -> None:
    """The others' newest events count, and the bundle says how many users it holds out."""
    bundles = []
    for number, users in enumerate((None, 5)):
        out = tmp_path / str(number)
        options = BuildOptions(
            files.items, files.events, out, codes=16, levels=2, holdout_users=users
        )
        build_bundle(options, lambda _: None)
        bundles.append(Bundle.open(out))
    assert "holdout_users" not in bundles[0].manifest.build
    for bundle, users in zip(bundles, (None, 5), strict=True):
        events, catalog = bundle.events(), bundle.catalog()
        train = events.leave_one_out().train
        expected = int((events.lengths() >= 3).sum()) if users is None else users
        assert events.holdout().sum() == expected
        assert events.num_events - train.num_events == 2 * expected
        assert np.array_equal(catalog.popularity, train.popularity(len(catalog)))
    again = rebuild_bundle(bundles[1], bundles[1].events(), tmp_path / "again", lambda _: None)
    assert again.events().holdout().sum() == bundles[0].events().holdout().sum()
    assert np.array_equal(again.catalog().popularity, bundles[0].catalog().popularity)


def test_own_vectors_take_the_place_of_text(files: SyntheticFiles, tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).normal(size=(500, 12)).astype(np.float32)
    np.save(tmp_path / "v.npy", vectors)
    build(files, tmp_path / "b", embeddings=tmp_path / "v.npy", collaborative_dim=0)
    bundle = Bundle.open(tmp_path / "b")
    assert np.array_equal(bundle.catalog().vectors, vectors)
    assert bundle.text_encoder() is None and bundle.manifest.build["own_vectors"] is True
    report = build(files, tmp_path / "c", embeddings=tmp_path / "v.npy", collaborative_dim=8)
    assert report.vector_dim == 20


def test_bad_rows_raise_or_are_dropped_everywhere(files: SyntheticFiles, tmp_path: Path) -> None:
    """A refused item takes its events and its row of the user's vectors with it."""
    table = pq.read_table(files.items)
    visited = pq.read_table(files.events).column("item_id")[0].as_py()
    row = table.column("item_id").to_pylist().index(visited)
    again = pa.concat_tables([table.slice(0, row), table.slice(row - 1, 1), table.slice(row + 1)])
    pq.write_table(again, tmp_path / "items.parquet")
    np.save(tmp_path / "v.npy", np.arange(1000, dtype=np.float32).reshape(500, 2))
    broken = SyntheticFiles(tmp_path / "items.parquet", files.events)
    own = {"embeddings": tmp_path / "v.npy", "collaborative_dim": 0}
    with pytest.raises(BadRowError, match=f"items.parquet: column item_id, row {row}"):
        build(broken, tmp_path / "b", **own)
    assert not (tmp_path / "b").exists()
    report = build(broken, tmp_path / "b", on_bad_rows="skip", **own)
    assert report.bad_items.dropped == {"duplicate item_id": 1}
    assert report.bad_events.dropped["unknown item_id"] > 0 and report.num_items == 499
    assert Bundle.open(tmp_path / "b").catalog().vectors[row].tolist() == [2 * row + 2, 2 * row + 3]


def test_one_run_reports_every_column_and_names_the_problems_of_both_files(
    files: SyntheticFiles, tmp_path: Path
) -> None:
    items, events = pq.read_table(files.items), pq.read_table(files.events)
    nothing, stamps = pa.nulls(len(items)), pa.array([{"a": 1}] * len(items))
    items = items.append_column("empty", nothing).append_column("nested", stamps)
    items = items.append_column("category", nothing.cast(pa.string()).fill_null("x"))
    one, two = tmp_path / "items.parquet", tmp_path / "events.parquet"
    pq.write_table(items, one)
    pq.write_table(events.append_column("event_type", pa.array(["x"] * len(events))), two)
    lines: list[str] = []
    small = {"levels": 2, "codes": 16, "text_dim": 16, "collaborative_dim": 0}
    build_bundle(BuildOptions(one, two, tmp_path / "b", **small), log=lines.append)  # type: ignore[arg-type]
    text = "\n".join(lines)
    for name in items.column_names:
        assert f"{one}: column {name} (" in text
    assert "column empty (null): ignored: no row has a value" in text
    assert "nested (struct<a: int64>): attribute, not filterable: filters read" in text
    assert "category (string): attribute, filterable" in text
    assert "column event_type (string): not used" in text

    pq.write_table(items.rename_columns([f"x{name}" for name in items.column_names]), one)
    pq.write_table(events.drop_columns(["user_id"]), two)
    with pytest.raises(SchemaError) as refused:
        build_bundle(BuildOptions(one, two, tmp_path / "c"), log=lines.append)
    assert f"{one}: column item_id" in str(refused.value)
    assert f"{two}: column user_id" in str(refused.value)


def test_a_failed_build_leaves_nothing(
    files: SyntheticFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Bundle, "commit", fail)
    with pytest.raises(OSError, match="disk full"):
        build(files, tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def test_an_output_in_use_is_refused(files: SyntheticFiles, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    build(files, tmp_path / "b")
    with pytest.raises(BundleError, match="not empty"):
        build(files, tmp_path / "b")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"levels": 0}, "levels is 0; expected 1..64"),
        ({"codes": 1}, "codes is 1"),
        ({"codes": 0}, "codes is 0"),
        ({"codes": (64, 1)}, "codes is 1"),
        ({"codes": (64, 16), "levels": 3}, "codes names 2 levels; levels is 3"),
        ({"codes": (64, 16), "quantizer": "product"}, "a product quantiser has the same number"),
        ({"text_dim": -1}, "text_dim is -1"),
        ({"holdout_users": 0}, "holdout_users is 0"),
        ({"quantizer": "none"}, "quantizer is 'none'"),
        ({"collaborative_weight": 0}, "collaborative_weight is 0"),
        ({"text_dim": 0, "collaborative_dim": 0}, "an item needs a vector"),
    ],
)
def test_options_are_checked(option: dict[str, Any], message: str) -> None:
    plain = BuildOptions(Path("i"), Path("e"), Path("o"))
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(plain, **option)


@pytest.mark.parametrize(
    ("items", "options", "sizes"),
    [
        (0, {}, (256, 256, 256, 256)),
        (2047, {}, (256, 256, 256, 256)),
        (2048, {"levels": 2}, (512, 256)),
        (12_101, {}, (2048, 256, 256, 256)),
        (18_357, {}, (4096, 256, 256, 256)),
        (10**9, {"levels": 1}, (4096,)),
        (12_101, {"codes": 256}, (256, 256, 256, 256)),
        (12_101, {"quantizer": "product"}, (256, 256, 256, 256)),
        (12_101, {"codes": (64, 16)}, (64, 16)),
        (12_101, {"codes": 16, "levels": 2}, (16, 16)),
    ],
)
def test_codes_of_each_level(items: int, options: dict[str, Any], sizes: tuple[int, ...]) -> None:
    plain = BuildOptions(Path("i"), Path("e"), Path("o"))
    assert dataclasses.replace(plain, **options).codebook_sizes(items) == sizes


def test_a_number_of_codes_for_each_level(files: SyntheticFiles, tmp_path: Path) -> None:
    """A bundle with other events gets codes of the same sizes."""
    report = build(files, tmp_path / "a", levels=None, codes=(64, 16, 8))
    assert report.codebook_sizes[:3] == (64, 16, 8)
    bundle = Bundle.open(report.out)
    again = rebuild_bundle(bundle, bundle.events(), tmp_path / "b", lambda line: None)
    assert again.catalog().semantic_ids.codebook_sizes[:3] == (64, 16, 8)


@pytest.mark.slow
def test_beauty_builds_with_its_real_shape(beauty: Path, tmp_path: Path) -> None:
    options = BuildOptions(beauty / "items.parquet", beauty / "events.parquet", tmp_path / "b")
    report = build_bundle(options, log=lambda line: None)
    assert report.codebook_sizes[:4] == (2048, 256, 256, 256)
    assert report.codes.collision_share < 0.10 and min(report.codes.used) > 0.95
    assert report.reconstruction_error < 0.5
    Bundle.open(tmp_path / "b").verify()
