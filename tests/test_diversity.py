"""Caps on categories and prefixes: a plain greedy loop gives the same slates, in every strategy."""

from collections import Counter

import numpy as np
import pytest
from live_server import live
from tiny_bundle import shared_bundle

from recserve.core.diversity import Cap, first_k
from recserve.core.request import RecommendRequest
from recserve.engine.engine import Engine, EngineConfig
from recserve.engine.heads import Heads
from recserve.messages import Diversity, Exclude, InvalidRequest, RecommendBody
from recserve.service import Service
from tests.test_engine import CATALOGUES, draw_root, make
from tests.test_speculative import make_head


def plain_first_k(rows, caps, k):
    """Item rows, one after the other, each if all of its groups have a place left."""
    counts, kept = Counter(), []
    for row in rows:
        mine = {
            ((c, group), cap.limit)
            for c, cap in enumerate(caps)
            for group in cap.groups[cap.offsets[row] : cap.offsets[row + 1]].tolist()
        }
        if len(kept) < k and all(counts[key] < limit for key, limit in mine):
            counts.update(key for key, _ in mine)
            kept.append(row)
    return kept


def draw_cap(draw, items, most, groups, limit):
    """Each item in 0 to `most` groups, now and then twice in the same one."""
    lists = [draw.integers(0, groups, draw.integers(0, most + 1)) for _ in range(items)]
    offsets = np.cumsum([0, *map(len, lists)])
    return Cap(offsets, np.concatenate([np.zeros(0, np.int64), *lists]).astype(np.int64), limit)


@pytest.mark.parametrize("seed", range(40))
def test_first_k_equals_a_greedy_loop(seed):
    draw = np.random.default_rng(seed)
    items = int(draw.integers(1, 200))
    caps = tuple(
        draw_cap(draw, items, min(most, 20), 20, int(draw.integers(1, 6)))
        for most in (1, 3)[: 1 + seed % 2]
    )
    rows = draw.permutation(items)[: draw.integers(0, items + 1)]
    for k in (1, 5, 300):
        places = first_k(rows, caps, k)
        assert rows[places].tolist() == plain_first_k(rows.tolist(), caps, k)
    assert first_k(rows, (), 7).tolist() == list(range(min(7, rows.size)))


@pytest.mark.parametrize("strategy", ["beam", "speculative"])
@pytest.mark.parametrize("dense_weight", [0.0, 1.5])
def test_finished_beams_are_capped(strategy, dense_weight):
    """The capped slate is the greedy choice from all that the beams found, best first."""
    codes = CATALOGUES["ordinary"]
    model, trie = make(codes, "items", "children")
    config = EngineConfig(kv_bytes=16 * 2**20)
    engine = Engine(model, config=config, heads=Heads(make_head(model, "from-target")))
    draw = np.random.default_rng(0)
    for seed in range(6):
        caps = (draw_cap(draw, len(codes), 2, 6, 2), draw_cap(draw, len(codes), 1, 9, 1))
        root = draw_root(model, 5, seed)
        fields = {"strategy": strategy, "dense_weight": dense_weight}
        everything = engine.run(RecommendRequest(root, trie, 40, 40, **fields))
        whole = everything.rows.tolist()
        for k in (3, 10):
            slate = engine.run(RecommendRequest(root, trie, k, 40, caps=caps, **fields))
            kept = plain_first_k(whole, caps, k)
            assert slate.exact and slate.rows[: len(kept)].tolist() == kept
            if not dense_weight:  # with it the head's items stand behind the first 40
                assert slate.rows.tolist() == kept


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    store = tmp_path_factory.mktemp("store")
    with Service.open(shared_bundle(), f"lmdb:{store}", "cpu") as opened:
        yield opened


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    store = tmp_path_factory.mktemp("store")
    with live(Service.open(shared_bundle(), f"lmdb:{store}", "cpu")) as running:
        yield running


def test_groups_are_categories_and_prefixes(service):
    snapshot = service.runtime.snapshot
    categories, codes = snapshot.catalog.items.categories, snapshot.catalog.index.codes
    for level in range(codes.shape[1]):
        (cap,) = snapshot.groups.caps(Diversity(prefix=(level, 3)))
        prefixes = [tuple(code[: level + 1]) for code in codes.tolist()]
        pairs = set(zip(prefixes, cap.groups.tolist(), strict=True))
        assert len(pairs) == len(set(prefixes)) == len(set(cap.groups.tolist()))
    (cap,) = snapshot.groups.caps(Diversity(category=2))
    groups = [cap.groups[a:b].tolist() for a, b in zip(cap.offsets, cap.offsets[1:], strict=False)]
    names = dict(zip(sum(groups, []), sum(categories, []), strict=True))
    assert [[names[g] for g in found] for found in groups] == [list(c) for c in categories]
    assert len(set(names.values())) == len(names)
    with pytest.raises(InvalidRequest, match=f"levels are 0..{codes.shape[1] - 1}, got 9"):
        snapshot.groups.caps(Diversity(prefix=(9, 1)))
    assert snapshot.groups.caps(None) == snapshot.groups.caps(Diversity()) == ()


@pytest.mark.parametrize("history", ["known", "none"])
def test_slates_keep_to_the_caps_filled_places_too(service, history):
    catalog = service.runtime.snapshot.catalog
    ids = catalog.items.ids
    rows = {item: row for row, item in enumerate(ids)}
    body = {"history": ids[:4] if history == "known" else ["gone"], "exclude": Exclude(seen=False)}
    answer = service.recommend(
        RecommendBody(**body, k=30, diversity=Diversity(category=1, prefix=(0, 4)))
    )
    found = [rows[item.item_id] for item in answer.items]
    assert len(set(found)) == 30 and "fewer_than_k" not in answer.degraded
    paths = Counter(path for row in found for path in catalog.items.categories[row])
    first = Counter(catalog.index.codes[row][0] for row in found)
    assert max(paths.values()) == 1 and max(first.values()) <= 4
    sources = [item.source for item in answer.items]
    assert sources == sorted(sources)  # model before popular
    total = len({path for found in catalog.items.categories for path in found})
    every = service.recommend(RecommendBody(**body, k=500, diversity=Diversity(category=1)))
    assert len(every.items) <= total and "fewer_than_k" in every.degraded


@pytest.mark.parametrize(
    ("diversity", "param"),
    [
        ({"category": 0}, "diversity.category"),
        ({"prefix": [1]}, "diversity.prefix"),
        ({"prefix": [-1, 2]}, "diversity.prefix[0]"),
        ({"prefix": [40, 2]}, "diversity.prefix"),
        ({"brand": 2}, "diversity.brand"),
    ],
)
def test_what_is_refused(client, diversity, param):
    answer = client.post("/v1/recommend", json={"history": ["x"], "diversity": diversity})
    assert answer.status_code == 422
    assert answer.json()["error"]["param"] == param, answer.text
