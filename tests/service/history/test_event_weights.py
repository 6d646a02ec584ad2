"""Weights of events from the build to the slate: what counts, what is lowered, at each door."""

import random
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer.testing

from recserve.bundle.bundle import Bundle, BundleError
from recserve.cli import app
from recserve.features.synthetic import SyntheticOptions, write_synthetic
from recserve.schemas.items import RecommendRequest
from recserve.schemas.shorthand import check_body
from recserve.service import Service, ServiceOptions, similar
from recserve.service.similar import NEAR, ItemSimilarity
from tests.support.live_server import live
from tests.support.tiny_bundle import tiny_bundle

TYPES = ("click", "purchase", "rating", "dislike")
FLAGS = ("purchase=3", "rating<3=0.5", "rating<1.5=0", "rating=2", "dislike=1")
NUM_ITEMS = 500


def weight_of(event):
    """The weight of a positive event by FLAGS."""
    if event["type"] == "rating":
        return 0 if event["value"] < 1.5 else 0.5 if event["value"] < 3 else 2
    return 3 if event["type"] == "purchase" else 1


def typed_files(folder):
    files = write_synthetic(folder, SyntheticOptions(NUM_ITEMS, 40, 16, seed=3))
    table, draw = pq.read_table(files.events), random.Random(4)
    types = [draw.choice(TYPES) for _ in range(table.num_rows)]
    values = [draw.choice((1.0, 2.0, 3.0, 5.0)) for _ in types]
    for name, column in (("type", pa.array(types)), ("value", pa.array(values, pa.float32()))):
        if name in table.column_names:
            table = table.drop_columns(name)
        table = table.append_column(name, column)
    pq.write_table(table, files.events)
    return files, table


def build(files, out, weights, *flags):
    inputs = ["--items", str(files.items), "--events", str(files.events), "--out", str(out)]
    named = [text for weight in weights for text in ("--weight", weight)]
    return typer.testing.CliRunner().invoke(app, ["build", *inputs, *named, *flags])


@pytest.fixture(scope="module")
def weighted(tmp_path_factory):
    """A built bundle with weights, the build's output and the rows of its events."""
    folder = tmp_path_factory.mktemp("weighted")
    files, table = typed_files(folder / "data")
    done = build(files, folder / "bundle", FLAGS)
    assert done.exit_code == 0, done.output
    return folder / "bundle", done.output, table.to_pylist(), files


def test_the_counts_of_a_build_are_sums_of_weights(weighted):
    path, output, rows, _ = weighted
    bundle = Bundle.open(path)
    users = {}
    for event in sorted(rows, key=lambda e: e.get("timestamp") or e.get("position")):
        if event["type"] != "dislike":
            users.setdefault(event["user_id"], []).append(event)
    sums = Counter()
    for events in users.values():
        for event in events[:-2] if len(events) >= 3 else events:
            sums[event["item_id"]] += weight_of(event)
    catalog = bundle.catalog()
    assert catalog.popularity.tolist() == [sums[item_id] for item_id in catalog.items.ids]
    zeros = sum(e["type"] == "rating" and weight_of(e) == 0 for e in rows)
    assert f"event type rating: {zeros} count 0, " in output
    assert bundle.manifest.build["event_weights"] == sorted(FLAGS)
    assert {"event_weights"} == set(bundle.manifest.build) - set(_unweighted(weighted).build)


def _unweighted(weighted):
    path, _, _, files = weighted
    out = path.parent / "plain"
    if not out.exists():
        assert build(files, out, ()).exit_code == 0
    return Bundle.open(out).manifest


@pytest.mark.parametrize("door", ["python", "http"])
def test_live_events_count_their_weights(weighted, tmp_path, door):
    draw = random.Random(door)
    options = ServiceOptions(journal=tmp_path / "items")
    service = Service.open(weighted[0], f"lmdb:{tmp_path}/store", "cpu", options)
    with live(service) as client:
        items = service.samples(1, 12)["items"]
        before = {item: service.item(item).popularity for item in items}
        sums, sent = Counter(), []
        for number in range(60):
            event = {"item_id": draw.choice(items), "type": draw.choice(TYPES)}
            event |= {"value": draw.choice((1.0, 2.0, 3.0, 5.0))}
            sums[event["item_id"]] += 0 if event["type"] == "dislike" else weight_of(event)
            sent.append(event | {"user_id": f"u{number % 7}", "event_id": f"e{number}"})
        for part in (sent[:20], sent[20:], sent[10:30]):  # repeated events count once
            if door == "python":
                assert service.add_events({"events": part}).rejected == []
            else:
                assert client.post("/v1/events", json={"events": part}).json()["rejected"] == []
        for item in items:
            gained = service.item(item).popularity - before[item]
            assert gained == pytest.approx(sums[item], abs=0.1)
        nameless = {"user_id": "ann", "item_id": items[0], "type": "rating"}
        (refused,) = service.add_events({"events": [nameless]}).rejected
        assert refused.reason == (
            "value: is required for type 'rating', which has a weight by value"
        )


@pytest.mark.parametrize(
    ("weights", "flags", "message"),
    [
        (("purchase",), (), "expected NAME=WEIGHT"),
        (("purchase=-1",), (), "the weight is -1; expected 0..100"),
        (("purchase=2", "purchase=3"), (), "'purchase' has two weights"),
        (("click=1",), ("--read", "click"), "'click' is read"),
        (("click=0", "purchase=0", "rating=0"), (), "all training events have the weight 0"),
    ],
)
def test_a_build_refuses_bad_weights(weighted, tmp_path, weights, flags, message):
    done = build(weighted[3], tmp_path / "out", weights, *flags)
    assert done.exit_code and message in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_a_type_with_weights_by_value_needs_values(weighted, tmp_path):
    files, table = typed_files(tmp_path / "data")
    place = table.column("type").to_pylist().index("rating")
    values = table.column("value").to_pylist()
    values[place] = None
    column = pa.array(values, pa.float32())
    pq.write_table(table.drop_columns("value").append_column("value", column), files.events)
    done = build(files, tmp_path / "out", ("rating<3=2",))
    assert done.exit_code and "column value" in str(done.exception)


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("build", "event_weights", "purchase=3"),
        ("build", "event_weights", ["purchase=x"]),
        ("build", "event_weights", [3]),
        ("recommender", "negative_weight", -1),
        ("recommender", "negative_weight", "1"),
    ],
)
def test_a_manifest_with_bad_weights_is_refused(tmp_path, section, name, value):
    bundle = Bundle.open(tiny_bundle(tmp_path))
    bundle.commit(section, {**bundle.manifest.sections[section], name: value})
    with pytest.raises(BundleError, match=f"{section}.{name} is "):
        Bundle.open(bundle.root)


@pytest.fixture(scope="module")
def lowering(tmp_path_factory):
    """A bundle whose negative events lower similar items."""
    bundle = Bundle.open(tiny_bundle(tmp_path_factory.mktemp("lowering"), ranker=False))
    weights = ["dislike=2", "hide<3=0.5", "hide=1"]
    bundle.commit("build", {**bundle.manifest.build, "event_weights": weights})
    recommender = {"dense_weight": 1.5, "negative_weight": 0.75}
    bundle.commit("recommender", {**bundle.manifest.recommender, **recommender})
    return bundle


def lowered_by_hand(vectors, disliked):
    """Amounts by row: for each disliked item its NEAR nearest ones, times cosine and weight."""
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    amounts = np.zeros(len(vectors))
    for row, weight in disliked:
        cosines = unit @ unit[row]
        for near in np.argsort(-cosines)[:NEAR]:
            amounts[near] = max(amounts[near], 0.75 * weight * cosines[near])
    return amounts


@pytest.mark.parametrize("seed", range(6))
def test_near_items_are_those_of_a_plain_loop(seed, monkeypatch):
    """With equal vectors, vectors of zeros and live items, also for vectors asked for before."""
    draw = np.random.default_rng(seed)
    monkeypatch.setattr(similar, "MAX_KNOWN", 3)
    count, live = int(draw.integers(20, 300)), int(draw.integers(0, 80))
    vectors = draw.normal(size=(count + live, 4)).astype(np.float32)
    copies = int(draw.choice([0, 30, 200]))
    vectors[draw.integers(0, len(vectors), copies)] = vectors[0]
    vectors[draw.integers(0, len(vectors), 3)] = 0
    similarity = ItemSimilarity.of(vectors[:count])
    tail = SimpleNamespace(vectors=SimpleNamespace(view=lambda size: vectors[count:]))
    items = SimpleNamespace(vectors=vectors, tail=tail, num_tail=live, num_rows=len(vectors))
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    for _ in range(8):
        rows = draw.integers(0, len(vectors), int(draw.integers(1, 6)))
        amounts = draw.uniform(0, 2, len(rows)).astype(np.float32)
        expected = np.zeros(len(vectors))
        for row, amount in zip(rows, amounts, strict=True):
            cosines = unit @ unit[row]
            least = max(np.sort(cosines)[-NEAR:][0], 1e-6)
            near = cosines >= least - 1e-6
            expected[near] = np.maximum(expected[near], amount * cosines[near])
        found = similarity.near_items(rows, amounts, items)
        assert (np.diff(found.rows) > 0).all()
        lowered = np.zeros(len(vectors))
        lowered[found.rows] = found.amounts
        np.testing.assert_allclose(lowered, expected, atol=1e-5)


def ask(service, client, door, body):
    """Returns ids and scores of a slate through a door."""
    if door == "http":
        found = client.post("/v1/recommend", json=body).json()["items"]
        return [(item["item_id"], item["score"]) for item in found]
    if door == "batch":
        (pending,) = service.recommender.begin_all([check_body(body, RecommendRequest)], "r")
        return [(item.item_id, item.score) for item in pending.wait().items]
    return [(item.item_id, item.score) for item in service.recommend(body).items]


@pytest.mark.parametrize(
    ("door", "strategy"),
    [("python", "beam"), ("http", "speculative"), ("batch", "nezha"), ("python", "auto")],
)
def test_a_negative_event_lowers_similar_items(lowering, tmp_path, door, strategy):
    """All items of a twin without negative events, minus what a plain loop takes away."""
    draw = random.Random(f"{door} {strategy}")
    catalog = lowering.catalog()
    rows = {item_id: row for row, item_id in enumerate(catalog.items.ids)}
    service = Service.open(lowering.root, f"lmdb:{tmp_path}/store", "cpu")
    with live(service) as client:
        for number in range(3):
            liked, hated = [], []
            for place, item in enumerate(draw.sample(catalog.items.ids, 9)):
                event = {"item_id": item, "timestamp": int(time.time()) - 90 + place}
                if place % 3:
                    liked.append(event | {"type": "click"})
                    continue
                kind, value = draw.choice((("dislike", 1.0), ("hide", 2.0), ("hide", 4.0)))
                hated.append(event | {"type": kind, "value": value})
            for user, events in ((f"t{number}", liked), (f"u{number}", liked + hated)):
                sent = [event | {"user_id": user} for event in events]
                assert service.add_events({"events": sent}).rejected == []
            away = [event["item_id"] for event in hated]
            body = {"k": 480, "beam_width": 500, "strategy": strategy, "exclude": {"seen": False}}
            twin = {"user": {"id": f"t{number}"}}
            twin["exclude"] = {"seen": False, "item_ids": away}
            plain = {i.item_id: i for i in service.recommend(body | twin).items}
            weights = {("dislike", 1.0): 2, ("hide", 2.0): 0.5, ("hide", 4.0): 1}
            disliked = [(rows[e["item_id"]], weights[e["type"], e["value"]]) for e in hated]
            amounts = lowered_by_hand(catalog.vectors, disliked)
            expected = {
                item_id: item.score - 1.5 * amounts[rows[item_id]]
                for item_id, item in plain.items()
            }
            found = ask(service, client, door, body | {"user": {"id": f"u{number}"}})
            assert not set(away) & {item_id for item_id, _ in found}
            both = {item_id: score for item_id, score in found if item_id in expected}
            assert len(both) > 400
            for item_id, score in both.items():
                assert score == pytest.approx(expected[item_id], abs=2e-4), item_id
            scores = [score for _, score in found]
            assert scores == sorted(scores, reverse=True)
            # The parts of an explained score hold what is taken away.
            explained = service.recommend(
                body | {"user": {"id": f"u{number}"}, "explain": True, "strategy": "beam"}
            )
            for item in explained.items:
                parts = item.parts
                total = parts.log_prob + parts.dense + parts.bonus + parts.shown
                assert total == pytest.approx(item.score, abs=1e-4)
                assert parts.bonus == pytest.approx(-1.5 * amounts[rows[item.item_id]], abs=2e-4)
            # Without a dense weight, nothing is lowered.
            alone = body | {"strategy": "beam", "dense_weight": 0, "k": 20}
            one = service.recommend(alone | {"user": {"id": f"u{number}"}}).items
            other = service.recommend(alone | twin).items
            assert [i.item_id for i in one] == [i.item_id for i in other]
