"""Items that change while answers go out: over the service, over HTTP, across a kill."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from recserve.engine.beam_search_graph import BeamSearchGraphs, SearchLimits, SearchShape
from recserve.engine.capture import EagerRecorder
from recserve.features.catalog.catalog_log import JournalError
from recserve.features.catalog.item_journal import ItemJournal
from recserve.features.catalog.versions import ChangeSet
from recserve.schemas.events import EventInput, EventsRequest
from recserve.schemas.items import (
    Candidate,
    RankRequest,
    RecommendRequest,
    RollbackRequest,
    UserRef,
)
from recserve.service import live_catalog as live_catalog_module
from recserve.service.errors import UnknownItem, UnknownVersion
from tests.support.live_catalogues import base_of, item_like, lonely, opened, put, scores, slate
from tests.support.tiny_bundle import shared_bundle
from tests.support.waiting import until


def rank(service, *ids, scorer="ranker", history=None):
    history = base_of(service).items.ids[:3] if history is None else history
    body = RankRequest(
        history=history, candidates=[Candidate(item_id=i) for i in ids], scorer=scorer
    )
    return service.rank(body)


@pytest.mark.parametrize("strategy", ["beam", "speculative"])
@pytest.mark.parametrize("dense_weight", [0.0, 1.0])
def test_a_new_item_is_recommended_and_ranked_at_once(service, strategy, dense_weight):
    before = slate(service)
    answer = put(service, item_like(service, "new"))
    assert (answer.inserted, answer.updated, answer.rejected, answer.degraded) == (1, 0, [], [])
    assert answer.catalog_version == base_of(service).version + ".1"
    found = slate(service, strategy=strategy, dense_weight=dense_weight)
    assert found.catalog_version == answer.catalog_version != before.catalog_version
    assert set(scores(found)) == set(scores(before)) | {"new"} and len(before.items) == 500
    for scorer in ("ranker", "likelihood"):
        ranked = rank(service, "new", base_of(service).items.ids[5], scorer=scorer)
        assert not ranked.missing_item_ids and ranked.catalog_version == answer.catalog_version
    if not dense_weight:
        assert {r.item_id: r.score for r in ranked.items}["new"] == pytest.approx(
            scores(found)["new"], abs=1e-5
        )
    there = service.item("new")
    assert there.title == "Rose lipstick" and there.categories == ["Care > Lips"]
    beside = base_of(service).semantic_ids.codes[lonely(service)].tolist()
    assert there.semantic_id == [*beside[:2], 1]
    assert there.popularity == 0


def test_text_alone_places_a_new_item_as_the_build_would(service):
    catalog, row = base_of(service), lonely(service)
    words = {"title": catalog.items.titles[row], "categories": catalog.items.categories[row]}
    put(service, {"item_id": "twin", **words})
    assert np.allclose(service.catalog.current.items.vectors[500], catalog.vectors[row], atol=1e-6)
    assert service.item("twin").semantic_id == [*catalog.semantic_ids.codes[row, :2].tolist(), 1]


def test_no_item_is_refused_because_its_neighbours_took_the_ids(service):
    """Many variants of one product share a title, and so a vector."""
    words = {"title": base_of(service).items.titles[0], "categories": []}
    answer = put(service, *({"item_id": f"same{i}", **words} for i in range(95)))
    more = put(service, *({"item_id": f"same{i}", **words} for i in range(95, 190)))
    assert (answer.inserted, answer.rejected, more.inserted, more.rejected) == (95, [], 95, [])
    ids = {tuple(service.item(f"same{i}").semantic_id) for i in range(190)}
    assert len(ids) == 190
    assert {one.reason for one in more.degraded} <= {
        "the semantic ids near this item are taken; it got one farther away"
    }
    assert more.degraded and scores(slate(service, k=900))["same189"] < 0


def test_new_words_keep_the_row_and_all_it_learned(service):
    item = base_of(service).items.ids[4]
    before, old = slate(service), service.item(item)
    answer = put(service, {"item_id": item, "title": "New", "categories": ["Odd > Corner"]})
    assert (answer.inserted, answer.updated) == (0, 1)
    now = service.item(item)
    assert (now.title, now.categories) == ("New", ["Odd > Corner"])
    assert now.semantic_id == old.semantic_id and now.attributes == old.attributes
    assert scores(slate(service)) == pytest.approx(scores(before), rel=1e-6)
    only = slate(service, filter={"eq": ["category", "Corner"]})
    assert [i.item_id for i in only.items] == [item]
    gone = slate(service, filter={"eq": ["category", old.categories[0]]})
    assert item not in scores(gone) and gone.items


def test_numbers_of_any_size_are_taken_and_ranked(service):
    """A price that float32 cannot hold has a score like any other, and so have its neighbours."""
    sizes = {"vast": 1.7e308, "low": -1e30, "whole": 10**30, "none": 0.0}
    answer = put(service, *(item_like(service, name, price=size) for name, size in sizes.items()))
    assert answer.inserted == 4 and not answer.rejected
    assert service.item("whole").attributes["price"] == 1e30
    ranked = rank(service, *sizes)
    assert len(ranked.items) == 4 and all(np.isfinite(item.score) for item in ranked.items)


def test_attributes_are_checked_and_filtered_by(service):
    answer = put(
        service,
        item_like(service, "cheap", price=0.25),
        item_like(service, "dear", attributes={"price": 1e6, "brand": "none such"}),
        item_like(service, "odd", prize=3),
        item_like(service, "odder", price="much"),
        {"item_id": "", "title": "x"},
        {"item_id": "short", "embedding": [1.0]},
        {"item_id": "cheap", "title": "twice"},
        {"title": "no id"},
    )
    assert answer.inserted == 2
    reasons = {note.index: note.reason for note in answer.rejected}
    assert sorted(reasons) == [2, 3, 4, 5, 6, 7]
    assert "did you mean price" in reasons[2] and "expected double" in reasons[3]
    assert "expected 16 numbers, got 1" in reasons[5] and "twice" in reasons[6]
    assert scores(slate(service, filter={"range": ["price", None, 0.3]})).keys() == {"cheap"}
    assert scores(slate(service, filter={"eq": ["brand", "none such"]})).keys() == {"dear"}
    put(service, {"item_id": "dear", "attributes": {"price": None}})
    assert service.item("dear").attributes == {"price": None, "brand": "none such"}
    assert not scores(slate(service, filter={"range": ["price", 1e5, None]}))


@pytest.mark.parametrize("size", [3.4e38, 1e30, 1e-30])
def test_an_embedding_of_any_length_has_its_direction(service, size):
    direction = np.linspace(-1, 1, 16)
    body = {"item_id": "plain", "embedding": direction.tolist()}
    other = {"item_id": "extreme", "embedding": (direction * size).tolist()}
    assert not put(service, body, other).degraded
    items = service.catalog.current.items
    plain, extreme = (items.vectors[items.visible.get(name)] for name in ("plain", "extreme"))
    np.testing.assert_allclose(extreme, plain, rtol=1e-5, atol=1e-7)


def test_a_new_vector_gives_a_new_place_and_keeps_the_history(service):
    ids = base_of(service).items.ids
    far = base_of(service).vectors[300]
    service.add_events(EventsRequest(events=[EventInput(user_id="me", item_id=ids[4])]))
    popularity = service.item(ids[4]).popularity
    counts = rank(service, ids[4], scorer="ranker").items[0].score
    put(service, {"item_id": ids[4], "embedding": far.tolist()})
    now = service.item(ids[4])
    assert now.semantic_id[:2] == base_of(service).semantic_ids.codes[300, :2].tolist()
    assert now.title == base_of(service).items.titles[4]
    assert now.popularity == popularity == base_of(service).popularity[4] + 1
    assert [e.item_id for e in service.history("me").events] == [ids[4]]
    everything = scores(slate(service))
    assert len(everything) == 500 and ids[4] in everything
    assert rank(service, ids[4], scorer="ranker").items[0].score != counts
    mine = service.recommend(RecommendRequest(user=UserRef(id="me"), k=600, beam_width=600))
    assert ids[4] not in {i.item_id for i in mine.items} and len(mine.items) == 499
    # The same vector again changes nothing but the version.
    row = service.catalog.current.rows.get(ids[4])
    put(service, {"item_id": ids[4], "embedding": far.tolist()})
    assert service.catalog.current.rows.get(ids[4]) == row


def test_hidden_items_are_answered_nowhere_and_can_come_back(service):
    ids = base_of(service).items.ids
    before = scores(slate(service, strategy="beam"))
    service.hide_item(ids[9])
    for fields in ({}, {"dense_weight": 1.0}, {"filter": {"range": ["price", 0, None]}}):
        assert ids[9] not in {i.item_id for i in slate(service, **fields).items}
    popular = service.recommend(RecommendRequest(history=[], k=600)).items
    assert len(popular) == 499 and ids[9] not in {i.item_id for i in popular}
    assert rank(service, ids[9], ids[3]).missing_item_ids == [ids[9]]
    with pytest.raises(UnknownItem):
        service.item(ids[9])
    with pytest.raises(UnknownItem):
        service.hide_item(ids[9])
    added = service.add_events(EventsRequest(events=[EventInput(user_id="x", item_id=ids[9])]))
    assert added.accepted == 1 and not added.rejected
    # What a user did with it still counts, and scores of the others stay what they were.
    with_it = slate(service, history=[ids[9], ids[1]])
    assert with_it.degraded == ["fewer_than_k"]
    now = scores(slate(service))
    assert now == pytest.approx({k: v for k, v in before.items() if k != ids[9]}, abs=1e-5)
    assert put(service, {"item_id": ids[9]}).inserted == 1
    assert scores(slate(service)) == pytest.approx(before, abs=1e-5)


def test_a_semantic_id_of_a_hidden_item_is_free_again(service):
    catalog = base_of(service)
    own = catalog.semantic_ids.codes[0].tolist()
    service.hide_item(catalog.items.ids[0])
    put(service, item_like(service, "heir", embedding=catalog.vectors[0].tolist()))
    taken = service.item("heir").semantic_id
    assert taken[:2] == own[:2]
    # Fill whatever is left under these codes, and then some: the last code moves on.
    answer = put(service, *[item_like(service, f"more-{n}", 0) for n in range(12)])
    assert answer.inserted == 12
    there = [tuple(service.item(i).semantic_id) for i in scores(slate(service))]
    assert len(set(there)) == len(there) == 512
    moved = [code for code in there if list(code[:1]) == own[:1] and list(code[:2]) != own[:2]]
    assert moved
    # The first item wants back in, and its old id belongs to somebody else.
    assert put(service, {"item_id": catalog.items.ids[0]}).inserted == 1
    assert len(scores(slate(service))) == 513


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("built", [True, False])
def test_a_hidden_item_that_returns_keeps_its_id_from_items_of_the_same_request(
    service, built, first
):
    name = base_of(service).items.ids[0] if built else "new"
    if not built:
        put(service, item_like(service, name))
    own, like = service.item(name).semantic_id, 0 if built else None
    service.hide_item(name)
    items = [{"item_id": name, "title": "Again"}, item_like(service, "heir", like)]
    put(service, *(items if first else items[::-1]))
    assert service.item(name).semantic_id == own != service.item("heir").semantic_id
    assert {name, "heir"} <= scores(slate(service)).keys()


def test_rollback_restores_what_was(service):
    ids = base_of(service).items.ids
    first = put(service, item_like(service, "one")).catalog_version
    expected = scores(slate(service))
    put(service, item_like(service, "two"), {"item_id": ids[2], "title": "other"})
    put(service, {"item_id": ids[3], "embedding": base_of(service).vectors[80].tolist()})
    service.hide_item(ids[5])
    answer = service.rollback_items(RollbackRequest(catalog_version=first))
    assert answer.restored == first and answer.catalog_version == first[:-1] + "5"
    found = slate(service)
    assert found.catalog_version == answer.catalog_version
    assert scores(found) == pytest.approx(expected, abs=1e-5)
    assert service.item(ids[2]).title == base_of(service).items.titles[2]
    put(service, item_like(service, "three"))
    assert set(scores(slate(service))) == set(expected) | {"three"}
    service.rollback_items(RollbackRequest(catalog_version=base_of(service).version))
    assert set(scores(slate(service))) == set(ids)
    with pytest.raises(UnknownVersion, match="there are"):
        service.rollback_items(RollbackRequest(catalog_version="none"))


def test_rows_of_other_versions_do_not_touch_the_scores(service):
    """A row that was replaced, or rolled back, has no share in the dense head's softmax."""
    first = scores(slate(service, dense_weight=5.0))
    strong = slate(service, dense_weight=5.0).items[0].item_id
    vector = service.catalog.current.items.vectors[service.catalog.current.rows.get(strong)]
    put(service, *[item_like(service, f"n{n}", embedding=vector.tolist()) for n in range(5)])
    moved = [{"item_id": f"n{n}", "embedding": (-vector).tolist()} for n in range(5)]
    put(service, *moved)
    service.rollback_items(RollbackRequest(catalog_version=base_of(service).version))
    assert scores(slate(service, dense_weight=5.0)) == pytest.approx(first, abs=1e-5)


def test_folding_the_insertions_changes_no_answer(service, monkeypatch):
    ids = base_of(service).items.ids
    service.hide_item(ids[5])
    for step in range(4):
        put(service, *[item_like(service, f"{step}-{n}", step * 50 + 3 * n) for n in range(4)])
        far = base_of(service).vectors[90 + step].tolist()
        put(service, {"item_id": ids[step], "embedding": far})
    expected = slate(service, dense_weight=0.5)
    assert service.catalog.current.base_trie.num_rows == 500
    monkeypatch.setattr(live_catalog_module, "MAX_INSERTED", 20)
    put(service, {"item_id": ids[40], "title": "over the bound"})
    service.catalog._folding.join()
    snapshot = service.catalog.current
    assert snapshot.base_trie.num_rows == snapshot.num_items == 520
    found = slate(service, dense_weight=0.5)
    assert scores(found) == pytest.approx(scores(expected), abs=1e-5)
    put(service, item_like(service, "after"))
    service.hide_item("0-1")
    now = scores(slate(service))
    assert set(now) == set(scores(expected)) - {"0-1"} | {"after"}


def test_searches_are_recorded_for_the_base_that_is_served(service, monkeypatch):
    """Through changes, a fold and a rollback behind it; the slates are those that are launched."""
    engine, first = service.engine, service.catalog.current
    lane, strategy = engine.schedulers["recommender"], engine._strategies["beam"]
    shapes = tuple(SearchShape(1, 50, 64, weighed) for weighed in (True, False))
    graphs = BeamSearchGraphs(
        lane.runner, lane.kv, strategy.model, None, SearchLimits(shapes, 64), EagerRecorder()
    )
    lane.searches = graphs
    engine.capture(first.trie)

    def recorded(base):
        until(lambda: graphs._trie.base is base)
        before = graphs.counts["replayed"]
        found = slate(service, k=20, dense_weight=0.5, strategy="beam")
        assert graphs.counts["replayed"] == before + 1, graphs.counts
        with monkeypatch.context() as patch:
            patch.setattr(lane, "searches", None)
            launched = slate(service, k=20, dense_weight=0.5, strategy="beam")
        assert scores(found) == pytest.approx(scores(launched), abs=1e-5)

    recorded(first.base_trie)
    put(service, *[item_like(service, f"a{n}", 7 * n) for n in range(9)])
    service.hide_item("a1")
    recorded(first.base_trie)
    monkeypatch.setattr(live_catalog_module, "MAX_INSERTED", 10)
    put(service, *[item_like(service, f"b{n}", 9 * n) for n in range(9)])
    service.catalog._folding.join()
    folded = service.catalog.current.base_trie
    assert folded is not first.base_trie
    recorded(folded)
    monkeypatch.setattr(live_catalog_module, "MAX_INSERTED", 8192)
    service.rollback_items(RollbackRequest(catalog_version=base_of(service).version))
    assert service.catalog.current.base_trie is first.base_trie
    recorded(first.base_trie)


def test_changes_survive_a_restart(tmp_path):
    with opened(tmp_path) as service:
        ids = base_of(service).items.ids
        put(service, item_like(service, "kept", price=0.5), {"item_id": ids[1], "title": "other"})
        service.hide_item(ids[2])
        back = put(service, {"item_id": ids[3], "embedding": [0.5] * 16}).catalog_version
        put(service, item_like(service, "undone"))
        service.rollback_items(RollbackRequest(catalog_version=back))
        expected = slate(service, dense_weight=0.5)
        there = service.item("kept")
        journal = service.catalog.journal
        assert journal.num_changes == 4 and len(journal.path.read_bytes()) == journal.length
    with opened(tmp_path) as service:
        found = slate(service, dense_weight=0.5)
        assert scores(found) == pytest.approx(scores(expected), abs=1e-5)
        assert found.catalog_version == expected.catalog_version
        assert service.item("kept") == there and service.item(ids[1]).title == "other"
        assert put(service, item_like(service, "later")).catalog_version.endswith(".6")
        service.rollback_items(RollbackRequest(catalog_version=expected.catalog_version))
        assert scores(slate(service, dense_weight=0.5)) == pytest.approx(scores(found), abs=1e-5)


def test_deleting_a_user_forgets_prefixes_of_earlier_versions(service):
    ids = base_of(service).items.ids
    service.add_events(EventsRequest(events=[EventInput(user_id="me", item_id=i) for i in ids[:3]]))
    ask = RecommendRequest(user=UserRef(id="me"), k=5, explain=True)
    service.recommend(ask)
    assert service.recommend(ask).explanation.root_tokens_computed == 0
    put(service, {"item_id": ids[1], "embedding": [0.5] * 16})
    service.delete_user("me")
    service.rollback_items(RollbackRequest(catalog_version=base_of(service).version))
    again = RecommendRequest(history=ids[:3], k=5, explain=True)
    assert service.recommend(again).explanation.root_tokens_cached == 0


WRITER = """
import sys, time
from pathlib import Path
from recserve.schemas.items import ItemsRequest
from recserve.service import Service, ServiceOptions
bundle, folder = sys.argv[1:]
options = ServiceOptions(journal=Path(folder) / "items")
service = Service.open(bundle, f"lmdb:{folder}/store", "cpu", options)
n = 0
while True:
    answer = service.put_items(ItemsRequest(items=[{"item_id": f"w{n}", "title": "Rose"}]))
    if answer.rejected:  # the semantic ids near a rose are taken: nothing more to lose
        time.sleep(60)
    n += 1
    print(answer.catalog_version, flush=True)
    if n > 12:  # the other process opens its service meanwhile
        time.sleep(0.02)
"""


def test_what_was_answered_is_in_the_files(tmp_path):
    """In a copy that is made while the service runs, which is what a kill leaves."""
    names = {f"w{n}" for n in range(12)}
    with opened(tmp_path / "running") as service:
        for name in sorted(names):
            assert put(service, {"item_id": name, "title": "Rose"}).inserted == 1
        shutil.copytree(tmp_path / "running", tmp_path / "left")
    with opened(tmp_path / "left") as service:
        assert service.catalog.current.items.number == len(names)
        assert names <= set(scores(slate(service)))
        assert put(service, {"item_id": "after", "embedding": [0.5] * 16}).inserted == 1


@pytest.mark.slow
def test_what_was_answered_survives_a_kill(tmp_path):
    command = [sys.executable, "-c", WRITER, str(shared_bundle()), str(tmp_path)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    answered = [writer.stdout.readline().strip() for _ in range(12)]
    with opened(tmp_path) as other, pytest.raises(JournalError, match="another process"):
        put(other, {"item_id": "mine", "embedding": [0.5] * 16})  # roses may all be taken by now
    os.kill(writer.pid, signal.SIGKILL)
    answered += [line.strip() for line in writer.stdout if line.endswith("\n")]
    writer.wait()
    with opened(tmp_path) as service:
        assert service.catalog.current.items.number >= len(answered)
        found = set(scores(slate(service)))
        assert {f"w{n}" for n in range(len(answered))} <= found
        assert put(service, {"item_id": "after", "embedding": [0.5] * 16}).inserted == 1


def test_a_torn_line_is_dropped_and_damage_is_an_error(tmp_path):
    path = tmp_path / "items" / "v.jsonl"
    journal = ItemJournal(path)
    assert journal.read() == []
    for number in (1, 2):
        journal.append(ChangeSet(number, hidden=("a",)))
    journal.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'1234abcd {"number": 3, "hi')
    journal = ItemJournal(path)
    assert [entry.number for entry in journal.read()] == [1, 2]
    stranger = ItemJournal(path)
    stranger.read()
    journal.replace([ChangeSet(2, hidden=("b",)), ChangeSet(2)])
    with pytest.raises(JournalError, match="another process changes"):
        stranger.append(ChangeSet(3))
    journal.append(ChangeSet(3, hidden=("c",)))
    journal.close()
    with pytest.raises(JournalError, match="restart"):
        stranger.append(ChangeSet(3))
    assert [entry.hidden for entry in ItemJournal(path).read()] == [("b",), (), ("c",)]
    assert not path.with_name("v.jsonl.new").exists()
    path.write_bytes(whole.replace(b'"a"', b'"b"', 1))
    with pytest.raises(JournalError, match="line 1 is damaged"):
        ItemJournal(path).read()


@contextmanager
def files_of_at_most(num_bytes):
    """A disk that takes the beginning of a write and refuses the rest, as a full one does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_refuses_the_change_and_keeps_what_was_answered(tmp_path):
    path = tmp_path / "items" / "v.jsonl"
    journal = ItemJournal(path)
    entries = [ChangeSet(number, hidden=("an item",)) for number in range(1, 4)]
    journal.append(entries[0])
    length = path.stat().st_size
    for room in (0, 1, length - 1):
        with files_of_at_most(length + room):
            with pytest.raises(JournalError, match="not writable"):
                journal.append(entries[1])
            with pytest.raises(JournalError, match="not writable"):
                journal.replace(entries)
        assert path.stat().st_size == length
        assert not path.with_name("v.jsonl.new").exists()
    journal.append(entries[2])
    journal.close()
    assert ItemJournal(path).read() == [entries[0], entries[2]]


def test_every_answer_is_of_the_version_it_names(tmp_path):
    """Reads go on during 60 changes: each is exactly what its version holds, with its scores."""
    holds: dict[str, set[str]] = {}
    with opened(tmp_path) as service:
        ids = base_of(service).items.ids
        holds[base_of(service).version] = visible = set(ids)
        done = threading.Event()

        def read(seed):
            draw, found = np.random.default_rng(seed), []
            while not done.is_set():
                history = [ids[i] for i in draw.integers(0, 500, 4)]
                strategy = ("beam", "speculative")[int(draw.integers(2))]
                weight = float(draw.integers(2))
                found.append(
                    slate(service, history=history, k=750, strategy=strategy, dense_weight=weight)
                )
                ranked = rank(service, *ids[:20], history=history)
                known = {i.item_id for i in ranked.items}
                found.append((ranked.catalog_version, known))
            return found

        with ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(read, seed) for seed in range(2)]
            draw = np.random.default_rng(9)
            for change in range(60):
                kind = int(draw.integers(3))
                if kind == 0:
                    victim = sorted(visible)[int(draw.integers(len(visible)))]
                    visible = visible - {victim}
                    version = service.catalog.current.items.number + 1
                    holds[f"{base_of(service).version}.{version}"] = visible
                    service.hide_item(victim)
                else:
                    like = int(draw.integers(500))
                    name = f"n{change}" if kind == 1 else ids[int(draw.integers(20))]
                    visible = visible | {name}
                    version = service.catalog.current.items.number + 1
                    holds[f"{base_of(service).version}.{version}"] = visible
                    answer = put(service, item_like(service, name, like))
                    assert not answer.rejected
            time.sleep(0.2)
            done.set()
            answers = [one for reader in readers for one in reader.result()]
        assert service.recommender.illegal_items == 0
    versions = set()
    for answer in answers:
        if isinstance(answer, tuple):
            version, known = answer
            assert known == holds[version] & set(ids[:20])
            continue
        versions.add(answer.catalog_version)
        assert {i.item_id for i in answer.items} == holds[answer.catalog_version]
        assert all(i.source == "model" for i in answer.items)
    assert len(versions) > 3


@pytest.mark.parametrize("fields", [("title",), ("categories",), ("title", "categories")])
def test_null_removes_the_words_of_an_item(service, fields):
    """As it removes a time or an attribute; what a read returns can be put."""
    put(service, item_like(service, "worded", title="Red", categories=["Care"]))
    nulls = dict.fromkeys(fields)
    assert put(service, {"item_id": "worded", **nulls}).updated == 1
    item = service.item("worded")
    assert item.title == (None if "title" in fields else "Red")
    assert item.categories == ([] if "categories" in fields else ["Care"])
    assert put(service, {"item_id": "worded", "title": item.title}).updated == 1
    assert service.item("worded").title == item.title
    for absent in ({}, {"price": 1.0}):  # an absent field stays
        put(service, {"item_id": "worded", **absent})
        assert service.item("worded").categories == item.categories
    assert put(service, {"item_id": "worded", "embedding": None}).updated == 1
