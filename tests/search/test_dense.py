"""`dense` against plain loops: budgets, merging, search, deduplication, filters, company."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from recserve.core.allowed import AllowedItems
from recserve.core.diversity import Cap
from recserve.core.request import SlateQuery
from recserve.engine.build import EngineModels, build_engine
from recserve.models.attention import DenseAttention
from recserve.models.dense_retriever import (
    RetrieverConfig,
    item_vectors,
    load_retriever,
    save_retriever,
)
from recserve.search.strategies import dense
from recserve.search.strategies.dense import merge_alike, split_budgets
from recserve.search.strategy import Heads
from tests.support.dense_worlds import ORDINARY, SMALL, World
from tests.support.listed_groups import ListedGroups
from tests.support.recommenders import draw_prefix
from tests.support.slates import plain_first_k


@pytest.fixture(scope="module")
def world():
    return World()


def plain_budgets(shares, places):
    whole = [int(share * places + 1e-9) for share in shares]
    rest = [share * places - n for share, n in zip(shares, whole, strict=True)]
    for i in sorted(range(len(shares)), key=lambda i: -round(rest[i], 9))[: places - sum(whole)]:
        whole[i] += 1
    return whole


def plain_merge(vectors, budgets):
    leaders = {}
    merged = [0] * len(budgets)
    order = sorted(range(len(budgets)), key=lambda v: -budgets[v])
    for place, v in enumerate(order):
        alike = [u for u in order[:place] if float(vectors[u] @ vectors[v]) >= dense.MERGE_COSINE]
        leaders[v] = leaders[alike[0]] if alike else v
        merged[leaders[v]] += budgets[v]
    return merged


@torch.inference_mode()
def plain_slate(world, request):
    """The whole of it, one request, one vector and one item at a time, over all items."""
    model, config = world.model, world.retriever.config
    tokens = request.prefix.inputs.tokens[None]
    hidden = model(tokens, torch.arange(tokens.shape[1]), DenseAttention())[0, -1]
    mix = config.outcome_shares if request.outcome is None else request.outcome
    mix = [share / sum(mix) for share in mix]
    vectors, shares = [], []
    for o, outcome in enumerate(mix):
        for d, offset in enumerate(config.offset_shares):
            vector = world.retriever.queries(hidden, torch.tensor(o), torch.tensor(d))
            vectors.append(vector.double().numpy())
            shares.append(outcome * offset)
    budgets = plain_merge(vectors, plain_budgets(shares, request.k))
    owned = {v: [] for v in range(len(vectors)) if budgets[v]}
    excluded = set() if request.excluded is None else set(request.excluded.tolist())
    for row, item in enumerate(world.vectors):
        if row in excluded or (request.allowed is not None and not request.allowed.mask()[row]):
            continue
        cosines = {v: float(vectors[v] @ item) for v in owned}
        best = max(cosines, key=lambda v: (cosines[v], -v))
        owned[best].append((-cosines[best], row))
    taken, rest = [], []
    for v, items in owned.items():
        items.sort()
        taken += items[: budgets[v]]
        rest += items[budgets[v] :]
    order = sorted(taken) + sorted(rest)
    kept = set(plain_first_k([row for _, row in order], request.caps, request.k))
    slate = sorted(item for item in order if item[1] in kept)
    scale = float(world.retriever.scale)
    return [row for _, row in slate], [-minus * scale for minus, _ in slate]


def test_budgets_equal_a_plain_loop():
    draw = np.random.default_rng(0)
    shares = draw.dirichlet(np.ones(7), 200)
    shares[:50] = 1 / 7
    places = draw.integers(1, 60, 200)
    budgets = split_budgets(shares, places)
    assert budgets.tolist() == [plain_budgets(*one) for one in zip(shares, places, strict=True)]
    assert (budgets.sum(1) == places).all()


def test_merging_equals_a_plain_loop():
    draw = np.random.default_rng(1)
    vectors = draw.standard_normal((60, 1, 8)) + 0.13 * draw.standard_normal((60, 9, 8))
    vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
    budgets = draw.integers(0, 4, (60, 9))
    merged = merge_alike(vectors, budgets)
    assert merged.tolist() == [plain_merge(*one) for one in zip(vectors, budgets, strict=True)]
    assert (merged.sum(1) == budgets.sum(1)).all()
    num_left = (merged > 0).sum(1)
    assert num_left.min() < 9 and len(set(num_left.tolist())) > 2


@pytest.mark.parametrize("form", ["items", "codes"])
@pytest.mark.parametrize("overfetch", [1, 1000])
def test_slates_equal_a_plain_loop(form, overfetch, monkeypatch):
    """With everything fetched exactly; with little fetched the slate is full and best first."""
    monkeypatch.setattr(dense, "OVERFETCH", overfetch)
    world = World(form)
    draw = np.random.default_rng(2)
    requests = [world.request(0, 1), world.request(1, 40), world.request(2, 1000)]
    for seed in range(3, 12):
        allowed = AllowedItems.of(draw.random(len(ORDINARY)) < 0.3) if seed % 3 else None
        excluded = draw.integers(0, len(ORDINARY), seed * 3) if seed % 2 else None
        outcome = draw.random(2) + 0.01 if seed % 4 else None
        offsets = np.cumsum([0, *draw.integers(0, 3, len(ORDINARY))])
        listed = ListedGroups(offsets, draw.integers(0, 12, offsets[-1]))
        caps = (Cap(listed, 2),) if seed % 5 < 2 else ()
        fields = {"excluded": excluded, "allowed": allowed, "outcome": outcome, "caps": caps}
        requests.append(world.request(seed, int(draw.integers(1, 30)), **fields))
    for request, slate in zip(requests, world.engine.run_many(requests), strict=True):
        rows, scores = plain_slate(world, request)
        assert not slate.exact and slate.rounds == 0
        assert len(slate.rows) == len(rows) == len(set(slate.rows.tolist()))
        assert (np.diff(slate.scores) <= 0).all()
        if overfetch == 1000:
            assert slate.rows.tolist() == rows
            np.testing.assert_allclose(slate.scores, scores, atol=1e-4)
        if request.allowed is not None:
            assert request.allowed.at(slate.rows).all()
        if request.excluded is not None:
            assert not set(slate.rows.tolist()) & set(request.excluded.tolist())


@pytest.mark.parametrize("apart", [0.15, 1.0])
def test_an_item_belongs_to_its_nearest_vector_at_any_depth(apart):
    """Also an item that only a farther vector's search reaches. Vectors are near or far apart."""
    codes = torch.unique(
        torch.randint(0, 14, (2500, 4), generator=torch.Generator().manual_seed(1)), dim=0
    )
    world = World("items", codes)
    world.retriever.outcomes.weight.data.mul_(apart)
    draw = np.random.default_rng(0)
    requests = [
        world.request(seed, int(draw.integers(1, 60)), outcome=draw.random(2) + 0.01)
        for seed in range(100)
    ]
    for request, slate in zip(requests, world.engine.run_many(requests), strict=True):
        rows, scores = plain_slate(world, request)
        assert slate.rows.tolist() == rows
        np.testing.assert_allclose(slate.scores, scores, atol=1e-4)


def test_company_does_not_change_a_slate(world):
    draw = np.random.default_rng(5)
    requests = []
    for seed in range(12):
        allowed = AllowedItems.of(draw.random(len(ORDINARY)) < 0.1) if seed % 4 == 1 else None
        requests.append(world.request(seed, 1 + 3 * seed, allowed=allowed))
    others = [
        SlateQuery(prefix=draw_prefix(world.model, 5, 90 + i), trie=world.trie, k=5, beam_width=8)
        for i in (0, 1)
    ]
    together = world.engine.run_many([*requests, *others])
    assert [answer.exact for answer in together] == [False] * 12 + [True] * 2
    for request, slate in zip(requests, together, strict=False):
        alone = build_engine(EngineModels(world.model, heads=world_heads(world)), SMALL).run(
            request
        )
        assert alone.rows.tolist() == slate.rows.tolist()
        np.testing.assert_allclose(alone.scores, slate.scores, atol=1e-4)


@pytest.mark.parametrize(
    ("num_items", "gone", "allowed", "excluded", "depth"),
    [
        (1_000_000, 0, None, 0, 30),
        (1_000_000, 100_000, None, 0, 34),  # 30 / 0.9: as many more as are gone among those found
        (900_000, 100_000, None, 0, 30),  # what is gone is not in the index
        (1_000_000, 990_000, None, 0, 3000),
        (1_000_000, 100_000, 500_000, 0, 67),
        (900_000, 100_000, 500_000, 200, 260),
        (20, 999_980, None, 5, 20),
        (0, 1_000_000, None, 0, 1),
    ],
)
def test_the_first_depth_grows_by_the_share_that_is_gone(num_items, gone, allowed, excluded, depth):
    """Ten places of a million rows, of which the index has some."""
    removed = torch.arange(gone) if gone else None
    trie = SimpleNamespace(num_rows=1_000_000, removed_rows=removed)
    bitmap = None if allowed is None else AllowedItems.of(np.arange(1_000_000) < allowed)
    request = SimpleNamespace(
        k=10, trie=trie, allowed=bitmap, excluded=np.arange(excluded) if excluded else None
    )
    assert dense.first_depth(request, num_items) == depth


def world_heads(world):
    return Heads(retriever=world.retriever)


def test_every_valid_item_comes_where_k_is_larger(world):
    allowed = np.zeros(len(ORDINARY), dtype=bool)
    allowed[[3, 40, 77]] = True
    fields = {"allowed": AllowedItems.of(allowed), "excluded": np.array([40, 40])}
    slate = world.engine.run(world.request(4, 50, **fields))
    assert sorted(slate.rows.tolist()) == [3, 77]
    nobody = AllowedItems.of(np.zeros(len(ORDINARY), dtype=bool))
    nothing = world.engine.run(world.request(4, 5, allowed=nobody))
    assert nothing.rows.size == 0


def test_a_mix_moves_the_places_between_outcomes(world):
    """Over 20 users, an even mix is nearer to the slates of either outcome than they are."""

    def slate(seed, mix):
        request = world.request(seed, 12, outcome=np.array(mix))
        return set(world.engine.run(request).rows.tolist())

    apart = with_click = with_repin = 0
    for seed in range(20):
        click, repin, both = (slate(seed, mix) for mix in ([1.0, 0.0], [0.0, 1.0], [0.5, 0.5]))
        apart += len(click & repin)
        with_click += len(click & both)
        with_repin += len(repin & both)
    assert apart < min(with_click, with_repin) and max(with_click, with_repin) < 20 * 12


def test_a_mix_of_another_length_or_no_index_fails_alone(world):
    wrong = world.request(1, 5, outcome=np.array([1.0]))
    bare = SlateQuery(
        prefix=draw_prefix(world.model, 3, 1), trie=world.trie, k=5, beam_width=5, strategy="dense"
    )
    right = world.request(2, 5)
    futures = [world.engine.submit(r) for r in (wrong, right, bare)]
    while world.engine.step():
        pass
    with pytest.raises(ValueError, match=r"outcome is \(1,\)"):
        futures[0].result()
    assert len(futures[1].result().rows) == 5
    with pytest.raises(ValueError, match="needs the index"):
        futures[2].result()


def test_saved_and_loaded_are_the_same(world, tmp_path):
    save_retriever(world.retriever, tmp_path)
    loaded = load_retriever(tmp_path, world.model)
    assert loaded.config == world.retriever.config
    np.testing.assert_array_equal(item_vectors(loaded, world.model).numpy(), world.vectors)
    (tmp_path / "config.json").write_text('{"hidden_size": 32}')
    with pytest.raises(ValueError, match="no usable dense retriever"):
        load_retriever(tmp_path, world.model)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("outcome_shares", (1.0,), "one share for each"),
        ("offset_shares", (0.5, 0.6, -0.1), "shares >= 0"),
        ("offset_unit", "days", "choose 'events' or 'seconds'"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(world, field, value, message):
    with pytest.raises(ValueError, match=message):
        RetrieverConfig(**{**vars(world.retriever.config), field: value})
